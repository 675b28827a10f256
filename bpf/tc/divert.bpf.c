/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the divert device: gives packets to node sockets. */

#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "tc/divert.h"
#include "tc/packet.h"

/* Ingress of the divert device: packets that to_endpoint sent here. */
static __always_inline int deliver_verdict(struct __sk_buff *skb)
{
	struct endpoint *ep;
	struct packet p;

	/* On its way here it became an ordinary packet again: see stop(). */
	if (skb->mark == config_reject_mark) {
		bpf_skb_change_type(skb, PACKET_MULTICAST_);
		return TC_ACT_OK;
	}
	if (read_packet(skb, &p) != PACKET_TCP)
		return TC_ACT_OK;
	ep = endpoint_at(p.ip.daddr);
	if (ep && divert(skb, &p, ep->id) >= DIVERT_TAKEN)
		count(REASON_DELIVER_NODE);
	return TC_ACT_OK;
}

SEC("tc")
int deliver(struct __sk_buff *skb)
{
	return or_next_filter(deliver_verdict(skb));
}

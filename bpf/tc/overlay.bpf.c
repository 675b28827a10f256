/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The VXLAN device: what other nodes send to containers, and what leaves for them. */

#include "include/abi/reason.h"
#include "include/endpoint.h"
#include "include/mirror.h"
#include "policy/decide.h"
#include "policy/filter.h"
#include "tc/crossing.h"
#include "tc/divert.h"
#include "tc/firewall.h"
#include "tc/nat.h"
#include "tc/packet.h"
#include "tc/redirect.h"
#include "tc/relay.h"

/* Ingress of the VXLAN device. */
static __always_inline int from_overlay_verdict(struct __sk_buff *skb)
{
	struct flow_key k = {};
	struct endpoint *ep;
	bool taken = false;
	struct packet p;
	int kind, action;

	if (has_index(skb, INDEX_JUDGED))
		return TC_ACT_OK;
	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	/* What comes from there is taken for the container's own. */
	if (kind == PACKET_TCP && is_mirror(p.ip.saddr))
		return drop(REASON_DROP_FORGED_LOOPBACK);
	ep = endpoint_at(p.ip.daddr);
	/* For the node itself: its container has been asked about on its own node, and this node's
	 * tables do not know what nodes and other nodes' containers may do. */
	if (!ep)
		return TC_ACT_OK;
	action = filter_for(skb, &p, kind, 0, ep);
	if (action != FILTER_PASS)
		return action;
	if (kind == PACKET_TCP && asks_firewall(skb, &p))
		return config_firewall_ns ? TC_ACT_OK : answer_firewall(skb, &p, 0);
	if (kind == PACKET_TCP && !config_firewall_ns)
		note_firewall_answer(&p);
	if (kind != PACKET_TCP || !(ep->flags & ENDPOINT_INTERCEPTED))
		return enter(skb, &p, ep);
	switch (meets_forward_chain(skb, &p, ep, &taken)) {
	case FORWARD_ROUTED:
		return TC_ACT_OK;
	case FORWARD_WAITS: /* then this is a RST, for what waited */
		end_time_wait(skb, &p, BPF_F_INGRESS);
	}
	action = towards(skb, &p, ep, 0, &taken);
	if (action != TC_ACT_OK || taken || skb->mark == config_reject_mark || !packets_redirected)
		return action;
	/* As to_endpoint has it. */
	if (ep->flags & ENDPOINT_STACK || is_crossed(skb, &p, ep, &k))
		return by_stack(REASON_ROUTE_INTERCEPTED);
	return enter(skb, &p, ep);
}

SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	return or_next_filter(from_overlay_verdict(skb));
}

/* Egress of the VXLAN device: what a container of this node begins is asked about, and remembered,
 * once more, because the node's firewall may have given it another destination on the way; what it
 * sent to an address beyond the overlay, every packet: from_endpoint asked about another address,
 * or left it to this. Of a node socket the other node then sees this node's address; here it is
 * known whose it is. */
static __always_inline int to_overlay_verdict(struct __sk_buff *skb)
{
	__be32 translated = 0;
	struct packet p;
	int kind, action;

	if (has_index(skb, INDEX_REDIRECTED) || was_queued(skb))
		return TC_ACT_OK; /* from_endpoint asked, or this before it waited in the shaping device */
	kind = read_packet(skb, &p);
	if (kind != PACKET_OTHER)
		note_translated(skb, &p);
	if (config_relay_groups && kind == PACKET_TCP) {
		action = relay_return(skb, &p);
		if (action >= 0)
			return action;
	}
	if (kind == PACKET_OTHER || !(has_policy() || (kind == PACKET_TCP && is_syn(&p))))
		return TC_ACT_OK;
	if (kind == PACKET_TCP && !is_syn(&p) && !has_index(skb, INDEX_BEYOND))
		return TC_ACT_OK;
	if (kind == PACKET_TCP && is_syn(&p))
		translated = translated_sender(skb, &p);
	if (!translated)
		translated = masqueraded_sender(skb, &p);
	/* This node's tables do not know what nodes and other nodes' containers may do. */
	if (!translated && !endpoint_at(p.ip.saddr))
		return TC_ACT_OK;
	action = kind == PACKET_TCP ? filter_tcp(skb, &p, 0, 0, translated)
	                            : filter_other(skb, &p, 0, 0, translated);
	/* As in to_endpoint. */
	if (action == FILTER_PASS)
		return TC_ACT_OK;
	return action == TC_ACT_SHOT ? action : redeliver(skb);
}

SEC("tc")
int to_overlay(struct __sk_buff *skb)
{
	return or_next_filter(to_overlay_verdict(skb));
}

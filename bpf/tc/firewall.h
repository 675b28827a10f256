/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Probes of the firewalls (sock/firewall.h): does the operator still let pass what goes past them?
 * The agent connects from the container's own stack, as a process that is not intercepted would,
 * and marks the SYN by an option that containers cannot send. It goes through the forward chains
 * and is answered where the connection would arrive, so that no program sees it:
 *
 *   from_endpoint  lets the option out, for a SYN that the agent said it would send
 *   to_endpoint    of the destination: answers. On a node that does not have its forward chain see
 *                  connections from_overlay does, before it
 *   to_endpoint    of the container that asked (or from_overlay, likewise): notes the answer
 *
 * The container could send the agent's socket an answer of its own; what is noted came from outside
 * of it. Who did not see the SYN has to guess its sequence number. */
#ifndef HEDDLE_TC_FIREWALL_H
#define HEDDLE_TC_FIREWALL_H

#include "include/abi/firewall.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/maps.h"
#include "tc/packet.h"
#include "tc/probe.h"
#include "tc/tcp_option.h"

/* Whether packet p, out of a container, is a SYN of the agent's. */
static __noinline bool sends_firewall_probe(const struct packet *p)
{
	struct firewall_probe *probe;
	struct flow_key k;

	if (!p || !is_syn(p))
		return false;
	k = packet_tuple(p);
	probe = bpf_map_lookup_elem(&firewall_probes, &k);
	if (!probe)
		return false;
	probe->expected = bpf_htonl(bpf_ntohl(p->tcp.seq) + 1);
	return true;
}

/* Whether packet p is such a SYN, of this network's. */
static __noinline bool asks_firewall(struct __sk_buff *skb, const struct packet *p)
{
	struct syn_option o;

	if (!p || !is_syn(p) || find_option(skb, p, &o) != 1)
		return false;
	return o.version_network == bpf_htons(OPTION_FIREWALL << 12 | config_network_id);
}

/* Answers it, by the device that the frame is on: how is bpf_redirect's. */
static __noinline int answer_firewall(struct __sk_buff *skb, const struct packet *p, __u32 how)
{
	if (!p || make_answer(skb, p))
		return TC_ACT_SHOT;
	count(REASON_PROBE_FIREWALL);
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = 0;
	skb->tc_index = 0;
	return bpf_redirect(skb->ifindex, how);
}

/* Notes the answer to a probe of this node's, if packet p, for a container, is one: others may go
 * where it went. */
static __noinline int note_firewall_answer(const struct packet *p)
{
	const __u8 syn_ack = TCP_FLAG_SYN_ | TCP_FLAG_ACK_;
	struct firewall_probe *probe;
	struct firewall_key to = {};
	struct flow_key k = {};
	__u64 now;

	if (!p || (p->tcp.flags & syn_ack) != syn_ack)
		return 0;
	k.saddr = p->ip.daddr;
	k.daddr = p->ip.saddr;
	k.sport = p->tcp.dest;
	k.dport = p->tcp.source;
	k.ipv6 = p->ipv6;
	probe = bpf_map_lookup_elem(&firewall_probes, &k);
	if (!probe || !probe->expected || probe->expected != p->tcp.ack_seq)
		return 0;
	probe->passed = 1;
	now = bpf_ktime_get_ns();
	to.src = k.saddr;
	to.port = k.dport;
	set_overlay(&to.dst, p->ipv6, k.daddr);
	bpf_map_update_elem(&passed_firewall_at, &to, &now, BPF_ANY);
	return 1;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A direct SYN for an endpoint none of whose intercepted sockets listens there: a process of the
 * container that is not intercepted may. The connection is then relayed into the container's own
 * namespace by rewriting addresses: a:sport -> b:P becomes x:sport -> y:port and back. So a sender
 * need not know which of a container's listeners are intercepted, and a closed port is refused by
 * the container's own stack. Decision 0004. Before Linux 6.6 the node's listeners that have
 * SO_REUSEPORT are reached so, too: by the divert device, as from the overlay, and the kernel's own
 * lookup chooses among them. */
#ifndef HEDDLE_TC_RELAY_H
#define HEDDLE_TC_RELAY_H

#include "include/config.h"
#include "include/count.h"
#include "include/flow_table.h"
#include "include/maps.h"
#include "include/once.h"
#include "policy/filter.h"
#include "tc/packet.h"
#include "tc/translate.h"

/* Source ports for relayed connections that cannot keep their own: above the ports that Linux gives
 * out. */
#define RELAY_PORT_FIRST 61000
#define RELAY_PORTS      4536
#define RELAY_PORT_TRIES 8

/* The flow of outer, a 4-tuple on the underlay, if it is the one that container packets with key
 * back belong to. The two maps are LRU and an outer 4-tuple may come again for another target, so
 * each is checked against the other. */
static __always_inline struct flow *relayed_flow(const struct flow_key *outer, const struct flow_key *back)
{
	struct flow *flow = bpf_map_lookup_elem(&flow_by_wire, outer);

	struct flow_key is;

	if (!flow || flow->kind != FLOW_RELAY)
		return NULL;
	is = relay_key(flow, flow->relay_port);
	return same_tuple(&is, back) ? flow : NULL;
}

/* Whether behind the relay back belongs to a connection other than outer's that may still live. */
static __always_inline bool relay_taken(const struct flow_key *back, const struct flow_key *outer)
{
	struct flow_key *other = bpf_map_lookup_elem(&wire_by_relay, back);
	struct flow *flow;

	if (!other ||
	    (other->saddr == outer->saddr && other->sport == outer->sport && other->dport == outer->dport))
		return false;
	flow = relayed_flow(other, back);
	return flow && !has_ended(flow);
}

/* The source port of a new connection behind the relay: its own, unless another connection of the
 * same two addresses has it, by another direct port. 0 if none is found. Not static, so that the
 * verifier looks at it once. */
__noinline __u32 relay_port(const struct flow *flow, const struct flow_key *outer)
{
	struct flow_key back;
	__be16 port;
	int i;

	if (!flow || !outer)
		return 0;
	port = outer->sport;
	for (i = 0; i < RELAY_PORT_TRIES; i++) {
		back = relay_key(flow, port);
		if (!relay_taken(&back, outer))
			return port;
		port = bpf_htons(RELAY_PORT_FIRST + bpf_get_prandom_u32() % RELAY_PORTS);
	}
	return 0;
}

/* Remembers that one end said that it ends, so that a later connection may take the place. */
static __always_inline void note_end(struct flow *flow, const struct flow_key *outer, const struct packet *p,
                                     __u16 by)
{
	bool reset = p->tcp.flags & TCP_FLAG_RST_;
	__u16 more = reset ? ENDED : by, was;
	__u32 reason = REASON_RELAY_OPENED;

	if (!(p->tcp.flags & (TCP_FLAG_RST_ | TCP_FLAG_FIN_)) || has_ended(flow))
		return;
	was = add_ended(flow, more);
	if ((was & ENDED) == ENDED || ((was | more) & ENDED) != ENDED)
		return;
	/* A RST is how connections end that a changed policy forbids, too. */
	if (reset && has_policy() && decide_flow(flow))
		reason = REASON_CUT_POLICY;
	relay_ends(outer, flow, reason, reset && by == ENDED_BY_SENDER ? ECONNRESET_ : 0);
}

/* Tells that a connection is established, by the first that its sender says after the SYN. */
static __always_inline void note_established(struct flow *flow, const struct flow_key *outer,
                                             const struct packet *p)
{
	if (flow->ended & (RELAY_TOLD | ENDED) || p->tcp.flags & TCP_FLAG_RST_ ||
	    add_ended(flow, RELAY_TOLD) & (RELAY_TOLD | ENDED))
		return;
	report_relay(outer, flow, FLOW_EVENT_OPENED, REASON_RELAY_OPENED, 0);
}

/* Remembers the way back of a connection that lives once more, if it is forgotten: there are fewer
 * places for it than all owners have of flows, and the kernel then chooses whose goes. */
static __noinline int restore_back(const struct flow_key *outer, const struct flow *flow)
{
	struct flow_key back;

	if (!outer || !flow || has_ended(flow))
		return 0;
	happened(ONCE_RELAYED);
	back = relay_key(flow, flow->relay_port);
	if (bpf_map_lookup_elem(&wire_by_relay, &back) ||
	    bpf_map_update_elem(&wire_by_relay, &back, outer, BPF_NOEXIST))
		return 0;
	count(REASON_RELAY_RESTORED);
	return 0;
}

/* Whether the relay leads to where its endpoint still is. */
static __always_inline bool relay_leads(const struct flow *flow)
{
	return (config_relay_groups && flow->ifindex == config_divert_ifindex) || relayed_to(flow);
}

/* Hands a rewritten packet to the node's own stack, by whose lookup it finds its socket. */
static __always_inline int into_group(struct __sk_buff *skb, bool ipv6)
{
	__be16 proto = bpf_htons(ETH_P_IP);

	/* The header that add_header made is empty, and is read there. */
	if (config_underlay_raw && !ipv6 &&
	    bpf_skb_store_bytes(skb, ETH_PROTO_OFFSET, &proto, sizeof(proto), 0))
		return TC_ACT_SHOT;
	return redeliver(skb);
}

static __always_inline int relay_forward(struct __sk_buff *skb, const struct packet *p,
                                         const struct flow *flow)
{
	struct flow_key inner = {.sport = flow->relay_port, .dport = flow->dst_port};
	__u32 ifindex = flow->ifindex;
	bool ipv6 = flow->ipv6;
	struct address src, dst;

	set_overlay(&src, flow->ipv6, flow->src);
	set_overlay(&dst, flow->ipv6, flow->dst);
	if (rewrite_between(skb, p, flow->ipv6, &inner, &src, &dst))
		return TC_ACT_SHOT;
	if (config_relay_groups && ifindex == config_divert_ifindex)
		return into_group(skb, ipv6);
	return into_container(skb, ifindex);
}

static __always_inline int relay_open(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k,
                                      struct flow *flow, __u32 ifindex)
{
	struct flow *old = bpf_map_lookup_elem(&flow_by_wire, k);
	struct flow_key back;

	if (!ifindex)
		return TC_ACT_OK;
	/* Retransmitted: as before. */
	if (old && old->kind == FLOW_RELAY && !(old->ended & ENDED) && old->ifindex == ifindex &&
	    old->ipv6 == flow->ipv6 && old->src == flow->src && old->dst == flow->dst &&
	    old->dst_port == flow->dst_port) {
		restore_back(k, old);
		return relay_forward(skb, p, old);
	}
	flow->kind = FLOW_RELAY;
	flow->ifindex = ifindex;
	flow->relay_port = relay_port(flow, k);
	if (!flow->relay_port) {
		count(REASON_DROP_RELAY_CONFLICT);
		return TC_ACT_OK; /* RST */
	}
	happened(ONCE_RELAYED);
	back = relay_key(flow, flow->relay_port);
	/* In this order: what is forgotten for it may have had the same way back. */
	if (!remember_tuple(k, flow, tuple_owner(flow->src)) ||
	    bpf_map_update_elem(&wire_by_relay, &back, k, BPF_ANY))
		return drop(REASON_DROP_NOT_REMEMBERED);
	note_relay(flow);
	count(REASON_RELAY_OPENED);
	return relay_forward(skb, p, flow);
}

/* A packet from a container's own namespace, or of a listener that has SO_REUSEPORT: back onto the
 * underlay if it belongs to a relayed connection. Gives -1 if it does not. */
static __noinline int relay_return(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key *outer, out, k, wire;
	struct flow *flow;

	if (!p || !may_have_happened(ONCE_RELAYED))
		return -1;
	k = packet_tuple(p);
	outer = bpf_map_lookup_elem(&wire_by_relay, &k);
	if (!outer)
		return -1;
	flow = relayed_flow(outer, &k);
	/* After the end, a SYN-ACK answers a SYN that came over the overlay. */
	if (!flow || (has_ended(flow) && p->tcp.flags & TCP_FLAG_SYN_)) {
		bpf_map_delete_elem(&wire_by_relay, &k);
		return -1;
	}
	note_end(flow, outer, p, ENDED_BY_ENDPOINT);
	out.saddr = outer->daddr;
	out.daddr = outer->saddr;
	out.sport = outer->dport;
	out.dport = outer->sport;
	/* By a RST the endpoint's own stack says that it has no such connection. The sender's proves
	 * nothing: anybody's may look like it. */
	if (p->tcp.flags & TCP_FLAG_RST_) {
		wire = *outer;
		bpf_map_delete_elem(&wire_by_relay, &k);
		bpf_map_delete_elem(&flow_by_wire, &wire);
	}
	if (rewrite_to_ipv4(skb, p, &out))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(config_underlay_ifindex, NULL, 0, 0);
}

#endif

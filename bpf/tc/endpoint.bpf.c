/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Node side of an endpoint's veth: what leaves the container's own namespace, and what is sent to
 * it. */

#include "include/address.h"
#include "include/endpoint.h"
#include "include/flow_table.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "policy/filter.h"
#include "tc/antispoof.h"
#include "tc/crossing.h"
#include "tc/divert.h"
#include "tc/firewall.h"
#include "tc/nat.h"
#include "tc/own_stack.h"
#include "tc/packet.h"
#include "tc/redirect.h"
#include "tc/relay.h"

/* Tells the listener's side (sockops) that this SYN's sender is no node socket. */
static __noinline bool remember_plain(const struct packet *p)
{
	struct flow plain = {};
	struct flow_key k;

	if (!p || (p->tcp.flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) != TCP_FLAG_SYN_)
		return true;
	k = packet_tuple(p);
	plain.src = k.saddr;
	plain.dst = k.daddr;
	plain.dst_port = k.dport;
	plain.ipv6 = k.ipv6;
	return remember_tuple(&k, &plain, tuple_owner(k.saddr));
}

/* Whether endpoint peer of this node has a node socket for the packet: DIVERT_NONE, DIVERT_OPENING
 * or DIVERT_TAKEN. Nothing is assigned: see from_adopted. */
static __noinline int node_socket(struct __sk_buff *skb, const struct packet *p, const struct endpoint *peer)
{
	bool established = false;

	if (!p || !peer || !(peer->flags & ENDPOINT_INTERCEPTED) ||
	    !has_node_socket(skb, p, peer, &established))
		return DIVERT_NONE;
	return established ? DIVERT_TAKEN : DIVERT_OPENING;
}

/* What becomes of a packet from endpoint self, whose device is another network's, for endpoint peer
 * of this node: *taken as towards() has it. A bridge may have the device and take the packet past
 * the node's stack, so that it is sent to the divert device instead of being marked. */
static __always_inline int from_adopted(struct __sk_buff *skb, const struct packet *p,
                                        const struct endpoint *self, const struct endpoint *peer, bool *taken)
{
	int found = node_socket(skb, p, peer);
	int action;

	/* A SYN was asked about before. */
	if (found != DIVERT_TAKEN && !is_syn(p) && peer->flags & ENDPOINT_INTERCEPTED) {
		action = filter_tcp(skb, p, self->addr4.word[3], 0, 0);
		if (action != FILTER_PASS)
			return action;
	}
	*taken = found != DIVERT_NONE;
	return *taken ? redeliver(skb) : TC_ACT_OK;
}

/* The same from an endpoint whose device is Heddle's. */
static __always_inline int from_own(struct __sk_buff *skb, const struct packet *p,
                                    const struct endpoint *self, const struct endpoint *peer, bool *taken)
{
	switch (meets_forward_chain(skb, p, peer, taken)) {
	case FORWARD_ROUTED:
		return TC_ACT_OK;
	case FORWARD_WAITS: /* then this is a RST, for what waited */
		end_time_wait(skb, p, BPF_F_INGRESS);
	}
	return towards(skb, p, peer, self->addr4.word[3], taken);
}

/* Whether a packet is for a direct port of a node. */
static __noinline bool is_direct_port(const struct packet *p)
{
	struct mapped_node *outer;
	struct address dst;
	struct route *node;
	__u16 port;

	if (!p)
		return false;
	port = bpf_ntohs(p->tcp.dest);
	if (p->ipv6) {
		outer = is_translated() ? bpf_map_lookup_elem(&mapped_by_outer, &p->dst6) : NULL;
		return outer && port >= outer->port_first && port <= outer->port_last;
	}
	set_mapped(&dst, p->ip.daddr);
	node = bpf_map_lookup_elem(&node_by_underlay, &dst);
	return node && port >= node->port_first && port <= node->port_last;
}

/* Node side of an endpoint's veth, ingress: what leaves the container's own namespace. */
static __always_inline int from_endpoint_verdict(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct endpoint *self, *peer;
	bool taken = false, probe, near;
	struct packet p;
	int kind, verdict;
	__u32 reason;

	if (skb->tc_index != INDEX_CROSSING)
		skb->tc_index = 0;
	self = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		reason = refuse_other(skb, self ? self->addr4.word[3] : 0);
	else
		reason = refuse_packet(skb, &p, kind);
	if (reason)
		return drop(reason);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	/* The device routes loopback addresses (route_localnet): none but the container's own may
	 * pass. */
	if (is_mirror(p.ip.saddr) || is_mirror(p.ip.daddr) || is_loopback4(p.ip.daddr))
		return from_own_stack(skb, &p, kind, self);
	if (!self) {
		/* Not known yet: its kernel says which groups it joins as soon as the device is up. */
		return drop(p.ipv6 && is_unspecified6(&p.src6) ? REASON_DROP_EARLY
		                                               : REASON_DROP_SPOOFED_SOURCE);
	}
	/* Identity on the overlay is the source address. */
	if (protects(PROTECT_SOURCE) && !may_send_from(self, &p))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	probe = kind == PACKET_TCP && sends_firewall_probe(&p);
	if (kind == PACKET_TCP && !probe && forges_option(skb, &p))
		return drop(REASON_DROP_FORGED_DIRECT);
	if (kind != PACKET_TCP && forges_error(skb, &p, self))
		return drop(REASON_DROP_FORGED_ERROR);
	near = near_to(&p);
	peer = near ? NULL : endpoint_at(p.ip.daddr);
	verdict = filter_for(skb, &p, kind, self->addr4.word[3], peer);
	if (verdict != FILTER_PASS)
		return verdict;
	if (kind != PACKET_TCP || probe)
		return leave(skb, &p, kind, self, peer);
	verdict = relay_return(skb, &p);
	if (verdict >= 0)
		return verdict;
	if (peer && (peer->flags & ENDPOINT_INTERCEPTED || self->flags & ENDPOINT_ADOPTED)) {
		if (self->flags & ENDPOINT_ADOPTED)
			verdict = from_adopted(skb, &p, self, peer, &taken);
		else
			verdict = from_own(skb, &p, self, peer, &taken);
		if (taken && !remember_plain(&p))
			return drop(REASON_DROP_NOT_REMEMBERED);
		return verdict;
	}
	/* Masqueraded, a SYN forged in the container would look like the node's. */
	if (!peer && !near && protects(PROTECT_DIRECT_PORTS) && is_direct_port(&p))
		return drop(REASON_DROP_FORGED_DIRECT);
	return leave(skb, &p, kind, self, peer);
}

SEC("tc")
int from_endpoint(struct __sk_buff *skb)
{
	return or_next_filter(from_endpoint_verdict(skb));
}

/* What policy says of a packet that is about to enter the container at the other end of the
 * device. */
static __noinline int filter_entering(struct __sk_buff *skb, const struct packet *p, int kind,
                                      __be32 translated)
{
	__u32 ifindex = skb->ifindex;
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	__be32 receiver = ep ? ep->addr4.word[3] : 0;

	if (kind != PACKET_TCP)
		return filter_other(skb, p, 0, receiver, translated);
	return filter_tcp(skb, p, 0, receiver, translated);
}

/* A packet for the own stack of endpoint ep, which may be NULL: a module may have its TCP. */
static __always_inline int into_own_stack(struct __sk_buff *skb, int kind, const struct endpoint *ep)
{
	__u32 ifindex = skb->ifindex;
	struct stack_device *module;

	if (kind != PACKET_TCP || !ep || !(ep->flags & ENDPOINT_STACK))
		return TC_ACT_OK;
	module = bpf_map_lookup_elem(&stack_by_ifindex, &ifindex);
	return module && !is_for_own_stack(skb, ifindex) ? into_stack(skb, module) : TC_ACT_OK;
}

/* Node side of an endpoint's veth, egress: what the node's own processes send to the container, or
 * what is routed to it. */
static __always_inline int to_endpoint_verdict(struct __sk_buff *skb)
{
	bool ours = false, established = false;
	__be32 translated = 0;
	struct flow_key k = {};
	struct endpoint *ep;
	struct packet p;
	int kind, action;

	/* Back from the shaping device, which hides where it came in and whose it is: it was asked
	 * about before it waited. */
	if (was_queued(skb))
		return TC_ACT_OK;
	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	if (is_crossing(p.ip.daddr))
		return cross_out(skb, &p, kind);
	if (is_mirror(p.ip.daddr) || is_mirror(p.ip.saddr))
		return to_own_stack(skb, &p, kind);
	note_translated(skb, &p);
	if (kind == PACKET_TCP && asks_firewall(skb, &p))
		return answer_firewall(skb, &p, BPF_F_INGRESS);
	if (kind == PACKET_TCP)
		note_firewall_answer(&p);
	ep = endpoint_at(p.ip.daddr);
	if (kind == PACKET_TCP && ep && ep->flags & ENDPOINT_INTERCEPTED) {
		ours = has_node_socket(skb, &p, ep, &established);
		if (ours && !established && !is_syn(&p) && is_orphan(skb, &p, ep->id))
			ours = false;
		if (!(ours && established) && is_crossed(skb, &p, ep, &k))
			return cross_back(skb, &p, &k);
	}
	if (kind == PACKET_TCP && is_syn(&p))
		translated = translated_sender(skb, &p);
	if (!translated)
		translated = masqueraded_sender(skb, &p);
	if (!(ours && established && !is_syn(&p)) && !is_refusal(skb, &p, kind)) {
		action = filter_entering(skb, &p, kind, translated);
		/* Past nftables here: what is to be answered goes by it once more. */
		if (action != FILTER_PASS)
			return action == TC_ACT_SHOT ? action : redeliver(skb);
	}
	/* What a container sends to itself its own stack would take for a stranger with its
	 * address. */
	if (!ours && is_syn(&p) && ep && p.ip.saddr == p.ip.daddr && ep->flags & ENDPOINT_INTERCEPTED)
		return refuse_syn(skb);
	if (!ours)
		return into_own_stack(skb, kind, ep);
	if (is_syn(&p) && !remember_translated(skb, &p, translated))
		return drop(REASON_DROP_NOT_REMEMBERED);
	return redeliver(skb);
}

SEC("tc")
int to_endpoint(struct __sk_buff *skb)
{
	return or_next_filter(to_endpoint_verdict(skb));
}

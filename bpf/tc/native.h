/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets between nodes without a tunnel, where nothing but a switch is between them: what leaves a
 * container goes as it is to the hardware address of the container's node. Who takes such packets
 * says so by answering probes, which travel as they do: ICMP echo between the gateways of two nodes
 * with a hop limit of 255, which no container's packet has any more when it has been routed (RFC
 * 5082), and the network's VNI for id and sequence number. Decision 0118. */
#ifndef HEDDLE_TC_NATIVE_H
#define HEDDLE_TC_NATIVE_H

#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/protection.h"
#include "include/route.h"
#include "policy/filter.h"
#include "tc/antispoof.h"
#include "tc/packet.h"
#include "tc/probe.h"
#include "tc/tunnel.h"

#define PROBE_HOPS    255
#define TC_ACT_STOLEN 4
#define NEAR_TO       0
#define NEAR_FROM     1
#define NEAR_IPV6     2
#define ANSWER_NS     (NEIGHBOUR_ANSWER_MS * 1000000ull)

/* Not 0 where this node sends without a tunnel to those that answer, and answers. Written by the
 * agent. */
volatile __u32 native_routing = 0;

/* Until when this node takes what comes so, ns since boot. The agent writes it: without an end
 * while native_routing, and for some seconds after that, until the others have seen it. Rules and
 * IPsec of the node about what nodes send each other see none of it. */
volatile __u64 native_until = 0;

/* Asks the node's routes and neighbours where node is. What was known of its hardware address is
 * kept where they do not know now: what it sends has to be told from what others do. */
static __noinline int ask_neighbour(struct __sk_buff *skb, __be32 node)
{
	struct neighbour fresh = {}, *known;
	struct tunnel_scratch *s;
	struct bpf_fib_lookup *fib;
	struct way way;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&tunnel_scratch, &zero);
	if (!s)
		return 0;
	fib = (struct bpf_fib_lookup *)s->lookup;
	find_way(skb, node, fib, &way);
	known = bpf_map_lookup_elem(&neighbour_by_underlay, &node);
	if (known)
		fresh = *known;
	fresh.until = way.until;
	fresh.near = way.hop == node;
	if (fresh.near) {
		__builtin_memcpy(fresh.macs, fib->dmac, 6);
		__builtin_memcpy(fresh.macs + 6, fib->smac, 6);
	}
	if (!known)
		return bpf_map_update_elem(&neighbour_by_underlay, &node, &fresh, BPF_ANY);
	/* In its place: an answer that comes meanwhile is not lost. */
	__builtin_memcpy(known->macs, fresh.macs, sizeof(known->macs));
	known->near = fresh.near;
	known->until = fresh.until;
	return 0;
}

static __always_inline struct neighbour *neighbour_at(struct __sk_buff *skb, __be32 node, __u64 now)
{
	struct neighbour *n = bpf_map_lookup_elem(&neighbour_by_underlay, &node);

	if (n && n->until > now)
		return n;
	ask_neighbour(skb, node);
	return bpf_map_lookup_elem(&neighbour_by_underlay, &node);
}

/* Where what is known of packet p is, to its destination or from its source (NEAR_FROM), and
 * whether it is: *known. */
static __always_inline struct near_address *near_slot(const struct packet *p, __u32 way, bool *known)
{
	__be32 addr = way & NEAR_FROM ? p->ip.saddr : p->ip.daddr;
	/* All bits of the address count: the first containers of all nodes end alike. */
	__u32 hash = bpf_ntohl(addr) * 0x9e3779b1u >> (32 - NEAR_BITS);
	__u32 slot = hash * 4 + p->ipv6 * NEAR_IPV6 + way;
	struct near_address *n = bpf_map_lookup_elem(&near_by_address, &slot);

	*known = n && n->addr == addr && n->until > bpf_ktime_get_coarse_ns();
	return n;
}

static __always_inline void note_near(const struct packet *p, __u32 way, __be32 node,
                                      const struct neighbour *n)
{
	bool known;
	struct near_address *near = near_slot(p, way, &known);

	if (!near)
		return;
	near->until = n->until;
	near->addr = way & NEAR_FROM ? p->ip.saddr : p->ip.daddr;
	near->node = node;
	__builtin_memcpy(near->macs, n->macs, sizeof(near->macs));
}

/* What the last packets to where p goes were found to need, without a tunnel; NULL: nothing is
 * known of it. */
static __always_inline struct near_address *near_to(const struct packet *p)
{
	struct near_address *near;
	bool known;

	if (!native_routing)
		return NULL;
	near = near_slot(p, NEAR_TO, &known);
	return known ? near : NULL;
}

/* Whether node answered a probe by IPv6 lately. */
static __noinline bool answered6(__be32 node, __u64 now)
{
	__u64 *at = bpf_map_lookup_elem(&answered6_by_underlay, &node);

	return at && now - *at < ANSWER_NS;
}

/* Node, if packet p may go to it without a tunnel. */
static __always_inline struct neighbour *native_neighbour(struct __sk_buff *skb, const struct packet *p,
                                                          __be32 node)
{
	struct neighbour *n;
	__u64 now;

	if (!native_routing)
		return NULL;
	now = bpf_ktime_get_coarse_ns();
	n = neighbour_at(skb, node, now);
	if (!n)
		return NULL;
	if (now - n->sent > WAY_NS)
		n->sent = now;
	if (!n->near || !n->answered || now - n->answered >= ANSWER_NS)
		return NULL;
	if (p->ipv6 && !answered6(node, now))
		return NULL;
	note_near(p, NEAR_TO, node, n);
	return n;
}

/* Whether packet p, of another node, is for somebody whom packets reach without a tunnel: a
 * container of this node, to *ep, or, of probes, the node. */
static __always_inline bool takes_native(const struct packet *p, struct endpoint **ep)
{
	struct route *to;

	*ep = endpoint_at(p->ip.daddr);
	if (*ep)
		return !((*ep)->flags & ENDPOINT_ADOPTED);
	to = route_to(p->ip.daddr);
	if (!to || to->flags & ROUTE_ADOPTED || to->underlay.word[3] != config_underlay)
		return false;
	return !(to->flags & ROUTE_NODE_ADDR) || p->ip.ttl == PROBE_HOPS;
}

/* The node whose container, or gateway, sent packet p without a tunnel to an overlay address of
 * this node; 0: it is nothing of the kind. ep: as takes_native's. *known: what was found of the
 * source lately says so. */
static __always_inline __be32 native_sender(const struct __sk_buff *skb, const struct packet *p,
                                            struct endpoint **ep, bool *known)
{
	struct near_address *near;
	struct route *from;

	if (config_underlay_raw || config_underlay_inner || is_translated() || !p->ip.saddr ||
	    skb->ifindex != config_underlay_ifindex || skb->pkt_type != PACKET_HOST_)
		return 0;
	/* What is tagged is of another segment. */
	if (skb->vlan_present || native_until < bpf_ktime_get_coarse_ns())
		return 0;
	near = near_slot(p, NEAR_FROM, known);
	if (near && *known)
		return takes_native(p, ep) ? near->node : 0;
	from = route_to(p->ip.saddr);
	if (!from || from->flags & (ROUTE_NODE_ADDR | ROUTE_ADOPTED) ||
	    from->underlay.word[3] == config_underlay || !takes_native(p, ep))
		return 0;
	return from->underlay.word[3];
}

/* A probe of node, which has these hardware addresses, or its answer to one. */
static __always_inline int take_probe(struct __sk_buff *skb, const struct packet *p, const __u8 *macs,
                                      __be32 node)
{
	const __u32 at = ETH_HLEN + (p->ipv6 ? sizeof(struct ip6hdr_) : sizeof(struct iphdr_));
	const __u8 asks = p->ipv6 ? ICMPV6_ECHO : ICMP_ECHO,
	           answers = p->ipv6 ? ICMPV6_ECHO_REPLY : ICMP_ECHO_REPLY;
	const __be16 request = bpf_htons(asks << 8), answer = bpf_htons(answers << 8);
	struct neighbour *n = bpf_map_lookup_elem(&neighbour_by_underlay, &node);
	__u64 now = bpf_ktime_get_coarse_ns();
	struct icmphdr_ icmp;

	if (p->ip.version_ihl != (p->ipv6 ? 0 : 0x45) || p->ip.frag_off ||
	    p->ip.protocol != (p->ipv6 ? IPPROTO_ICMPV6_ : IPPROTO_ICMP_) ||
	    bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)) || icmp.code ||
	    icmp.id != bpf_htons(config_vni >> 16) || icmp.seq != bpf_htons(config_vni & 0xffff))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	if (icmp.type == answers) {
		if (p->ipv6)
			bpf_map_update_elem(&answered6_by_underlay, &node, &now, BPF_ANY);
		else if (n)
			n->answered = now;
		return TC_ACT_STOLEN;
	}
	if (icmp.type != asks || !native_routing)
		return TC_ACT_STOLEN;
	if (bpf_l4_csum_replace(skb, at + ICMP_CHECK_OFFSET, request, answer, 2) ||
	    bpf_skb_store_bytes(skb, at, &answer, sizeof(answer), 0) || exchange_addresses(skb, p) ||
	    bpf_skb_store_bytes(skb, 0, macs, 12, 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_underlay_ifindex, 0);
}

/* What becomes of packet p, which says that it is of a container of node; TC_ACT_UNSPEC: it is, and
 * may go on to its own. It is that node's if it has its hardware address, which is as much as an
 * outer source address says. known: as native_sender has it; what has become old since is not asked
 * about again, or it would be noted anew without its route. */
static __noinline int arrive_native(struct __sk_buff *skb, const struct packet *p, __be32 node, bool known)
{
	struct near_address *near;
	struct neighbour *n;
	int i, differ = 0;
	__u8 macs[12];
	bool recent;

	if (!p)
		return TC_ACT_SHOT;
	near = near_slot(p, NEAR_FROM, &recent);
	if (!known) {
		n = neighbour_at(skb, node, bpf_ktime_get_coarse_ns());
		if (n)
			note_near(p, NEAR_FROM, node, n);
		known = n;
	}
	if (!near || !known || bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	for (i = 0; i < 6; i++)
		differ |= (macs[i] ^ near->macs[i + 6]) | (macs[i + 6] ^ near->macs[i]);
	if (protects(PROTECT_OVERLAY) && differ)
		return drop(REASON_DROP_SPOOFED_SOURCE);
	return p->ip.ttl == PROBE_HOPS ? take_probe(skb, p, near->macs, node) : TC_ACT_UNSPEC;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets between containers that need nothing of the node's stack go past it: out of a container
 * to the overlay device or into a container of the same node, and from the overlay device into a
 * container. What a router does to a packet is done here: hop limit and hardware addresses. All
 * that a router answers, cuts up or translates is left to the stack, for a reason that is counted.
 * Decision 0097. */
#ifndef HEDDLE_TC_REDIRECT_H
#define HEDDLE_TC_REDIRECT_H

#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/limits.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/once.h"
#include "include/route.h"
#include "policy/filter.h"
#include "tc/native.h"
#include "tc/packet.h"
#include "tc/tunnel.h"

#define TTL_OFFSET       8 /* in an IPv4 header: TTL, protocol and checksum */
#define HOP_LIMIT_OFFSET 7 /* in an IPv6 header */

/* That of a device that can carry IPv4, in bytes: what is no longer fits it. IPv6 asks for more. */
#define SMALLEST_MTU 576

/* The kernel's TC_PRIO_* for the two upper bits of an IPv4 header's TOS, 4 bits each: what
 * forwarding gives a packet (rt_tos2priority). */
#define PRIORITY_BY_TOS 0x4620

/* Not 0 where packets are redirected. Written by the agent. */
volatile __u32 packets_redirected = 0;

static __always_inline void set_pair(struct address_pair *pair, const struct packet *p)
{
	bool sorted = p->ip.saddr < p->ip.daddr;

	pair->low = sorted ? p->ip.saddr : p->ip.daddr;
	pair->high = sorted ? p->ip.daddr : p->ip.saddr;
}

/* Remembers that the node's firewall gave a packet of a container this destination: it was for an
 * address beyond the overlay. The answers need the firewall, too. */
static __noinline void note_translated(struct __sk_buff *skb, const struct packet *p)
{
	struct address_pair pair;
	__u32 one = 1;

	if (!p || !has_index(skb, INDEX_BEYOND))
		return;
	happened(ONCE_TRANSLATED);
	set_pair(&pair, p);
	if (!bpf_map_lookup_elem(&translated_pairs, &pair))
		bpf_map_update_elem(&translated_pairs, &pair, &one, BPF_ANY);
}

/* Whether p is an ICMP error: what it quotes may be of a translated connection. */
static __always_inline bool is_error(struct __sk_buff *skb, const struct packet *p)
{
	__u8 type;

	if (p->ipv6)
		return p->ip.protocol == IPPROTO_ICMPV6_ &&
		       (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ip6hdr_), &type, sizeof(type)) ||
		        type < ICMPV6_FIRST_INFO);
	if (p->ip.protocol != IPPROTO_ICMP_ || p->ip.frag_off & bpf_htons(IP_OFFSET_))
		return false;
	return bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct iphdr_), &type, sizeof(type)) ||
	       !(type == ICMP_ECHO || type == ICMP_ECHO_REPLY);
}

/* Whether ICMP error p is said by whom its receiver sent what it quotes, and that is no TCP: no
 * socket of the node sent it. Translation apart, the node's stack knows nothing of it: its flow is
 * redirected. Not static, so that the verifier looks at it once. */
__noinline int is_answer(struct __sk_buff *skb, const struct packet *p)
{
	struct ip6hdr_ six;
	struct iphdr_ four;
	int i;

	if (!p)
		return 0;
	if (!p->ipv6)
		return !bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(four) + sizeof(struct icmphdr_), &four,
		                           sizeof(four)) &&
		       four.saddr == p->ip.daddr && four.daddr == p->ip.saddr &&
		       four.protocol != IPPROTO_TCP_;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(six) + sizeof(struct icmphdr_), &six, sizeof(six)))
		return 0;
	for (i = 0; i < 4; i++) {
		if (six.saddr[i] != p->dst6.word[i] || six.daddr[i] != p->src6.word[i])
			return 0;
	}
	return six.next_header == IPPROTO_UDP_ || six.next_header == IPPROTO_ICMPV6_;
}

/* Why packet p, on its way out of device ifindex, needs the node's stack; REASON_NONE: it needs
 * nothing of it. */
static __always_inline __u32 why_routed(struct __sk_buff *skb, const struct packet *p, __u32 ifindex)
{
	struct address_pair pair;
	__u32 length = 0;

	if (p->ipv6 ? p->ip.protocol == NEXTHDR_HOP_ : (p->ip.version_ihl & 0xf) != 5)
		return REASON_ROUTE_OPTIONS;
	if (p->ip.ttl <= 1)
		return REASON_ROUTE_HOPS;
	if (is_error(skb, p) && !is_answer(skb, p))
		return REASON_ROUTE_ERROR;
	if (may_have_happened(ONCE_TRANSLATED)) {
		set_pair(&pair, p);
		if (bpf_map_lookup_elem(&translated_pairs, &pair))
			return REASON_ROUTE_TRANSLATED;
	}
	if (skb->len > SMALLEST_MTU && bpf_check_mtu(skb, ifindex, &length, 0, BPF_MTU_CHK_SEGS))
		return REASON_ROUTE_SIZE;
	return REASON_NONE;
}

/* Takes one off the hop limit, and writes both hardware addresses. */
static __always_inline int hop(struct __sk_buff *skb, const struct packet *p, const __u8 *macs)
{
	struct {
		__u8 ttl;
		__u8 protocol;
		__u16 check;
	} next;
	__u32 sum;

	next.ttl = p->ip.ttl - 1;
	if (bpf_skb_store_bytes(skb, 0, macs, 12, 0))
		return -1;
	if (p->ipv6)
		return bpf_skb_store_bytes(skb, ETH_HLEN + HOP_LIMIT_OFFSET, &next.ttl, 1,
		                           BPF_F_RECOMPUTE_CSUM);
	sum = (__u32)p->ip.check + bpf_htons(0x0100);
	next.protocol = p->ip.protocol;
	next.check = sum + (sum >= 0xffff);
	/* The two changes add up to nothing in a checksum of the whole packet. */
	return bpf_skb_store_bytes(skb, ETH_HLEN + TTL_OFFSET, &next, sizeof(next), 0);
}

/* As forwarding has it. */
static __always_inline void prioritise(struct __sk_buff *skb, const struct packet *p)
{
	if (!p->ipv6)
		skb->priority = PRIORITY_BY_TOS >> (p->ip.tos >> 3 & 3) * 4 & 0xf;
}

static __always_inline int by_stack(__u32 reason)
{
	count(reason);
	return TC_ACT_OK;
}

/* Hands packet p, which may go to endpoint ep of this node, to its container. */
static __noinline int enter(struct __sk_buff *skb, const struct packet *p, const struct endpoint *ep)
{
	__u32 ifindex, reason;
	__u8 macs[12];

	if (!p || !ep)
		return TC_ACT_SHOT;
	/* A bridge of another network has such a device. */
	if (!packets_redirected || ep->flags & ENDPOINT_ADOPTED)
		return TC_ACT_OK;
	if (limits_in_force && limit_of(ep->id))
		return by_stack(REASON_ROUTE_LIMIT);
	ifindex = ep->ifindex;
	reason = why_routed(skb, p, ifindex);
	if (reason)
		return by_stack(reason);
	container_mac(macs, ep->id);
	host_mac(macs + 6, ep->id);
	if (hop(skb, p, macs))
		return TC_ACT_SHOT;
	count(REASON_REDIRECT_CONTAINER);
	return bpf_redirect_peer(ifindex, 0);
}

/* Sends packet p, which may go, without a tunnel to whom these hardware addresses lead to. */
static __always_inline int go_native(struct __sk_buff *skb, const struct packet *p, const __u8 *macs)
{
	if (hop(skb, p, macs))
		return TC_ACT_SHOT;
	prioritise(skb, p);
	count(REASON_REDIRECT_NATIVE);
	return bpf_redirect(config_underlay_ifindex, 0);
}

/* Hands packet p, which may go to the node at to, to this node's overlay device, does what that
 * would do, or sends it without a tunnel. */
static __always_inline int enter_overlay(struct __sk_buff *skb, const struct packet *p,
                                         const struct address *to)
{
	__be32 node = to->word[3];
	struct neighbour *near = native_neighbour(skb, p, node);
	struct vtep *vtep;
	__u8 macs[12];
	int i, verdict;

	if (near)
		return go_native(skb, p, near->macs);
	vtep = bpf_map_lookup_elem(&vtep_by_underlay, to);
	if (!vtep)
		return TC_ACT_OK;
	for (i = 0; i < 6; i++) {
		macs[i] = vtep->mac[i];
		macs[i + 6] = config_vtep[i];
	}
	if (hop(skb, p, macs))
		return TC_ACT_SHOT;
	prioritise(skb, p);
	skb->tc_index = INDEX_REDIRECTED;
	count(REASON_REDIRECT_OVERLAY);
	if (tunnel_by_program) {
		verdict = encapsulate(skb, p, vtep, node);
		if (verdict != TC_ACT_UNSPEC)
			return verdict;
		count(REASON_TUNNEL_DEVICE);
	}
	return bpf_redirect(config_overlay_ifindex, 0);
}

/* What becomes of packet p of container self, which may go: to endpoint peer of this node, or, if
 * that is NULL, to another node or beyond. */
static __noinline int leave(struct __sk_buff *skb, const struct packet *p, int kind,
                            const struct endpoint *self, const struct endpoint *peer)
{
	const __u32 elsewhere = ROUTE_SELF | ROUTE_NODE_ADDR | ROUTE_ADOPTED;
	struct near_address *near;
	struct route *to = NULL;
	__u32 reason;
	bool crosses = has_index(skb, INDEX_CROSSING);

	if (!p || !self)
		return TC_ACT_SHOT;
	skb->tc_index = 0;
	near = peer ? NULL : near_to(p);
	if (!peer && !near) {
		to = route_to(p->ip.daddr);
		if (!to || to->flags & elsewhere) {
			skb->tc_index = INDEX_BEYOND;
			return TC_ACT_OK;
		}
	}
	if (!packets_redirected || p->ip.saddr != self->addr4.word[3] || self->flags & ENDPOINT_ADOPTED)
		return TC_ACT_OK;
	/* The way back of these is by to_endpoint. */
	if (kind == PACKET_TCP &&
	    (crosses || self->flags & ENDPOINT_STACK || (peer && self->flags & ENDPOINT_INTERCEPTED)))
		return by_stack(REASON_ROUTE_INTERCEPTED);
	if (limits_in_force && limit_of(self->id))
		return by_stack(REASON_ROUTE_LIMIT);
	if (peer)
		return enter(skb, p, peer);
	reason = why_routed(skb, p, config_overlay_ifindex);
	if (reason)
		return by_stack(reason);
	if (near)
		return go_native(skb, p, near->macs);
	return to ? enter_overlay(skb, p, &to->underlay) : TC_ACT_OK;
}

#endif

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
#include "include/protection.h"
#include "include/route.h"
#include "policy/filter.h"
#include "tc/antispoof.h"
#include "tc/packet.h"
#include "tc/probe.h"
#include "tc/tunnel.h"

#define PROBE_HOPS    255
#define TC_ACT_STOLEN 4
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

static __always_inline struct neighbour *neighbour_at(struct __sk_buff *skb, __be32 node)
{
	struct neighbour *n = bpf_map_lookup_elem(&neighbour_by_underlay, &node);

	if (n && n->until > bpf_ktime_get_coarse_ns())
		return n;
	ask_neighbour(skb, node);
	return bpf_map_lookup_elem(&neighbour_by_underlay, &node);
}

/* Node, if packets may go to it without a tunnel. */
static __always_inline struct neighbour *native_neighbour(struct __sk_buff *skb, __be32 node)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	struct neighbour *n;

	if (!native_routing)
		return NULL;
	n = neighbour_at(skb, node);
	if (!n)
		return NULL;
	if (now - n->sent > WAY_NS)
		n->sent = now;
	return n->near && n->answered && now - n->answered < ANSWER_NS ? n : NULL;
}

/* The node whose container, or gateway, sent packet p without a tunnel to an overlay address of
 * this node; 0: it is nothing of the kind. */
static __always_inline __be32 native_sender(const struct __sk_buff *skb, const struct packet *p)
{
	struct route *from, *to;

	if (config_underlay_raw || config_underlay_inner || is_translated() || !p->ip.saddr ||
	    skb->ifindex != config_underlay_ifindex || skb->pkt_type != PACKET_HOST_)
		return 0;
	/* What is tagged is of another segment. */
	if (skb->vlan_present || native_until < bpf_ktime_get_coarse_ns())
		return 0;
	from = route_to(p->ip.saddr);
	if (!from || from->flags & (ROUTE_NODE_ADDR | ROUTE_ADOPTED) ||
	    from->underlay.word[3] == config_underlay)
		return 0;
	to = route_to(p->ip.daddr);
	if (!to || to->flags & ROUTE_ADOPTED || to->underlay.word[3] != config_underlay)
		return 0;
	/* To an address of the node itself only probes come. */
	if (to->flags & ROUTE_NODE_ADDR && (p->ipv6 || p->ip.ttl != PROBE_HOPS))
		return 0;
	return from->underlay.word[3];
}

/* A probe of neighbour n, or its answer to one. */
static __always_inline int take_probe(struct __sk_buff *skb, const struct packet *p, struct neighbour *n)
{
	const __u32 at = ETH_HLEN + sizeof(struct iphdr_);
	const __be16 request = bpf_htons(ICMP_ECHO << 8), answer = bpf_htons(ICMP_ECHO_REPLY << 8);
	struct icmphdr_ icmp;

	if (p->ip.version_ihl != 0x45 || p->ip.protocol != IPPROTO_ICMP_ || p->ip.frag_off ||
	    bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)) || icmp.code ||
	    icmp.id != bpf_htons(config_vni >> 16) || icmp.seq != bpf_htons(config_vni & 0xffff))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	if (icmp.type == ICMP_ECHO_REPLY) {
		n->answered = bpf_ktime_get_coarse_ns();
		return TC_ACT_STOLEN;
	}
	if (icmp.type != ICMP_ECHO || !native_routing)
		return TC_ACT_STOLEN;
	if (bpf_l4_csum_replace(skb, at + ICMP_CHECK_OFFSET, request, answer, 2) ||
	    bpf_skb_store_bytes(skb, at, &answer, sizeof(answer), 0) || exchange_addresses(skb, p) ||
	    bpf_skb_store_bytes(skb, 0, n->macs, sizeof(n->macs), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_underlay_ifindex, 0);
}

/* Takes packet p, which says that it is of a container of node, for one that the overlay's device
 * brings, as decapsulate does: from_overlay decides. It is that node's if it has its hardware
 * address, which is as much as an outer source address says. */
static __noinline int arrive_native(struct __sk_buff *skb, const struct packet *p, __be32 node)
{
	struct neighbour *n;
	__u8 macs[12], vtep[6];
	int i, differ = 0;

	if (!p)
		return TC_ACT_SHOT;
	n = neighbour_at(skb, node);
	if (!n || bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	for (i = 0; i < 6; i++) {
		differ |= (macs[i] ^ n->macs[i + 6]) | (macs[i + 6] ^ n->macs[i]);
		vtep[i] = config_vtep[i];
	}
	if (protects(PROTECT_OVERLAY) && differ)
		return drop(REASON_DROP_SPOOFED_SOURCE);
	if (!p->ipv6 && p->ip.ttl == PROBE_HOPS)
		return take_probe(skb, p, n);
	if (bpf_skb_store_bytes(skb, 0, vtep, sizeof(vtep), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_overlay_ifindex, BPF_F_INGRESS);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* VXLAN by the programs: the headers of the overlay's device are put on and taken off where a
 * packet is read anyhow, past that device, the node's routing and its hooks. What is not plain is
 * left to the device, which takes and sends the same packets. Decision 0105. */
#ifndef HEDDLE_TC_TUNNEL_H
#define HEDDLE_TC_TUNNEL_H

#include "include/config.h"
#include "include/count.h"
#include "include/headers.h"
#include "include/maps.h"
#include "tc/packet.h"

#define VXLAN_HAS_VNI     0x08000000
#define TUNNEL_HOPS       64
#define TUNNEL_FIRST_PORT 0xc000 /* RFC 7348: the inner flow's hash above it */
#define ECN_MASK_         3      /* and what a congested router makes of the field */
#define ECN_CAPABLE_      2

#define DECAP_L3_IPV6_ (1ull << 8) /* BPF_F_ADJ_ROOM_DECAP_L3_IPV6, Linux 6.3 */
#define TUNNEL_HEADERS 50          /* without what pads the struct */
#define TUNNEL_ADDS                                                                                          \
	(BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |             \
	 BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH)

/* How long a way to a node is believed, and for how long packets follow one that was left to the
 * device: several ticks of the clock, as the queue is served within one. */
#define WAY_NS  100000000ull
#define LEFT_NS 20000000ull

/* Not 0 where programs do it. Written by the agent. */
volatile __u32 tunnel_by_program = 0;

static __always_inline __u16 header_sum(const struct iphdr_ *h)
{
	const __u16 *word = (const __u16 *)h;
	__u32 sum = 0;
	int i;

	for (i = 0; i < 10; i++)
		sum += word[i];
	sum = (sum & 0xffff) + (sum >> 16);
	sum += sum >> 16;
	return ~sum;
}

/* Asks the node's routes for the way to a node. hop stays 0 where only the device is to send: by
 * another device, to a neighbour that has to be asked for, or where what fits the overlay, which
 * the caller has seen to, does not fit the way with these headers: the device sends fragments. */
static __always_inline void find_way(struct __sk_buff *skb, __be32 node, struct bpf_fib_lookup *fib,
                                     struct way *way)
{
	__u32 mtu = 0; /* the overlay's, also if this packet is longer */

	way->hop = 0;
	way->until = bpf_ktime_get_coarse_ns() + WAY_NS;
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->family = AF_INET;
	fib->l4_protocol = IPPROTO_UDP_;
	fib->dport = bpf_htons(config_vxlan_port);
	fib->tot_len = 1; /* then the MTU is told */
	fib->ifindex = config_underlay_ifindex;
	fib->ipv4_src = config_underlay;
	fib->ipv4_dst = node;
	if (bpf_check_mtu(skb, config_overlay_ifindex, &mtu, 0, BPF_MTU_CHK_SEGS) < 0 ||
	    bpf_fib_lookup(skb, fib, sizeof(*fib), BPF_FIB_LOOKUP_OUTPUT) != BPF_FIB_LKUP_RET_SUCCESS)
		return;
	if (fib->family == AF_INET && fib->ifindex == config_underlay_ifindex &&
	    fib->mtu_result >= mtu + TUNNEL_HEADERS)
		way->hop = fib->ipv4_dst;
}

/* The next hop on the way to a node, 0 as in find_way. */
static __always_inline __be32 next_hop(struct __sk_buff *skb, __be32 node, struct tunnel_scratch *s)
{
	struct way *known = bpf_map_lookup_elem(&way_by_underlay, &node);

	if (known && known->until > bpf_ktime_get_coarse_ns())
		return known->hop;
	find_way(skb, node, (struct bpf_fib_lookup *)s->lookup, &s->way);
	bpf_map_update_elem(&way_by_underlay, &node, &s->way, BPF_ANY);
	return s->way.hop;
}

/* The two bits of congestion notification in a packet's IP header. */
static __always_inline __u32 ecn_of(struct __sk_buff *skb, const struct packet *p)
{
	__be32 first = 0;

	if (!p->ipv6)
		return p->ip.tos & ECN_MASK_;
	bpf_skb_load_bytes(skb, ETH_HLEN, &first, sizeof(first));
	return bpf_ntohl(first) >> 20 & ECN_MASK_;
}

/* Writes the headers of a packet of length bytes, headers included. */
static __always_inline void write_headers(struct tunnel_headers *h, __u32 length, __u32 ecn, __u32 hash,
                                          const struct vtep *to, __be32 node)
{
	int i;

	__builtin_memset(h, 0, sizeof(*h));
	h->ip.version_ihl = 0x45;
	/* As the device has it: congestion is noted on one of the two headers. */
	h->ip.tos = ecn == ECN_MASK_ ? ECN_CAPABLE_ : ecn;
	h->ip.tot_len = bpf_htons(length);
	h->ip.id = bpf_get_prandom_u32();
	h->ip.ttl = TUNNEL_HOPS;
	h->ip.protocol = IPPROTO_UDP_;
	h->ip.saddr = config_underlay;
	h->ip.daddr = node;
	h->ip.check = header_sum(&h->ip);
	hash ^= hash >> 16;
	h->udp.source = bpf_htons(TUNNEL_FIRST_PORT | (hash & ~TUNNEL_FIRST_PORT & 0xffff));
	h->udp.dest = bpf_htons(config_vxlan_port);
	h->udp.length = bpf_htons(length - sizeof(h->ip));
	h->vxlan.flags = bpf_htonl(VXLAN_HAS_VNI);
	h->vxlan.vni = bpf_htonl(config_vni << 8);
	for (i = 0; i < 6; i++) {
		h->macs[i] = to->mac[i];
		h->macs[i + 6] = config_vtep[i];
	}
}

/* Sends the packet in the tunnel to node. TC_ACT_UNSPEC: nothing was done, the device has to. */
static __noinline int encapsulate(struct __sk_buff *skb, const struct packet *p, const struct vtep *to,
                                  __be32 node)
{
	__u32 length = skb->len - ETH_HLEN + TUNNEL_HEADERS, zero = 0;
	struct tunnel_scratch *s = bpf_map_lookup_elem(&tunnel_scratch, &zero);
	struct bpf_redir_neigh hop = {.nh_family = AF_INET};

	if (!p || !to || !s || length > 0xffff)
		return TC_ACT_UNSPEC;
	hop.ipv4_nh = next_hop(skb, node, s);
	if (!hop.ipv4_nh)
		return TC_ACT_UNSPEC;
	write_headers(&s->headers, length, ecn_of(skb, p), bpf_get_hash_recalc(skb), to, node);
	s->headers.protocol = skb->protocol;
	if (bpf_skb_adjust_room(skb, TUNNEL_HEADERS, BPF_ADJ_ROOM_MAC, TUNNEL_ADDS))
		return TC_ACT_UNSPEC;
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &s->headers, TUNNEL_HEADERS, 0))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(config_underlay_ifindex, &hop, sizeof(hop), 0);
}

/* Whether the packet, which is the overlay's and has these headers, is one that decapsulate takes:
 * whole, of one segment, as long as it says, with nothing noted on it by a congested router. Of
 * segments (GSO, GRO) the kernel would keep the notes about the outer headers. What comes soon
 * after one that the device got, of the same flow by the sender's port, follows it: the device has
 * a queue that is served after this packet. */
static __always_inline bool is_plain_tunnel(struct __sk_buff *skb, const struct iphdr_ *h,
                                            const struct udphdr_ *udp, const struct vxlanhdr_ *vxlan)
{
	__u64 now = bpf_ktime_get_coarse_ns(), *left;
	__u32 slot = bpf_ntohs(udp->source) % LEFT_SLOTS;
	bool plain, follows;

	left = bpf_map_lookup_elem(&left_to_device, &slot);
	if (!tunnel_by_program || !left)
		return false;
	plain = h->version_ihl == 0x45 && !(h->frag_off & bpf_htons(IP_MF_)) && !skb->gso_size &&
	        (h->tos & ECN_MASK_) != ECN_MASK_ && vxlan->flags == bpf_htonl(VXLAN_HAS_VNI) &&
	        bpf_ntohs(h->tot_len) + ETH_HLEN == skb->len &&
	        bpf_ntohs(udp->length) + sizeof(*h) == bpf_ntohs(h->tot_len);
	follows = now - *left < LEFT_NS;
	if (plain && !follows)
		return true;
	if (!plain)
		*left = now;
	count(REASON_TUNNEL_DEVICE);
	return false;
}

/* Takes such a packet out of its tunnel, as one that the overlay's device brings: from_overlay and
 * all that look at that device see it. False: nothing was done. */
static __always_inline bool decapsulate(struct __sk_buff *skb)
{
	__u64 flags = BPF_F_ADJ_ROOM_NO_CSUM_RESET; /* what a card found right stays right */
	struct {
		__u8 macs[12];
		__be16 protocol;
	} inner;

	if (bpf_skb_load_bytes(skb, TUNNEL_HEADERS, &inner, sizeof(inner)))
		return false;
	if (inner.protocol == bpf_htons(ETH_P_IPV6))
		flags |= DECAP_L3_IPV6_;
	if (bpf_skb_adjust_room(skb, -TUNNEL_HEADERS, BPF_ADJ_ROOM_MAC, flags) ||
	    bpf_skb_store_bytes(skb, 0, &inner, sizeof(inner), 0))
		return false;
	/* What a card found right may be the outer checksum alone, which says nothing of this packet:
	 * one level of it goes, as the device has it. */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	return true;
}

#endif

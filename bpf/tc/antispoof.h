/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What may leave a container at all, and what may arrive by the overlay. The programs of the
 * devices read headers; these functions see to it that there are none beside those they read. They
 * are functions of their own, with frames of their own, because their callers' are full. */
#ifndef HEDDLE_TC_ANTISPOOF_H
#define HEDDLE_TC_ANTISPOOF_H

#include "include/abi/syn_option.h"
#include "include/address.h"
#include "include/config.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/route.h"
#include "tc/packet.h"
#include "tc/tcp_option.h"
#include "tc/tunnel.h"

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak; /* Linux 6.2 */

static __always_inline bool is_vlan(__u32 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/* Whether the frame still has a VLAN tag behind the one that the kernel took off and will ignore:
 * then it takes off the next, too, and goes on with a packet that no program has read. */
static __always_inline bool hides_in_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && !(skb->vlan_tci & 0xfff) && is_vlan(skb->protocol);
}

/* Whether IPv4 packet p is TCP with a first fragment that ends within the TCP header, options
 * included. What lies behind its end is not part of it, whatever it looks like. */
static __always_inline bool cuts_tcp4(struct __sk_buff *skb, const struct packet *p)
{
	__u32 length, room;
	__u8 doff;

	if (p->ip.protocol != IPPROTO_TCP_ ||
	    (p->ip.frag_off & bpf_htons(IP_MF_ | IP_OFFSET_)) != bpf_htons(IP_MF_))
		return false;
	length = (p->ip.version_ihl & 0xf) * 4;
	room = bpf_ntohs(p->ip.tot_len);
	if (room < length + sizeof(struct tcphdr_) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + length + TCP_DOFF_OFFSET, &doff, sizeof(doff)))
		return true;
	return room < length + (doff >> 4) * 4;
}

/* Whether IPv6 packet p has extension headers that TCP may be behind. Fragments of anything else
 * and the options of multicast listener discovery are what hosts send. */
static __always_inline bool buries_tcp6(struct __sk_buff *skb, const struct packet *p)
{
	__u8 next = IPPROTO_TCP_;

	switch (p->ip.protocol) {
	case NEXTHDR_FRAGMENT_:
		bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ip6hdr_), &next, sizeof(next));
		return next == IPPROTO_TCP_ || next == NEXTHDR_HOP_ || next == NEXTHDR_ROUTING_ ||
		       next == NEXTHDR_FRAGMENT_ || next == NEXTHDR_DEST_ || next == NEXTHDR_AUTH_;
	case NEXTHDR_HOP_:
		bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ip6hdr_), &next, sizeof(next));
		return next != IPPROTO_ICMPV6_;
	case NEXTHDR_ROUTING_:
	case NEXTHDR_DEST_:
	case NEXTHDR_AUTH_:
		return true;
	}
	return false;
}

/* Whether an ARP packet speaks for another address than own. The node knows its neighbours without
 * asking; entries for made-up ones would only fill its table. */
static __always_inline bool spoofs_arp(struct __sk_buff *skb, __be32 own)
{
	struct arp_ arp;
	__be32 sender;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &arp, sizeof(arp)))
		return true;
	__builtin_memcpy(&sender, arp.sender, sizeof(sender));
	return sender && sender != own;
}

/* Whether an ICMPv6 message behind at most one extension header is an error about a packet that was
 * not sent to address own6 or link-local address own; refuse_packet lets no others pass. */
static __always_inline bool forges_error6(struct __sk_buff *skb, __be32 own, __u32 id)
{
	__u32 offset = ETH_HLEN + sizeof(struct ip6hdr_);
	struct ip6hdr_ h;
	struct address to;
	__u8 head[8], type;
	int i;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)))
		return true;
	if (h.next_header == NEXTHDR_FRAGMENT_ || h.next_header == NEXTHDR_HOP_) {
		if (bpf_skb_load_bytes(skb, offset, head, sizeof(head)))
			return true;
		if (head[0] != IPPROTO_ICMPV6_)
			return false;
		if (h.next_header == NEXTHDR_FRAGMENT_ && (head[2] || head[3] & 0xf8))
			return false; /* leads nowhere without the first */
		offset += h.next_header == NEXTHDR_HOP_ ? (head[1] + 1) * 8 : sizeof(head);
		/* No host's error has such a header. */
		return bpf_skb_load_bytes(skb, offset, &type, sizeof(type)) || type < ICMPV6_FIRST_INFO;
	}
	if (h.next_header != IPPROTO_ICMPV6_)
		return false;
	if (bpf_skb_load_bytes(skb, offset, &type, sizeof(type)))
		return true;
	if (type >= ICMPV6_FIRST_INFO)
		return false;
	if (bpf_skb_load_bytes(skb, offset + 8, &h, sizeof(h)))
		return true;
	for (i = 0; i < 4; i++)
		to.word[i] = h.daddr[i];
	return !(is_overlay6(&to) && to.word[3] == own) && !is_own_link_local6(&to, id);
}

/* Whether a packet that is not TCP, out of the container self, is an ICMP error about a packet that
 * was not sent to it. The kernel believes such errors of everybody: they would change the MTU of
 * the node's, or of another container's, way to a third one, for UDP by no more than the ports. */
static __noinline bool forges_error(struct __sk_buff *skb, const struct packet *p,
                                    const struct endpoint *self)
{
	__u32 offset;
	struct iphdr_ h;
	__u8 type;

	if (!p || !self || !protects(PROTECT_ERRORS))
		return false;
	if (p->ipv6)
		return forges_error6(skb, self->addr4.word[3], self->id);
	if (p->ip.protocol != IPPROTO_ICMP_ || p->ip.frag_off & bpf_htons(IP_OFFSET_))
		return false;
	offset = ETH_HLEN + (p->ip.version_ihl & 0xf) * 4;
	if (bpf_skb_load_bytes(skb, offset, &type, sizeof(type)))
		return true;
	if (type != 3 && type != 4 && type != 5 && type != 11 && type != 12)
		return false;
	/* What lies behind the end of a short fragment is not part of it. */
	if (p->ip.frag_off & bpf_htons(IP_MF_) || bpf_skb_load_bytes(skb, offset + 8, &h, sizeof(h)))
		return true;
	return h.daddr != self->addr4.word[3];
}

/* Whether the kernel has yet to write the packet's checksum: of what lies behind start, at place
 * at. Both are offsets into the frame, start one of any 32 bits. */
static __always_inline bool awaits_checksum(struct __sk_buff *ctx, __u32 *start, __u32 *at)
{
	struct sk_buff *skb = (void *)ctx; /* that it is, whatever the verifier calls it */
	bool awaits;

	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(ctx);
		awaits = BPF_CORE_READ_BITFIELD(skb, ip_summed) == CHECKSUM_PARTIAL_;
		*start = skb->csum_start - skb->mac_header;
		*at = *start + skb->csum_offset;
	} else {
		awaits = BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed) == CHECKSUM_PARTIAL_;
		*start = BPF_CORE_READ(skb, csum_start) - BPF_CORE_READ(skb, mac_header);
		*at = *start + BPF_CORE_READ(skb, csum_offset);
	}
	return awaits;
}

/* Where what is behind the IP header of packet p begins in the frame. */
static __always_inline __u32 transport_of(const struct packet *p)
{
	return ETH_HLEN + (p->ipv6 ? sizeof(struct ip6hdr_) : (p->ip.version_ihl & 0xf) * 4);
}

/* Whether a checksum that the kernel has yet to write would change what is judged here: a program
 * that makes its own frames says where it belongs (PACKET_VNET_HDR), and the kernel believes it.
 * TCP and UDP have one place for it; behind UDP's header, and in what is neither, is another packet
 * that the container wraps in its own. */
static __always_inline bool rewrites_itself(struct __sk_buff *skb, const struct packet *p)
{
	__u32 start, at, transport;

	if (!awaits_checksum(skb, &start, &at))
		return false;
	/* The kernel settles what it cuts up before it does. */
	if (p->ip.frag_off & bpf_htons(IP_MF_ | IP_OFFSET_))
		return true;
	transport = transport_of(p);
	switch (p->ip.protocol) {
	case IPPROTO_TCP_:
		return start != transport || at != transport + TCP_CHECK_OFFSET;
	case IPPROTO_UDP_:
		if (start == transport)
			return at != transport + UDP_CHECK_OFFSET;
		transport += sizeof(struct udphdr_);
		break;
	case IPPROTO_ICMP_:
	case IPPROTO_ICMPV6_:
	case NEXTHDR_HOP_:
	case NEXTHDR_FRAGMENT_:
		return true;
	}
	return start < transport || start > skb->len;
}

/* Whether packet p, no TCP, is for the port of the overlay, wherever it goes: masqueraded, it would
 * look like that of the container's own node, and what is inside may claim any source. Which
 * addresses are nodes' this node does not always know: some have just come, and each may have
 * others. Of fragments the first shows the port; the others lead nowhere without it. */
static __always_inline bool forges_overlay(struct __sk_buff *skb, const struct packet *p)
{
	__u32 offset = transport_of(p);
	__u8 protocol = p->ip.protocol, head[8];
	__be16 port;

	if (!protects(PROTECT_OVERLAY_PORT) || p->ip.frag_off & bpf_htons(IP_OFFSET_))
		return false;
	if (protocol == NEXTHDR_FRAGMENT_ && p->ipv6) {
		if (bpf_skb_load_bytes(skb, offset, head, sizeof(head)) || head[2] || head[3] & 0xf8)
			return false;
		offset += sizeof(head);
		protocol = head[0];
	}
	return protocol == IPPROTO_UDP_ && !bpf_skb_load_bytes(skb, offset + 2, &port, sizeof(port)) &&
	       port == bpf_htons(config_vxlan_port);
}

/* Why packet p, out of a container, may go no further, whatever it says; REASON_NONE if its headers
 * may be judged. */
static __noinline __u32 refuse_packet(struct __sk_buff *skb, const struct packet *p, int kind)
{
	if (!p || (protects(PROTECT_CHECKSUM) && rewrites_itself(skb, p)))
		return REASON_DROP_FORGED_CHECKSUM;
	if (protects(PROTECT_FRAMES) && skb->vlan_present)
		return REASON_DROP_NOT_IP;
	if (protects(PROTECT_FRAMES) && (p->ipv6 ? buries_tcp6(skb, p) : cuts_tcp4(skb, p)))
		return REASON_DROP_HIDDEN_TCP;
	return kind != PACKET_TCP && forges_overlay(skb, p) ? REASON_DROP_FORGED_OVERLAY : REASON_NONE;
}

/* Why a frame that comes out of the container with overlay address own, and has no IP header that
 * is read here, may go no further. */
static __noinline __u32 refuse_other(struct __sk_buff *skb, __be32 own)
{
	__u32 start, at;

	/* First: IPv6 of a network without is no forgery, and awaits checksums as any. */
	if (protects(PROTECT_FRAMES) && (skb->vlan_present || skb->protocol != bpf_htons(ETH_P_ARP)))
		return REASON_DROP_NOT_IP;
	if (protects(PROTECT_CHECKSUM) && awaits_checksum(skb, &start, &at))
		return REASON_DROP_FORGED_CHECKSUM;
	return protects(PROTECT_FRAMES) && spoofs_arp(skb, own) ? REASON_DROP_SPOOFED_SOURCE : REASON_NONE;
}

/* Whether the IP packet at offset has a source of the node with underlay address sender, or is from
 * that node itself. Nothing else is on the overlay: neighbours are permanent, so nobody asks for
 * them. */
static __always_inline bool inner_source_of(struct __sk_buff *skb, __u32 offset, __be32 sender)
{
	struct ip6hdr_ h6;
	struct route *from;
	struct address src;
	struct iphdr_ h;
	__be16 protocol;
	__be32 overlay;
	int i;

	if (bpf_skb_load_bytes(skb, offset - 2, &protocol, sizeof(protocol)))
		return false;
	if (protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, offset, &h, sizeof(h)))
			return false;
		overlay = h.saddr;
		if (overlay == sender)
			return true;
	} else if (protocol == bpf_htons(ETH_P_IPV6) && has_overlay6()) {
		if (bpf_skb_load_bytes(skb, offset, &h6, sizeof(h6)))
			return false;
		for (i = 0; i < 4; i++)
			src.word[i] = h6.saddr[i];
		if (!is_overlay6(&src))
			return false;
		overlay = src.word[3];
	} else {
		return false;
	}
	from = route_to(overlay);
	return from && from->underlay.word[3] == sender;
}

#define OVERLAY6_HEADERS 4 /* before UDP; nodes send none */

/* Finds UDP in the IPv6 packet with header h, behind extension headers: where it begins, *offset,
 * and whether it is in a first fragment. False: there is none, or it is in a later fragment. More
 * headers than that are taken for a UDP header that is not there. */
static __always_inline bool find_udp6(struct __sk_buff *skb, const struct ip6hdr_ *h, __u32 *offset,
                                      bool *first)
{
	__u8 next = h->next_header, head[4];
	__u32 at = ETH_HLEN + sizeof(*h);
	int i;

	for (i = 0; i < OVERLAY6_HEADERS; i++) {
		if (next == IPPROTO_UDP_)
			break;
		if (next != NEXTHDR_HOP_ && next != NEXTHDR_ROUTING_ && next != NEXTHDR_DEST_ &&
		    next != NEXTHDR_FRAGMENT_ && next != NEXTHDR_AUTH_)
			return false;
		if (bpf_skb_load_bytes(skb, at, head, sizeof(head)))
			return false;
		if (next == NEXTHDR_FRAGMENT_) {
			if (head[2] || head[3] & 0xf8)
				return false;
			*first = head[3] & 1;
			at += 8;
		} else {
			at += next == NEXTHDR_AUTH_ ? (head[1] + 2) * 4 : (head[1] + 1) * 8;
		}
		next = head[0];
	}
	*offset = at;
	return true;
}

/* refuse_overlay for an IPv6 underlay. */
static __noinline __u32 refuse_overlay6(struct __sk_buff *skb)
{
	struct vxlanhdr_ vxlan = {};
	struct mapped_node *node;
	struct address sender;
	struct udphdr_ udp;
	struct ip6hdr_ h;
	bool first = false;
	__u32 offset = 0;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)))
		return REASON_NONE;
	if (!is_outer(h.daddr) || !find_udp6(skb, &h, &offset, &first))
		return REASON_NONE;
	if (bpf_skb_load_bytes(skb, offset, &udp, sizeof(udp)) || udp.dest != bpf_htons(config_vxlan_port))
		return REASON_NONE;
	offset += sizeof(udp);
	if (first && bpf_ntohs(h.payload_len) + ETH_HLEN + sizeof(h) <
	                     offset + sizeof(vxlan) + ETH_HLEN + sizeof(struct ip6hdr_))
		return REASON_DROP_OVERLAY_SOURCE;
	if (bpf_skb_load_bytes(skb, offset, &vxlan, sizeof(vxlan)) || bpf_ntohl(vxlan.vni) >> 8 != config_vni)
		return REASON_NONE;
	set_words(&sender, h.saddr);
	node = bpf_map_lookup_elem(&mapped_by_outer, &sender);
	if (!node)
		return REASON_DROP_OVERLAY_STRANGER;
	return inner_source_of(skb, offset + sizeof(vxlan) + ETH_HLEN, node->inner)
	               ? REASON_NONE
	               : REASON_DROP_OVERLAY_SOURCE;
}

/* Why a packet that arrives on the underlay may not be taken for the overlay's; REASON_NONE if it
 * may, or is nothing of the kind. A first fragment shows all that is looked at; the others lead
 * nowhere without it. *plain says that decapsulate takes it. */
static __noinline __u32 refuse_overlay(struct __sk_buff *skb, bool *plain)
{
	struct vxlanhdr_ vxlan = {};
	struct address sender;
	struct udphdr_ udp;
	struct iphdr_ h;
	__u32 offset;

	if (!plain || !protects(PROTECT_OVERLAY))
		return REASON_NONE;
	if (hides_in_vlan(skb))
		return REASON_DROP_NOT_IP;
	if (is_translated())
		return refuse_overlay6(skb);
	if (skb->protocol != bpf_htons(ETH_P_IP) || bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)))
		return REASON_NONE;
	if (h.protocol != IPPROTO_UDP_ || h.daddr != config_underlay || h.frag_off & bpf_htons(IP_OFFSET_))
		return REASON_NONE;
	offset = ETH_HLEN + (h.version_ihl & 0xf) * 4;
	if (bpf_skb_load_bytes(skb, offset, &udp, sizeof(udp)) || udp.dest != bpf_htons(config_vxlan_port))
		return REASON_NONE;
	offset += sizeof(udp);
	/* What lies behind the end of a short fragment is not part of it. */
	if (h.frag_off & bpf_htons(IP_MF_) &&
	    bpf_ntohs(h.tot_len) + ETH_HLEN < offset + sizeof(vxlan) + ETH_HLEN + sizeof(struct ip6hdr_))
		return REASON_DROP_OVERLAY_SOURCE;
	if (bpf_skb_load_bytes(skb, offset, &vxlan, sizeof(vxlan)) || bpf_ntohl(vxlan.vni) >> 8 != config_vni)
		return REASON_NONE; /* another network's */
	set_mapped(&sender, h.saddr);
	if (!bpf_map_lookup_elem(&node_by_underlay, &sender))
		return REASON_DROP_OVERLAY_STRANGER;
	if (!inner_source_of(skb, offset + sizeof(vxlan) + ETH_HLEN, h.saddr))
		return REASON_DROP_OVERLAY_SOURCE;
	*plain = is_plain_tunnel(skb, &h, &udp, &vxlan);
	return REASON_NONE;
}

/* Why a packet that the underlay device brings may not come that way: endpoints are beyond the
 * overlay's. */
static __noinline __u32 refuse_outsider(const struct packet *p)
{
	struct route *from;

	if (!p || !p->ip.saddr || !protects(PROTECT_OVERLAY))
		return REASON_NONE;
	from = route_to(p->ip.saddr);
	return from && !(from->flags & (ROUTE_NODE_ADDR | ROUTE_ADOPTED)) ? REASON_DROP_SPOOFED_SOURCE
	                                                                  : REASON_NONE;
}

/* Whether packet p is a SYN that says, as only nodes may, which endpoints it joins: masqueraded, it
 * would look like the node's, also at a node that this one does not know yet. */
static __noinline bool forges_option(struct __sk_buff *skb, const struct packet *p)
{
	struct syn_option o;

	if (!p || !is_syn(p) || !protects(PROTECT_DIRECT_PORTS))
		return false;
	return find_option(skb, p, &o) != 0;
}

/* Whether packet p may leave endpoint self: from its own address, from none yet, or from the
 * link-local one that its device's hardware address gives, which goes no further than the node. */
static __always_inline bool may_send_from(const struct endpoint *self, const struct packet *p)
{
	if (!p->ipv6)
		return p->ip.saddr == self->addr4.word[3] || p->ip.saddr == 0;
	if (is_overlay6(&p->src6))
		return p->ip.saddr == self->addr4.word[3];
	if (self->flags & ENDPOINT_ADOPTED && is_link_local6(&p->src6))
		return true; /* its hardware address is not Heddle's */
	return is_unspecified6(&p->src6) || is_own_link_local6(&p->src6, self->id);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Direct connections on an IPv6 underlay. Node sockets may be of AF_INET, which can send nothing
 * but IPv4, so within a node each node has an inner IPv4 address: sockets, SYN option, steering,
 * relay and probes know these only. A device leads to them, and there packets get the IPv6
 * addresses of the nodes, without a state, as in RFC 7915 with a table of addresses (RFC 7757);
 * what arrives gets the inner ones before anything else looks at it. Decision 0092. */
#ifndef HEDDLE_TC_WIRE_H
#define HEDDLE_TC_WIRE_H

#include "include/abi/underlay.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/headers.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/route.h"
#include "include/syn_option.h"
#include "tc/packet.h"
#include "tc/tcp_option.h"
#include "tc/translate.h"

#define NOT_OF_NODES   (-1) /* from_wire: nothing of theirs, or VXLAN */
#define PACKET_OVERLAY 0x10 /* read_wire: VXLAN of this node */

/* Whether what has these ports, host's own first, is of a direct connection between this node and
 * peer: it is to or from a direct port of one of them. */
static __always_inline bool of_direct_ports(const struct mapped_node *peer, __be16 own, __be16 theirs)
{
	__u16 port = bpf_ntohs(theirs);

	return in_direct_ports(own) || (port >= peer->port_first && port <= peer->port_last);
}

/* Sends what is for an inner address to that node's IPv6 address. */
static __always_inline int to_wire_verdict(struct __sk_buff *skb)
{
	struct address src, dst;
	struct mapped_node *peer;
	struct packet p;
	__s64 diff;

	if (read_packet(skb, &p) != PACKET_TCP || p.ipv6 || p.ip.saddr != config_underlay)
		return drop(REASON_DROP_UNTRANSLATED);
	peer = bpf_map_lookup_elem(&mapped_by_inner, &p.ip.daddr);
	if (!peer || !of_direct_ports(peer, p.tcp.source, p.tcp.dest))
		return drop(REASON_DROP_UNTRANSLATED);
	set_outer(&src);
	dst = peer->outer;
	if (become_ipv6(skb, &p, &src, &dst, &diff) ||
	    bpf_l4_csum_replace(skb, IPV6_TCP_OFFSET + TCP_CHECK_OFFSET, 0, diff, BPF_F_PSEUDO_HDR))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(config_outer_ifindex, NULL, 0, 0);
}

/* A packet to a direct port of no node that is known. As on IPv4, a SYN that names endpoints is
 * dropped and counted, and the kernel refuses all else. */
static __noinline int from_stranger(struct __sk_buff *skb)
{
	struct packet p = {.ipv6 = 1, .tcp_offset = IPV6_TCP_OFFSET};
	struct syn_option o;

	if (read_tcp(skb, &p) != PACKET_TCP || !is_syn(&p) || !protects(PROTECT_SYN_SENDER) ||
	    find_option(skb, &p, &o) == 0)
		return NOT_OF_NODES;
	return drop(REASON_DROP_UNKNOWN_NODE);
}

/* Gives what a node sends to this one's IPv6 address, of a direct connection, their inner
 * addresses, and lets it arrive by the device of these. TCP behind an extension header is nothing
 * that a node sends. */
static __noinline int from_wire(struct __sk_buff *skb)
{
	static const __u8 inner_mac[6] = {0x02, 0x48, 0x44, 0x00, 0x00, 0x03};
	struct mapped_node *peer;
	struct address sender;
	__be16 ports[2];
	struct ip6hdr_ h;
	__s64 diff;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)))
		return NOT_OF_NODES;
	if (h.next_header != IPPROTO_TCP_ || !is_outer(h.daddr) ||
	    bpf_skb_load_bytes(skb, IPV6_TCP_OFFSET, ports, sizeof(ports)))
		return NOT_OF_NODES;
	set_words(&sender, h.saddr);
	peer = bpf_map_lookup_elem(&mapped_by_outer, &sender);
	if (!peer)
		return in_direct_ports(ports[1]) ? from_stranger(skb) : NOT_OF_NODES;
	if (!of_direct_ports(peer, ports[1], ports[0]))
		return NOT_OF_NODES;
	if (become_ipv4(skb, &h, peer->inner, config_underlay, &diff) ||
	    bpf_l4_csum_replace(skb, IPV4_TCP_OFFSET + TCP_CHECK_OFFSET, 0, diff, BPF_F_PSEUDO_HDR) ||
	    bpf_skb_store_bytes(skb, 0, inner_mac, sizeof(inner_mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_underlay_ifindex, BPF_F_INGRESS);
}

/* Reads what leaves by the device of the IPv6 underlay: translated packets with their inner
 * addresses, VXLAN as PACKET_OVERLAY, all else as it is. */
static __noinline int read_wire(struct __sk_buff *skb, struct packet *p)
{
	struct mapped_node *peer;
	struct address to;
	struct ip6hdr_ h;

	if (!p)
		return PACKET_OTHER;
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return read_packet(skb, p);
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h)))
		return PACKET_OTHER;
	if (!is_outer(h.saddr))
		return read_packet(skb, p);
	if (h.next_header == IPPROTO_UDP_)
		return PACKET_OVERLAY;
	set_words(&to, h.daddr);
	peer = bpf_map_lookup_elem(&mapped_by_outer, &to);
	if (h.next_header != IPPROTO_TCP_ || !peer)
		return read_packet(skb, p);
	__builtin_memset(p, 0, sizeof(*p));
	p->ipv6 = 1;
	p->tcp_offset = IPV6_TCP_OFFSET;
	p->ip.protocol = IPPROTO_TCP_;
	p->ip.saddr = config_underlay;
	p->ip.daddr = peer->inner;
	return read_tcp(skb, p);
}

#endif

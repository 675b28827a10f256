/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Translates between IPv4 on the underlay and a container's IPv6 packets: a direct connection
 * between IPv6 overlay addresses whose listener is not intercepted. Headers are translated as in
 * RFC 7915; there are no fragments and no options to carry. */
#ifndef HEDDLE_TC_TRANSLATE_H
#define HEDDLE_TC_TRANSLATE_H

#include "include/address.h"
#include "tc/packet.h"

#define ETH_PROTO_OFFSET 12
#define IPV6_TCP_OFFSET  (ETH_HLEN + (int)sizeof(struct ip6hdr_))
#define IPV4_TCP_OFFSET  (ETH_HLEN + (int)sizeof(struct iphdr_))
#define IP_DF            bpf_htons(0x4000)

static __always_inline __u16 fold_checksum(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)~sum;
}

/* Replaces the TCP header's ports, and in its checksum the ports and the pseudo header's addresses:
 * by diff, as bpf_csum_diff() gives it. The header's new offset is tcp. */
static __always_inline int replace_ports(struct __sk_buff *skb, const struct packet *p,
                                         const struct flow_key *to, __u32 tcp, __s64 diff)
{
	__u32 check = tcp + TCP_CHECK_OFFSET;

	if (bpf_l4_csum_replace(skb, check, 0, diff, BPF_F_PSEUDO_HDR) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.source, to->sport, 2) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.dest, to->dport, 2) ||
	    bpf_skb_store_bytes(skb, tcp, &to->sport, 4, 0)) /* both ports */
		return -1;
	return 0;
}

/* Gives the IPv4 packet p a header of IPv6, from src to dst. The pseudo header of its TCP checksum
 * changes by diff. */
static __always_inline int become_ipv6(struct __sk_buff *skb, const struct packet *p,
                                       const struct address *src, const struct address *dst, __s64 *diff)
{
	__be16 proto = bpf_htons(ETH_P_IPV6);
	__be32 before[2] = {p->ip.saddr, p->ip.daddr};
	struct ip6hdr_ h = {};
	int i;

	if ((p->ip.version_ihl & 0xf) != 5)
		return -1;
	h.version_class_flow = bpf_htonl(6 << 28 | (__u32)p->ip.tos << 20);
	h.payload_len = bpf_htons(bpf_ntohs(p->ip.tot_len) - sizeof(struct iphdr_));
	h.next_header = IPPROTO_TCP_;
	h.hop_limit = p->ip.ttl;
	for (i = 0; i < 4; i++) {
		h.saddr[i] = src->word[i];
		h.daddr[i] = dst->word[i];
	}
	*diff = bpf_csum_diff(before, sizeof(before), h.saddr, sizeof(h.saddr) * 2, 0);
	if (bpf_skb_change_proto(skb, proto, 0) ||
	    bpf_skb_store_bytes(skb, ETH_PROTO_OFFSET, &proto, sizeof(proto), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return -1;
	/* A sum over the whole packet, if the device gave one, has the new header as well: that of the
	 * old one was 0. It fails where there is none. */
	bpf_csum_update(skb, bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0));
	return 0;
}

/* Makes the IPv4 packet p an IPv6 one from src to dst, with to's ports. */
static __always_inline int translate_between(struct __sk_buff *skb, const struct packet *p,
                                             const struct flow_key *to, const struct address *src,
                                             const struct address *dst)
{
	__s64 diff;

	if (become_ipv6(skb, p, src, dst, &diff))
		return -1;
	return replace_ports(skb, p, to, IPV6_TCP_OFFSET, diff);
}

/* Gives an IPv6 packet, whose header is old, one of IPv4 from saddr to daddr. The pseudo header of
 * its TCP checksum changes by diff. */
static __always_inline int become_ipv4(struct __sk_buff *skb, const struct ip6hdr_ *old, __be32 saddr,
                                       __be32 daddr, __s64 *diff)
{
	__be16 proto = bpf_htons(ETH_P_IP);
	__be32 addresses[2] = {saddr, daddr};
	__s64 whole = bpf_csum_diff((__be32 *)old, sizeof(*old), NULL, 0, 0);
	struct iphdr_ h = {};

	h.version_ihl = 0x45;
	h.tos = (__u8)(bpf_ntohl(old->version_class_flow) >> 20);
	h.tot_len = bpf_htons(bpf_ntohs(old->payload_len) + sizeof(h));
	h.frag_off = IP_DF;
	h.ttl = old->hop_limit;
	h.protocol = IPPROTO_TCP_;
	h.saddr = saddr;
	h.daddr = daddr;
	h.check = fold_checksum(bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0));
	*diff = bpf_csum_diff((__be32 *)old->saddr, sizeof(old->saddr) * 2, addresses, sizeof(addresses), 0);
	if (bpf_skb_change_proto(skb, proto, 0) ||
	    bpf_skb_store_bytes(skb, ETH_PROTO_OFFSET, &proto, sizeof(proto), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return -1;
	bpf_csum_update(skb, whole); /* without the old header, as in become_ipv6 */
	return 0;
}

/* Makes the IPv6 packet p an IPv4 one from to->saddr to to->daddr. */
static __always_inline int translate_to_ipv4(struct __sk_buff *skb, const struct packet *p,
                                             const struct flow_key *to)
{
	struct ip6hdr_ old;
	__s64 diff;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &old, sizeof(old)) ||
	    become_ipv4(skb, &old, to->saddr, to->daddr, &diff))
		return -1;
	return replace_ports(skb, p, to, IPV4_TCP_OFFSET, diff);
}

#define IP_CHECK_OFFSET (ETH_HLEN + 10)
#define IP_SADDR_OFFSET (ETH_HLEN + 12)

/* Rewrites addresses and ports of p in place from (ip, tcp) to k. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	__u32 check = p->tcp_offset + TCP_CHECK_OFFSET;

	if (bpf_l4_csum_replace(skb, check, p->ip.saddr, k->saddr, BPF_F_PSEUDO_HDR | 4) ||
	    bpf_l4_csum_replace(skb, check, p->ip.daddr, k->daddr, BPF_F_PSEUDO_HDR | 4) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.source, k->sport, 2) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.dest, k->dport, 2) ||
	    bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, p->ip.saddr, k->saddr, 4) ||
	    bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, p->ip.daddr, k->daddr, 4) ||
	    bpf_skb_store_bytes(skb, IP_SADDR_OFFSET, &k->saddr, 8, 0) || /* both addresses */
	    bpf_skb_store_bytes(skb, p->tcp_offset, &k->sport, 4, 0))     /* both ports */
		return -1;
	return 0;
}

/* Makes packet p one of IPv4 with to's addresses and ports, whatever it is. */
static __always_inline int rewrite_to_ipv4(struct __sk_buff *skb, const struct packet *p,
                                           const struct flow_key *to)
{
	return p->ipv6 ? translate_to_ipv4(skb, p, to) : rewrite(skb, p, to);
}

/* Makes the IPv4 packet p one from src to dst, of their family, with to's ports. */
static __always_inline int rewrite_between(struct __sk_buff *skb, const struct packet *p, bool ipv6,
                                           struct flow_key *to, const struct address *src,
                                           const struct address *dst)
{
	if (ipv6)
		return translate_between(skb, p, to, src, dst);
	to->saddr = src->word[3];
	to->daddr = dst->word[3];
	return rewrite(skb, p, to);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reading packets in tc programs. Headers are copied, not mapped: after GRO they need not be linear. */
#ifndef HEDDLE_PACKET_H
#define HEDDLE_PACKET_H

struct packet {
	struct iphdr_ ip;
	struct tcphdr_ tcp;
	__u32 tcp_offset; /* from the start of the frame */
};

/* Reads IPv4 and, if it is TCP and not a later fragment, TCP headers. Gives 0 for anything that is not
 * IPv4, 4 for IPv4 of which only ip is valid, 6 for TCP. */
static __always_inline int read_packet(struct __sk_buff *skb, struct packet *p)
{
	__u32 ihl;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &p->ip, sizeof(p->ip)))
		return 0;
	ihl = (p->ip.version_ihl & 0xf) * 4;
	if (p->ip.protocol != IPPROTO_TCP_ || p->ip.frag_off & bpf_htons(0x1fff) || ihl < sizeof(p->ip))
		return 4;
	p->tcp_offset = ETH_HLEN + ihl;
	if (bpf_skb_load_bytes(skb, p->tcp_offset, &p->tcp, sizeof(p->tcp)))
		return 4;
	return 6;
}

static __always_inline struct flow_key wire_key(const struct packet *p)
{
	struct flow_key k = {
	        .saddr = p->ip.saddr,
	        .daddr = p->ip.daddr,
	        .sport = p->tcp.source,
	        .dport = p->tcp.dest,
	};
	return k;
}

static __always_inline struct bpf_sock *lookup(struct __sk_buff *skb, __be32 saddr, __be16 sport,
                                               __be32 daddr, __be16 dport)
{
	struct bpf_sock_tuple t = {};

	t.ipv4.saddr = saddr;
	t.ipv4.sport = sport;
	t.ipv4.daddr = daddr;
	t.ipv4.dport = dport;
	return bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
}

/* Whether sk, found for a packet to an overlay address, belongs to endpoint owner. Listeners on a
 * wildcard of the node itself match the lookup too and are not: no tag. Request and time-wait sockets
 * carry no tag; they exist only as children of sockets that did. */
static __always_inline bool owned(struct bpf_sock *sk, __u32 owner)
{
	struct sock_tag *tag;

	if (sk->state == BPF_TCP_NEW_SYN_RECV || sk->state == BPF_TCP_TIME_WAIT)
		return true;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return tag && tag->endpoint_id == owner;
}

#endif

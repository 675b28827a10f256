/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Answers probes: SYNs whose option asks whether it arrives (OPTION_PROBE). The agent's listener
 * answers, so that the probe passes the node's firewall as a connection would; while there is no
 * agent, which connections do without, the program answers itself. */
#ifndef HEDDLE_TC_PROBE_H
#define HEDDLE_TC_PROBE_H

#include "include/address.h"
#include "include/count.h"
#include "include/tag.h"
#include "tc/packet.h"

/* Where the agent listens: loopback alias 1 of no endpoint, at port "Hd". Mirrors
 * internal/plane/tcp/probe.go. */
#define PROBE_SLOT 1
#define PROBE_PORT 0x4864

/* Assigns the SYN to the agent's listener, if there is one. */
static __always_inline bool assign_probe(struct __sk_buff *skb, const struct flow_key *k)
{
	struct bpf_sock *sk = lookup(skb, k->saddr, 0, alias(0, PROBE_SLOT), bpf_htons(PROBE_PORT));
	struct sock_tag *tag;
	bool assigned = false;

	if (!sk)
		return false;
	if (sk->state == BPF_TCP_LISTEN) {
		tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
		if (tag && tag->flags & TAG_PROBE)
			assigned = bpf_sk_assign(skb, sk, 0) == 0;
	}
	bpf_sk_release(sk);
	return assigned;
}

/* Exchanges the addresses of the packet. */
static __always_inline int exchange_addresses(struct __sk_buff *skb, const struct packet *p)
{
	struct address both[2];
	__be32 addresses[2];

	if (p->ipv6) {
		both[0] = p->dst6;
		both[1] = p->src6;
		return bpf_skb_store_bytes(skb, ETH_HLEN + 8, both, sizeof(both), 0);
	}
	addresses[0] = p->ip.daddr;
	addresses[1] = p->ip.saddr;
	return bpf_skb_store_bytes(skb, ETH_HLEN + 12, addresses, sizeof(addresses), 0);
}

/* Makes the SYN its own SYN-ACK, for whoever sent the frame. Its options go back as they are: a
 * timestamp has no echo yet, and the others say the same in both directions. Exchanging addresses
 * and ports changes no checksum. */
static __noinline int make_answer(struct __sk_buff *skb, const struct packet *p)
{
	__u32 check, ports;
	__u8 mac[12], flags[2];
	__be32 seq, ack;
	__be16 port[2], was, is;

	if (!p || bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)))
		return -1;
	check = p->tcp_offset + TCP_CHECK_OFFSET;
	ports = p->tcp_offset;
	port[0] = p->tcp.dest;
	port[1] = p->tcp.source;
	seq = bpf_get_prandom_u32();
	ack = bpf_htonl(bpf_ntohl(p->tcp.seq) + 1);
	flags[0] = p->tcp.doff_res;
	flags[1] = p->tcp.flags;
	__builtin_memcpy(&was, flags, 2);
	flags[1] = TCP_FLAG_SYN_ | TCP_FLAG_ACK_;
	__builtin_memcpy(&is, flags, 2);
	if (bpf_l4_csum_replace(skb, check, p->tcp.seq, seq, 4) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.ack_seq, ack, 4) ||
	    bpf_l4_csum_replace(skb, check, was, is, 2) ||
	    bpf_skb_store_bytes(skb, ports, port, sizeof(port), 0) ||
	    bpf_skb_store_bytes(skb, ports + 4, &seq, sizeof(seq), 0) ||
	    bpf_skb_store_bytes(skb, ports + 8, &ack, sizeof(ack), 0) ||
	    bpf_skb_store_bytes(skb, ports + 12, &is, sizeof(is), 0) || exchange_addresses(skb, p) ||
	    bpf_skb_store_bytes(skb, 0, mac + 6, 6, 0) || bpf_skb_store_bytes(skb, 6, mac, 6, 0))
		return -1;
	return 0;
}

static __always_inline int answer_probe(struct __sk_buff *skb, const struct packet *p)
{
	return make_answer(skb, p) ? TC_ACT_SHOT : bpf_redirect(skb->ifindex, 0);
}

/* The option is one of a known node's: reject_option and reject_sender have seen it. */
static __noinline int steer_probe(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	struct bpf_sock *sk;
	bool live = false;

	if (!p || !k)
		return TC_ACT_SHOT;
	sk = lookup(skb, k->saddr, k->sport, k->daddr, k->dport);
	if (sk) {
		live = sk->state != BPF_TCP_LISTEN;
		bpf_sk_release(sk);
	}
	if (live) /* retransmitted */
		return TC_ACT_OK;
	if (assign_probe(skb, k)) {
		count(REASON_PROBE_LISTENER);
		return TC_ACT_OK;
	}
	count(REASON_PROBE_ANSWERED);
	return answer_probe(skb, p);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SYNs for a 4-tuple that is in TIME_WAIT. */
#ifndef HEDDLE_TC_TIME_WAIT_H
#define HEDDLE_TC_TIME_WAIT_H

#include "include/kernel_types.h"
#include "tc/packet.h"
#include "tc/tcp_option.h"

/* What SYN_RETURNED marks came back from end_time_wait and is not sent round again. */
#define SYN_RETURNED 0x48640010

/* Turns the SYN into the RST of the connection whose end waits at expected (RFC 1337, section 2).
 * Its options become payload, so that no timestamp of them is judged. */
static __always_inline int make_reset(struct __sk_buff *skb, const struct packet *p, __be32 expected)
{
	__u32 check = p->tcp_offset + TCP_CHECK_OFFSET;
	__be32 seq = p->tcp.seq;
	__be16 was, is;
	__u8 flags[2];

	flags[0] = p->tcp.doff_res;
	flags[1] = p->tcp.flags;
	__builtin_memcpy(&was, flags, 2);
	flags[0] = sizeof(struct tcphdr_) / 4 << 4;
	flags[1] = TCP_FLAG_RST_;
	__builtin_memcpy(&is, flags, 2);
	if (bpf_l4_csum_replace(skb, check, seq, expected, 4) ||
	    bpf_l4_csum_replace(skb, check, was, is, 2) ||
	    bpf_skb_store_bytes(skb, p->tcp_offset + 4, &expected, sizeof(expected), 0) ||
	    bpf_skb_store_bytes(skb, p->tcp_offset + 12, &is, sizeof(is), 0))
		return -1;
	return 0;
}

/* A SYN for a 4-tuple that the node has in TIME_WAIT, because its server closed first. The kernel
 * takes the new connection for the old one's place if it finds a listener at the packet's own
 * destination, as RFC 6191 has it. Here the listener is elsewhere, and since 6.x a SYN that is
 * assigned to it is dropped while the 4-tuple is taken, again and again for a minute. So the
 * kernel's rule is applied here: if the SYN is newer than what waits, it is sent round once more,
 * by the device's queue (BPF_F_INGRESS, or 0: as if it were sent), and before it the wait is ended
 * by a RST made of this one. Gives 1 if that is done, 0 if the SYN is not newer, and -1 if it
 * cannot be done. */
static __always_inline int take_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 how)
{
	__u32 expected = 0, recent = 0, stamp = 0, timestamp = 0, options, seq;
	struct tcp_timewait_sock *wait;
	struct bpf_sock *sk;

	if (skb->mark == SYN_RETURNED)
		return 0;
	sk = lookup_exact(skb, p);
	if (!sk)
		return 0;
	wait = bpf_skc_to_tcp_timewait_sock(sk);
	if (!wait) {
		bpf_sk_release(sk);
		return 0;
	}
	expected = wait->tw_sk.__tw_common.skc_tw_rcv_nxt;
	recent = wait->tw_ts_recent;
	stamp = wait->tw_ts_recent_stamp;
	bpf_sk_release(sk);

	seq = bpf_ntohl(p->tcp.seq);
	options = p->tcp_offset + sizeof(p->tcp);
	if ((__s32)(seq - expected) <= 0 &&
	    !(stamp && read_timestamp(skb, options, p->tcp_offset + (p->tcp.doff_res >> 4) * 4, &timestamp) &&
	      (__s32)(timestamp - recent) > 0))
		return 0;
	barrier();
	skb->mark = SYN_RETURNED;
	if (bpf_clone_redirect(skb, skb->ifindex, how))
		return -1;
	skb->mark = 0;
	return make_reset(skb, p, bpf_htonl(expected)) ? -1 : 1;
}

static __noinline int end_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 how)
{
	return p ? take_time_wait(skb, p, how) : -1;
}

#endif

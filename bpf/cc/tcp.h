/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What congestion controls read and write of the kernel's TCP, relocated at load time (CO-RE). Of
 * tcp_sock the kernel lets them write snd_cwnd, snd_cwnd_cnt, snd_ssthresh and ecn_flags. */
#ifndef HEDDLE_CC_TCP_H
#define HEDDLE_CC_TCP_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

#define TCP_CONG_NEEDS_ECN 2 /* tcp_congestion_ops.flags */
#define TCP_ECN_OK         1 /* tcp_sock.ecn_flags */
#define TCP_ECN_DEMAND_CWR 4
#define ACK_TIMER          2 /* inet_connection_sock.icsk_ack.pending: ICSK_ACK_TIMER, _NOW */
#define ACK_NOW            16
#define CA_PRIV_SIZE       104 /* bytes of inet_connection_sock.icsk_ca_priv */
#define STATE_LISTEN       10  /* sock_common.skc_state */
#define STATE_CLOSE        7

enum ca_event { /* enum tcp_ca_event */
	        EVENT_LOSS = 3,
	        EVENT_ECN_NO_CE = 4,
	        EVENT_ECN_IS_CE = 5,
};

enum ca_state { /* enum tcp_ca_state */
	        STATE_OPEN = 0,
	        STATE_CWR = 2,
	        STATE_RECOVERY = 3,
	        STATE_LOSS = 4,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock_common {
	volatile unsigned char skc_state;
};

struct sock {
	struct sock_common __sk_common;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	__u8 icsk_ca_state : 5;
	struct {
		__u8 pending;
	} icsk_ack;
	__u64 icsk_ca_priv[CA_PRIV_SIZE / 8];
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 snd_ssthresh;
	__u32 snd_cwnd;
	__u32 snd_cwnd_cnt;
	__u32 snd_cwnd_clamp;
	__u32 delivered;
	__u32 delivered_ce;
	__u32 max_packets_out;
	__u8 ecn_flags;
};

struct rate_sample;

struct ack_sample {
	__u32 pkts_acked;
	__s32 rtt_us;
	__u32 in_flight;
};

struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*set_state)(struct sock *sk, __u8 new_state);
	void (*cwnd_event)(struct sock *sk, __u32 event);
	void (*in_ack_event)(struct sock *sk, __u32 flags);
	void (*pkts_acked)(struct sock *sk, const struct ack_sample *sample);
	void (*init)(struct sock *sk);
	__u32 (*undo_cwnd)(struct sock *sk);
	__u32 flags;
	char name[16];
};

#pragma clang attribute pop

extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;
extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;

static inline struct tcp_sock *tcp_of(struct sock *sk)
{
	return (struct tcp_sock *)sk;
}

/* Whether sequence number a is before b. */
static inline int before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

#endif

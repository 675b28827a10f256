/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Data Center TCP (RFC 8257): switches mark packets (CE) when their queue passes a few packets, and
 * the sender takes its window back by the share of marked bytes, not by half. Queues stay short at
 * full throughput, where every queue on the way marks, and only there. */
#include "tcp.h"

#define ALPHA_MAX  1024 /* alpha is a fraction of this */
#define GAIN_SHIFT 4    /* g = 1/16, RFC 8257 section 4.2 */

struct dctcp {
	__u32 alpha;
	__u32 window_end; /* alpha is estimated anew when this is acknowledged */
	__u32 delivered;  /* at the beginning of the window */
	__u32 delivered_ce;
	__u32 loss_cwnd;
	__u32 received; /* rcv_nxt before the last change of ce */
	__u32 ce;       /* the last data packet that came was marked */
	__u32 off;      /* the connection has no ECN: as reno */
};
_Static_assert(sizeof(struct dctcp) <= CA_PRIV_SIZE, "more than the kernel has room for");

static inline struct dctcp *state_of(struct sock *sk)
{
	return (struct dctcp *)tcp_of(sk)->inet_conn.icsk_ca_priv;
}

static inline void begin_window(struct tcp_sock *tp, struct dctcp *ca)
{
	ca->window_end = tp->snd_nxt;
	ca->delivered = tp->delivered;
	ca->delivered_ce = tp->delivered_ce;
}

SEC("struct_ops/dctcp_init")
void BPF_PROG(dctcp_init, struct sock *sk)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct dctcp *ca = state_of(sk);
	int state = sk->__sk_common.skc_state;

	ca->off = !(tp->ecn_flags & TCP_ECN_OK) && state != STATE_LISTEN && state != STATE_CLOSE;
	ca->alpha = ALPHA_MAX; /* RFC 8257 section 4.2: cautious at first */
	ca->received = tp->rcv_nxt;
	ca->loss_cwnd = 0;
	ca->ce = 0;
	begin_window(tp, ca);
}

SEC("struct_ops/dctcp_ssthresh")
__u32 BPF_PROG(dctcp_ssthresh, struct sock *sk)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct dctcp *ca = state_of(sk);
	__u32 cwnd = tp->snd_cwnd, less = ca->off ? cwnd >> 1 : (cwnd * ca->alpha) >> 11;

	ca->loss_cwnd = cwnd;
	return cwnd - less > 2 ? cwnd - less : 2;
}

/* Once a window: how much of what was delivered in it was marked. */
SEC("struct_ops/dctcp_in_ack_event")
void BPF_PROG(dctcp_in_ack_event, struct sock *sk, __u32 flags)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct dctcp *ca = state_of(sk);
	__u32 marked, all, alpha = ca->alpha, less;

	if (before(tp->snd_una, ca->window_end))
		return;
	marked = tp->delivered_ce - ca->delivered_ce;
	all = tp->delivered - ca->delivered;
	less = alpha >> GAIN_SHIFT;
	alpha -= less ? less : alpha; /* a small alpha reaches 0 */
	if (marked && all) {
		if (marked > all)
			marked = all;
		alpha += ((__u64)marked << (10 - GAIN_SHIFT)) / all;
		if (alpha > ALPHA_MAX)
			alpha = ALPHA_MAX;
	}
	ca->alpha = alpha;
	begin_window(tp, ca);
}

/* A packet that is lost is answered as by any other TCP. */
static inline void lost(struct sock *sk)
{
	struct tcp_sock *tp = tcp_of(sk);
	__u32 half = tp->snd_cwnd >> 1;

	state_of(sk)->loss_cwnd = tp->snd_cwnd;
	tp->snd_ssthresh = half > 2 ? half : 2;
}

SEC("struct_ops/dctcp_set_state")
void BPF_PROG(dctcp_set_state, struct sock *sk, __u8 new_state)
{
	if (new_state == STATE_RECOVERY && tcp_of(sk)->inet_conn.icsk_ca_state != STATE_RECOVERY)
		lost(sk);
}

/* RFC 8257 section 3.2: acknowledgements say for each packet whether it was marked, so that one is
 * sent at once for what came before the mark changed. */
static inline void echo(struct sock *sk, __u32 ce)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct dctcp *ca = state_of(sk);

	if (ca->ce != ce) {
		if (tp->inet_conn.icsk_ack.pending & ACK_TIMER) {
			if (ca->ce)
				tp->ecn_flags |= TCP_ECN_DEMAND_CWR;
			else
				tp->ecn_flags &= ~TCP_ECN_DEMAND_CWR;
			bpf_tcp_send_ack(tp, ca->received);
		}
		tp->inet_conn.icsk_ack.pending |= ACK_NOW;
	}
	ca->received = tp->rcv_nxt;
	ca->ce = ce;
	if (ce)
		tp->ecn_flags |= TCP_ECN_DEMAND_CWR;
	else
		tp->ecn_flags &= ~TCP_ECN_DEMAND_CWR;
}

SEC("struct_ops/dctcp_cwnd_event")
void BPF_PROG(dctcp_cwnd_event, struct sock *sk, __u32 event)
{
	if (state_of(sk)->off)
		return;
	switch (event) {
	case EVENT_ECN_IS_CE:
		echo(sk, 1);
		break;
	case EVENT_ECN_NO_CE:
		echo(sk, 0);
		break;
	case EVENT_LOSS:
		lost(sk);
	}
}

SEC("struct_ops/dctcp_cong_avoid")
void BPF_PROG(dctcp_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

SEC("struct_ops/dctcp_undo_cwnd")
__u32 BPF_PROG(dctcp_undo_cwnd, struct sock *sk)
{
	__u32 cwnd = tcp_of(sk)->snd_cwnd, before_loss = state_of(sk)->loss_cwnd;

	return cwnd > before_loss ? cwnd : before_loss;
}

SEC(".struct_ops.link")
struct tcp_congestion_ops dctcp = {
        .init = (void *)dctcp_init,
        .ssthresh = (void *)dctcp_ssthresh,
        .cong_avoid = (void *)dctcp_cong_avoid,
        .in_ack_event = (void *)dctcp_in_ack_event,
        .set_state = (void *)dctcp_set_state,
        .cwnd_event = (void *)dctcp_cwnd_event,
        .undo_cwnd = (void *)dctcp_undo_cwnd,
        .flags = TCP_CONG_NEEDS_ECN,
        .name = "dctcp",
};

char _license[] SEC("license") = "Dual BSD/GPL";

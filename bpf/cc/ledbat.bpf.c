/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Low Extra Delay Background Transport (RFC 6817), with round-trip times as LEDBAT++ has it
 * (draft-irtf-iccrg-ledbat-plus-plus): for backups, image pulls and replication that are to take
 * what others leave. The window grows while packets wait less than TARGET on the way, and shrinks
 * when they wait longer, which they do as soon as somebody else fills the queue. */
#include "tcp.h"

#define TARGET_US     60000           /* LEDBAT++, section 4.5 */
#define BASE_NS       300000000000ULL /* five minutes */
#define NOT_KNOWN     (~0U)
#define CWND_FRACTION 1024 /* of a segment, in which the window grows */
#define MIN_CWND      2

struct ledbat {
	__u64 base_began; /* ns since boot */
	__u32 base;       /* least round-trip time since then, microseconds */
	__u32 earlier;    /* and in the five minutes before */
	__u32 least;      /* of the last window of packets: what delayed acknowledgements add is left out */
	__u32 window_end;
	__u32 queueing; /* of the window before that, microseconds */
	__s32 credit;   /* parts of a segment that the window is to grow by */
	__u32 loss_cwnd;
};
_Static_assert(sizeof(struct ledbat) <= CA_PRIV_SIZE, "more than the kernel has room for");

static inline struct ledbat *state_of(struct sock *sk)
{
	return (struct ledbat *)tcp_of(sk)->inet_conn.icsk_ca_priv;
}

SEC("struct_ops/ledbat_init")
void BPF_PROG(ledbat_init, struct sock *sk)
{
	struct ledbat *ca = state_of(sk);

	ca->base_began = bpf_ktime_get_ns();
	ca->base = NOT_KNOWN;
	ca->earlier = NOT_KNOWN;
	ca->least = NOT_KNOWN;
	ca->window_end = tcp_of(sk)->snd_nxt;
	ca->queueing = 0;
	ca->credit = 0;
	ca->loss_cwnd = 0;
}

/* RFC 6817, section 3.4.2: the route may change, so what is older than ten minutes is forgotten. */
static inline void note_base(struct ledbat *ca, __u32 rtt)
{
	__u64 now = bpf_ktime_get_ns();

	if (now - ca->base_began > BASE_NS) {
		ca->base_began = now;
		ca->earlier = ca->base;
		ca->base = NOT_KNOWN;
	}
	if (rtt < ca->base)
		ca->base = rtt;
}

SEC("struct_ops/ledbat_pkts_acked")
void BPF_PROG(ledbat_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct ledbat *ca = state_of(sk);
	__u32 base;

	if (sample->rtt_us < 0)
		return;
	note_base(ca, sample->rtt_us);
	if ((__u32)sample->rtt_us < ca->least)
		ca->least = sample->rtt_us;
	if (before(tp->snd_una, ca->window_end))
		return;
	base = ca->base < ca->earlier ? ca->base : ca->earlier;
	ca->queueing = ca->least != NOT_KNOWN && base < ca->least ? ca->least - base : 0;
	ca->least = NOT_KNOWN;
	ca->window_end = tp->snd_nxt;
}

SEC("struct_ops/ledbat_cong_avoid")
void BPF_PROG(ledbat_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	struct tcp_sock *tp = tcp_of(sk);
	struct ledbat *ca = state_of(sk);
	__s32 away, credit = ca->credit;
	__u32 cwnd = tp->snd_cwnd;

	/* It leaves slow start at three quarters of the target. */
	if (cwnd < tp->snd_ssthresh && ca->queueing < TARGET_US / 4 * 3) {
		tcp_reno_cong_avoid(sk, ack, acked);
		return;
	}
	if (!cwnd || acked > cwnd)
		return;
	/* One segment a window at no delay, none at the target; a window that is above shrinks by as
	 * much, at most by half of what was acknowledged. */
	away = (__s32)TARGET_US - (__s32)ca->queueing;
	if (away < -(__s32)TARGET_US * 8)
		away = -(__s32)TARGET_US * 8;
	if (away > 0 && tp->max_packets_out < cwnd)
		return; /* the window is not what limits it */
	if (away >= 0)
		credit += (__u32)away * CWND_FRACTION / TARGET_US * acked / cwnd;
	else
		credit -= (__u32)-away * CWND_FRACTION / TARGET_US * acked / cwnd;
	if (credit >= CWND_FRACTION && cwnd < tp->snd_cwnd_clamp) {
		cwnd += (__u32)credit / CWND_FRACTION;
		credit = (__u32)credit % CWND_FRACTION;
	}
	if (credit <= -CWND_FRACTION) {
		__u32 less = (__u32)-credit / CWND_FRACTION;

		credit += less * CWND_FRACTION;
		cwnd = cwnd > MIN_CWND + less ? cwnd - less : MIN_CWND;
	}
	ca->credit = credit;
	tp->snd_cwnd = cwnd;
	if (tp->snd_ssthresh > cwnd)
		tp->snd_ssthresh = cwnd; /* slow start is over */
}

SEC("struct_ops/ledbat_ssthresh")
__u32 BPF_PROG(ledbat_ssthresh, struct sock *sk)
{
	struct ledbat *ca = state_of(sk);
	__u32 cwnd = tcp_of(sk)->snd_cwnd;

	ca->loss_cwnd = cwnd;
	ca->credit = 0;
	return cwnd / 2 > MIN_CWND ? cwnd / 2 : MIN_CWND;
}

SEC("struct_ops/ledbat_undo_cwnd")
__u32 BPF_PROG(ledbat_undo_cwnd, struct sock *sk)
{
	__u32 cwnd = tcp_of(sk)->snd_cwnd, before_loss = state_of(sk)->loss_cwnd;

	return cwnd > before_loss ? cwnd : before_loss;
}

SEC(".struct_ops.link")
struct tcp_congestion_ops ledbat = {
        .init = (void *)ledbat_init,
        .ssthresh = (void *)ledbat_ssthresh,
        .cong_avoid = (void *)ledbat_cong_avoid,
        .pkts_acked = (void *)ledbat_pkts_acked,
        .undo_cwnd = (void *)ledbat_undo_cwnd,
        .name = "ledbat",
};

char _license[] SEC("license") = "Dual BSD/GPL";

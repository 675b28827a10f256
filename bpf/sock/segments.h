/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Size of segments over lo, for the caps of tc/limit.bpf.c. Asked by connect. */
#ifndef HEDDLE_SOCK_SEGMENTS_H
#define HEDDLE_SOCK_SEGMENTS_H

#include "include/kernel_types.h"
#include "include/limits.h"
#include "sock/context.h"

/* The slowest of an endpoint's caps, bytes a second; most if it has none that is slower. */
static __always_inline __u64 slowest_cap(__u32 endpoint_id, __u64 most)
{
	struct limit *l = limit_of(endpoint_id);

	if (l && l->egress.rate && l->egress.rate < most)
		most = l->egress.rate;
	if (l && l->ingress.rate && l->ingress.rate < most)
		most = l->ingress.rate;
	return most;
}

#define SLOW_CAP    (50000000 / 8) /* bytes a second */
#define SLOW_MAXSEG 1448

/* Segments of lo's size, 64 KB, are too large for a slow cap: a few connections with one or two
 * each on the way fill its queue. A connection of an endpoint that has one, or to one, is made with
 * those of an Ethernet, unless the program asked for smaller ones. */
static __noinline int segments_for_limit(struct bpf_sock_addr *ctx, __u32 own, __u32 peer)
{
	struct tcp_sock *tp;
	int most = SLOW_MAXSEG;

	if (!limits_in_force || own == peer || slowest_cap(own, slowest_cap(peer, SLOW_CAP)) >= SLOW_CAP)
		return 0;
	tp = bpf_skc_to_tcp_sock(sk_of(ctx));
	if (!tp || (tp->rx_opt.user_mss && tp->rx_opt.user_mss < SLOW_MAXSEG))
		return 0;
	return bpf_setsockopt(ctx, SOL_TCP_, 2 /* TCP_MAXSEG */, &most, sizeof(most));
}

#endif

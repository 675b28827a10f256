/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections between two sockets of one node have nothing to share but its processors, and BBR,
 * which paces what it sends by timers, moves a fraction there of what others do. Where BBR is what
 * the node gives every socket, such a connection has reno, which every kernel has. The program
 * still reads "bbr"; what it chose itself stays. Decision 0037. */
#ifndef HEDDLE_SOCK_CONGESTION_H
#define HEDDLE_SOCK_CONGESTION_H

#include "include/abi/tag.h"
#include "include/congestion.h"
#include "include/kernel.h"

#define BBR_INFO 20 /* bytes of struct tcp_bbr_info */

/* The socket is connected over lo. It must be at the moment at which it becomes so: later BBR has
 * begun to pace, which outlasts it. */
static __noinline int replace_bbr(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	struct congestion c;

	if (!tag || tag->options & OPTION_CONGESTION)
		return 0;
	congestion_from(&c, 0);
	if (bpf_getsockopt(ops, SOL_TCP_, 13 /* TCP_CONGESTION */, &c, sizeof(c)) ||
	    c.word[0] != CONGESTION_BBR)
		return 0;
	congestion_from(&c, CONGESTION_RENO);
	if (!bpf_setsockopt(ops, SOL_TCP_, 13, &c, sizeof(c)))
		/* note_congestion has no lock */
		__sync_fetch_and_or(&tag->flags, TAG_RENO_FOR_BBR);
	return 0;
}

/* The socket was disconnected, and may go elsewhere now. */
static __noinline int restore_bbr(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	struct congestion c;

	if (!tag || !(tag->flags & TAG_RENO_FOR_BBR))
		return 0;
	__sync_fetch_and_and(&tag->flags, ~TAG_RENO_FOR_BBR);
	congestion_from(&c, 0);
	if (bpf_getsockopt(ops, SOL_TCP_, 13, &c, sizeof(c)) || c.word[0] != CONGESTION_RENO)
		return 0; /* the program has chosen another since */
	congestion_from(&c, CONGESTION_BBR);
	bpf_setsockopt(ops, SOL_TCP_, 13, &c, sizeof(c));
	return 0;
}

/* The program sets TCP_CONGESTION. Whether the kernel takes it is not known yet; of what it cannot
 * refuse, reno, it could not be told afterwards who chose it. */
static __always_inline void note_congestion(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	__u8 *p = ctx->optval;

	__sync_fetch_and_or(&tag->options, OPTION_CONGESTION); /* without a lock */
	if (ctx->optlen >= 4 && (void *)(p + 4) <= ctx->optval_end && *(__u32 *)p == CONGESTION_RENO)
		__sync_fetch_and_and(&tag->flags, ~TAG_RENO_FOR_BBR);
}

/* The kernel answered with the name, or as much of it as there was room for. */
static __always_inline void show_congestion(struct bpf_sockopt *ctx, const struct sock_tag *tag)
{
	const __u32 reno = CONGESTION_RENO, bbr = CONGESTION_BBR;
	__u8 *p = ctx->optval;
	int i;

	if (!(tag->flags & TAG_RENO_FOR_BBR))
		return;
	for (i = 0; i < 4; i++)
		if ((void *)(p + i + 1) <= ctx->optval_end && p[i] != (__u8)(reno >> 8 * i))
			return; /* the program has chosen another since */
	for (i = 0; i < 4; i++)
		if ((void *)(p + i + 1) <= ctx->optval_end)
			p[i] = bbr >> 8 * i;
}

/* TCP_CC_INFO: reno has none, BBR five words. They are those of a connection that has sent
 * nothing. */
static __always_inline void show_congestion_info(struct bpf_sockopt *ctx, const struct sock_tag *tag)
{
	__u8 *p = ctx->optval;
	int i, room = 0;

	if (!(tag->flags & TAG_RENO_FOR_BBR) || ctx->optlen)
		return;
	for (i = 0; i < BBR_INFO; i++) {
		if ((void *)(p + i + 1) > ctx->optval_end)
			break;
		p[i] = i == 13 || i == 17; /* both gains are 256 */
		room = i + 1;
	}
	ctx->optlen = room;
}

#endif

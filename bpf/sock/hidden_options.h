/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Socket options that would show packets as they are on the underlay, or lead them into the node's
 * own stack. */
#ifndef HEDDLE_SOCK_HIDDEN_OPTIONS_H
#define HEDDLE_SOCK_HIDDEN_OPTIONS_H

#include "include/abi/tag.h"
#include "include/kernel.h"

#define TIMESTAMPING_TSONLY (1 << 11) /* SOF_TIMESTAMPING_OPT_TSONLY */
#define TIMESTAMPING_STATS  (1 << 12) /* SOF_TIMESTAMPING_OPT_STATS: valid with the other only */
#define TIMESTAMPING_MASK   0x7ffff   /* all flags that are known here */

/* SO_TIMESTAMPING. The time of sending comes on the error queue together with the packet, from its
 * Ethernet header on, unless TIMESTAMPING_TSONLY is set. Sockets are made with it
 * (plane/tcp/sockets.go), because a control message of sendmsg() asks for timestamps as well, and
 * it stays set. False: with flags of a newer kernel, of which nobody knows what they show. */
static __always_inline bool hide_sent_packets(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	__u8 *p = ctx->optval;
	__u32 flags;

	if (ctx->optlen < (int)sizeof(flags) || (void *)(p + sizeof(flags)) > ctx->optval_end)
		return true;
	flags = *(__u32 *)p;
	if (flags & ~TIMESTAMPING_MASK)
		return false;
	if (flags & TIMESTAMPING_TSONLY) {
		__sync_fetch_and_or(&tag->options, OPTION_TSONLY);
		return true;
	}
	if (flags & TIMESTAMPING_STATS)
		return true; /* the kernel refuses it */
	__sync_fetch_and_and(&tag->options, ~OPTION_TSONLY);
	*(__u32 *)p = flags | TIMESTAMPING_TSONLY;
	return true;
}

/* Takes the flag that the program did not set out of what the kernel answered. */
static __always_inline void show_timestamping(struct bpf_sockopt *ctx, const struct sock_tag *tag)
{
	__u8 *p = ctx->optval;

	if (!(tag->options & OPTION_TSONLY) && (void *)(p + 2) <= ctx->optval_end)
		p[1] &= ~(TIMESTAMPING_TSONLY >> 8);
}

/* Whether TCP_ULP asks for kTLS. Others hand what is received to the node's own stack
 * (espintcp). */
static __always_inline bool asks_for_tls(struct bpf_sockopt *ctx)
{
	__u8 *p = ctx->optval;

	if (ctx->optlen < 3 || (void *)(p + 3) > ctx->optval_end || p[0] != 't' || p[1] != 'l' || p[2] != 's')
		return false;
	return ctx->optlen == 3 || ((void *)(p + 4) <= ctx->optval_end && !p[3]);
}

#endif

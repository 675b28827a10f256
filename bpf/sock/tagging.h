/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Makes a socket an endpoint's: its tag, and the mark of node sockets. The agent asks for that by a
 * socket option: to write into the map, and to set the mark, took a tenth of its time for a trapped
 * socket() more (docs/decisions/0116). */
#ifndef HEDDLE_SOCK_TAGGING_H
#define HEDDLE_SOCK_TAGGING_H

#include "include/abi/tag.h"
#include "include/config.h"
#include "include/kernel.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "sock/socket_quota.h"

#define HEDDLE_TAG_SOCKET 2

/* False: the option is not what the agent asks, and is to be dealt with as any other. */
static __always_inline bool tag_for_agent(struct bpf_sockopt *ctx)
{
	struct tagging *asked = ctx->optval;
	__u32 mark = config_mark;
	struct sock_tag *tag;

	if (ctx->level != SOL_HEDDLE || ctx->optname != HEDDLE_TAG_SOCKET || ctx->optlen != sizeof(*asked) ||
	    (void *)(asked + 1) > ctx->optval_end)
		return false;
	if (asked->key != config_agent_key && protects(PROTECT_AGENT_OPTION))
		return false;
	tag = bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!tag)
		return false;
	tag->endpoint_id = asked->endpoint_id;
	tag->incarnation = asked->incarnation;
	tag->options = asked->options;
	return !bpf_setsockopt(ctx->sk, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark));
}

#endif

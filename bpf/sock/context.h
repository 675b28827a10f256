/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the hooks at bind() and connect() share: their context, errors, and flags of the tag. */
#ifndef HEDDLE_SOCK_CONTEXT_H
#define HEDDLE_SOCK_CONTEXT_H

#include "include/abi/tag.h"
#include "include/count.h"

/* Flags that say what SO_MARK is. */
#define TAGS_OF_MARK (TAG_ROUTED | TAG_DROPPED)

/* Flags that a bind() starts without. */
#define TAGS_OF_NAMES (TAG_WILD | TAG_ANY6 | TAG_LOCAL | TAG_REMOTE)

static __always_inline void set_user_ip6(struct bpf_sock_addr *ctx, const struct address *a)
{
	ctx->user_ip6[0] = a->word[0];
	ctx->user_ip6[1] = a->word[1];
	ctx->user_ip6[2] = a->word[2];
	ctx->user_ip6[3] = a->word[3];
}

/* ctx->sk. In assembly, because the compiler would keep a pointer to the field in a register, and the verifier
 * refuses a moved context pointer. */
static __always_inline struct bpf_sock *sk_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk;

	asm volatile("%[sk] = *(u64 *)(%[ctx] + %[offset])"
	             : [sk] "=r"(sk)
	             : [ctx] "r"(ctx), [offset] "i"(__builtin_offsetof(struct bpf_sock_addr, sk)));
	return sk;
}

static __always_inline int refuse(__u32 reason, int err)
{
	count(reason);
	bpf_set_retval(-err);
	return 0;
}

static __always_inline int take(struct sock_tag *tag, __u8 path, __u8 counted, __u8 reason)
{
	tag->path = path;
	tag->reason = reason;
	count(reason ? reason : counted);
	return 1;
}

#endif

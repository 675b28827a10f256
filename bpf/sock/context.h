/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the hooks at bind() and connect() share: their context, errors, and flags of the tag. */
#ifndef HEDDLE_SOCK_CONTEXT_H
#define HEDDLE_SOCK_CONTEXT_H

#include "include/abi/tag.h"
#include "include/address.h"
#include "include/count.h"
#include "include/headers.h"

/* Flags that say what SO_MARK is. */
#define TAGS_OF_MARK (TAG_ROUTED | TAG_DROPPED)

/* Flags that a bind() starts without. */
#define TAGS_OF_NAMES (TAG_WILD | TAG_ANY6 | TAG_LOCAL | TAG_REMOTE)

/* The verifier lets a program at an IPv4 hook touch no IPv6 field of its context, nor the other way
 * round. So the family of the socket, sk6, is a constant of each program. The family of an address,
 * ipv6, is another: IPv6 sockets go to v4-mapped addresses, too. */
static __always_inline void get_user_address(struct bpf_sock_addr *ctx, bool sk6, struct address *a)
{
	if (sk6) {
		a->word[0] = ctx->user_ip6[0];
		a->word[1] = ctx->user_ip6[1];
		a->word[2] = ctx->user_ip6[2];
		a->word[3] = ctx->user_ip6[3];
	} else {
		set_mapped(a, ctx->user_ip4);
	}
}

static __always_inline void set_user_address(struct bpf_sock_addr *ctx, bool sk6, const struct address *a)
{
	if (sk6) {
		ctx->user_ip6[0] = a->word[0];
		ctx->user_ip6[1] = a->word[1];
		ctx->user_ip6[2] = a->word[2];
		ctx->user_ip6[3] = a->word[3];
	} else {
		ctx->user_ip4 = a->word[3];
	}
}

/* ctx->sk. In assembly, because the compiler would keep a pointer to the field in a register, and
 * the verifier refuses a moved context pointer. */
static __always_inline struct bpf_sock *sk_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk;

	asm volatile("%[sk] = *(u64 *)(%[ctx] + %[offset])"
	             : [sk] "=r"(sk)
	             : [ctx] "r"(ctx), [offset] "i"(__builtin_offsetof(struct bpf_sock_addr, sk)));
	return sk;
}

/* Has the kernel bind the socket to a:port; 0 for any. Gives an errno. */
static __always_inline int bind_to(struct bpf_sock_addr *ctx, bool sk6, const struct address *a, __be16 port)
{
	if (sk6) {
		struct sockaddr_in6_ sa = {};
		int i;

		sa.family = AF_INET6;
		sa.port = port;
		for (i = 0; i < 4; i++)
			sa.addr[i] = a->word[i];
		return bpf_bind(ctx, (struct sockaddr *)&sa, sizeof(sa));
	} else {
		struct sockaddr_in_ sa = {};

		sa.family = AF_INET;
		sa.port = port;
		sa.addr = a->word[3];
		return bpf_bind(ctx, (struct sockaddr *)&sa, sizeof(sa));
	}
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

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* getsockname(), getpeername() and the address accept() returns: programs see overlay addresses. */

#include "include/address.h"
#include "include/maps.h"
#include "sock/context.h"

static __always_inline struct sock_tag *named(struct bpf_sock_addr *ctx)
{
	if (!ctx->sk)
		return NULL;
	return bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, 0);
}

/* After a connect that failed, or was undone (AF_UNSPEC), the kernel keeps the source address that
 * bind_source gave the socket; a program that never bound it sees none, as without Heddle. */
static __always_inline bool has_no_name(struct bpf_sock_addr *ctx, const struct sock_tag *tag)
{
	return ctx->sk->state == BPF_TCP_CLOSE && !ctx->sk->dst_port && !(tag->flags & TAG_BOUND);
}

/* Bound to a wildcard, and not connected: neither now nor until its peer ended it. */
static __always_inline bool is_wild(struct bpf_sock_addr *ctx, const struct sock_tag *tag)
{
	return tag->flags & TAG_WILD && !ctx->sk->dst_port;
}

/* The service that the program asked for, if it was one. */
static __always_inline struct service_key *asked_service(struct bpf_sock_addr *ctx,
                                                         const struct sock_tag *tag)
{
	return tag && tag->flags & TAG_SERVICE ? bpf_sk_storage_get(&service_by_sock, ctx->sk, 0, 0) : NULL;
}

static __always_inline int show_local(struct bpf_sock_addr *ctx, bool sk6)
{
	struct sock_tag *tag = named(ctx);
	struct address any = {};

	/* No address in the kernel: not bound, or a connect failed. Nothing to hide. */
	if (!tag || !(sk6 ? ctx->user_ip6[3] : ctx->user_ip4))
		return 1;
	if (is_wild(ctx, tag) || has_no_name(ctx, tag)) {
		if (tag->flags & TAG_WILD && !(tag->flags & TAG_ANY6))
			any.word[2] = V4_MAPPED_PREFIX;
		set_user_address(ctx, sk6, &any);
	} else if (tag->flags & TAG_LOCAL) {
		set_user_address(ctx, sk6, &tag->local);
	}
	if (tag->local_port)
		ctx->user_port = tag->local_port;
	return 1;
}

static __always_inline int show_remote(struct bpf_sock_addr *ctx, bool sk6)
{
	struct sock_tag *tag = named(ctx);
	struct service_key *asked = asked_service(ctx, tag);

	if (asked) {
		set_user_address(ctx, sk6, &asked->addr);
		ctx->user_port = asked->port;
	} else if (tag && tag->flags & TAG_REMOTE) {
		set_user_address(ctx, sk6, &tag->remote);
		if (tag->remote_port)
			ctx->user_port = tag->remote_port;
	}
	return 1;
}

SEC("cgroup/getsockname4")
int getsockname4(struct bpf_sock_addr *ctx)
{
	return show_local(ctx, false);
}

SEC("cgroup/getsockname6")
int getsockname6(struct bpf_sock_addr *ctx)
{
	return show_local(ctx, true);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return show_remote(ctx, false);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return show_remote(ctx, true);
}

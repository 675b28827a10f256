/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* connect() to where policy forbids, and what it shares with the paths of sock/connect.bpf.c: mark and destination. */
#ifndef HEDDLE_SOCK_CONNECT_FORBIDDEN_H
#define HEDDLE_SOCK_CONNECT_FORBIDDEN_H

#include "include/abi/endpoint.h"
#include "include/abi/tag.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "policy/decide.h"
#include "sock/context.h"

/* Gives the socket the mark of one of TAG_ROUTED and TAG_DROPPED, or that of node sockets (0). */
static __always_inline bool change_mark(struct bpf_sock_addr *ctx, struct sock_tag *tag, __u32 want)
{
	__u32 mark = config_mark;

	if ((tag->flags & TAGS_OF_MARK) == want)
		return true;
	if (want == TAG_ROUTED)
		mark = config_overlay_mark;
	else if (want == TAG_DROPPED)
		mark = config_drop_mark;
	if (bpf_setsockopt(ctx, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		return false;
	tag->flags = (tag->flags & ~TAGS_OF_MARK) | want;
	return true;
}

static __always_inline void set_mark(struct bpf_sock_addr *ctx, struct sock_tag *tag, bool routed)
{
	change_mark(ctx, tag, routed ? TAG_ROUTED : 0);
}

/* The verifier lets a connect4 program touch no IPv6 field, so the family of the socket is a constant of
 * each program (sk6) rather than read from ctx. */
static __always_inline void set_destination(struct bpf_sock_addr *ctx, bool sk6, __be32 dst, __be16 port)
{
	if (sk6) {
		ctx->user_ip6[0] = 0;
		ctx->user_ip6[1] = 0;
		ctx->user_ip6[2] = V4_MAPPED_PREFIX;
		ctx->user_ip6[3] = dst;
	} else {
		ctx->user_ip4 = dst;
	}
	ctx->user_port = port;
}

static __always_inline int refuse_connect(int err)
{
	bpf_set_retval(-err);
	return 0;
}

/* The verdict on a connect of ep to overlay or other address dst; forbidden6 for an IPv6 one. */
static __noinline __u32 forbidden(const struct endpoint *ep, __be32 dst, __u32 port)
{
	struct address to;

	set_mapped(&to, dst);
	return decide(&ep->addr4, &to, IPPROTO_TCP_, port);
}

static __noinline __u32 forbidden6(const struct endpoint *ep, const struct address *dst, __u32 port)
{
	struct address own;

	set_overlay6(&own, ep->addr4.word[3]);
	return decide(&own, dst, IPPROTO_TCP_, port);
}

/* Whether the socket is bound to an address that is v4-mapped underneath. */
static __always_inline bool is_mapped_underneath(struct bpf_sock_addr *ctx)
{
	__be32 src = sk_of(ctx)->src_ip4;

	return src != 0 && src != LOOPBACK4_IPV6;
}

/* A connect that must hear nothing. Its SYNs do not leave: nftables drops what has the mark. They go to a port of lo
 * where nothing can listen, one of the endpoint's own addresses, so that a node without the rule refuses them and
 * no container takes another one's ports. */
static __always_inline int connect_dropped(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                           const struct endpoint *ep, __be32 dst, __u32 reason)
{
	if (!change_mark(ctx, tag, TAG_DROPPED))
		return refuse_connect(ECONNREFUSED_);
	count(reason);
	if (!(tag->flags & TAG_BOUND)) {
		tag->flags |= TAG_LOCAL;
		set_mapped(&tag->local, ep->addr4.word[3]);
	}
	tag->flags |= TAG_REMOTE;
	set_mapped(&tag->remote, dst);
	tag->remote_port = ctx->user_port;
	set_destination(ctx, sk6, alias4(ep->id, LOOPBACK4), 0);
	return 1;
}

/* The same for an IPv6 destination: over IPv6, because a socket that once tried IPv4 keeps to it. One that is bound to [::]
 * is at an IPv4 address. */
static __always_inline int connect_dropped6(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                            const struct endpoint *ep, const struct address *dst,
                                            __u32 reason)
{
	struct address to;

	if (!change_mark(ctx, tag, TAG_DROPPED))
		return refuse_connect(ECONNREFUSED_);
	count(reason);
	if (!(tag->flags & TAG_BOUND)) {
		tag->flags |= TAG_LOCAL;
		set_overlay6(&tag->local, ep->addr4.word[3]);
	}
	tag->flags |= TAG_REMOTE;
	tag->remote = *dst;
	tag->remote_port = ctx->user_port;
	if (is_mapped_underneath(ctx)) {
		set_destination(ctx, true, alias4(ep->id, LOOPBACK4), 0);
		return 1;
	}
	set_loopback6(&to);
	set_user_ip6(ctx, &to);
	ctx->user_port = 0;
	return 1;
}

#endif

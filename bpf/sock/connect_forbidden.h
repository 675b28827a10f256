/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* connect() to where policy forbids, and what it shares with the paths of sock/connect.bpf.c: mark
 * and destination. */
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

/* Sends the socket to the IPv4 address dst. */
static __always_inline void set_destination(struct bpf_sock_addr *ctx, bool sk6, __be32 dst, __be16 port)
{
	struct address to;

	set_mapped(&to, dst);
	set_user_address(ctx, sk6, &to);
	ctx->user_port = port;
}

static __always_inline int refuse_connect(int err)
{
	bpf_set_retval(-err);
	return 0;
}

/* The verdict on a connect of ep to dst, of the overlay or not. */
static __noinline __u32 forbidden(const struct endpoint *ep, const struct address *dst, __u32 port)
{
	struct address own;

	set_overlay(&own, !is_mapped(dst), ep->addr4.word[3]);
	return decide(&own, dst, IPPROTO_TCP_, port);
}

/* Whether the socket is bound to an address that is v4-mapped underneath. */
static __always_inline bool is_mapped_underneath(struct bpf_sock_addr *ctx)
{
	__be32 src = sk_of(ctx)->src_ip4;

	return src != 0 && src != LOOPBACK4_IPV6;
}

/* Sends the socket to a port of lo where nothing can listen: to v4, or, if ipv6, to ::1, because a
 * socket that once tried IPv4 keeps to it. */
static __always_inline void set_nowhere(struct bpf_sock_addr *ctx, bool sk6, bool ipv6, __be32 v4)
{
	struct address to;

	set_loopback(&to, ipv6, v4);
	set_user_address(ctx, sk6, &to);
	ctx->user_port = 0;
}

/* A connect that must hear nothing. Its SYNs do not leave: nftables drops what has the mark. They
 * go to one of the endpoint's own addresses, so that a node without the rule refuses them and no
 * container takes another one's ports. */
static __always_inline int connect_dropped(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                           struct sock_tag *tag, const struct endpoint *ep,
                                           const struct address *dst, __u32 reason)
{
	if (!change_mark(ctx, tag, TAG_DROPPED))
		return refuse_connect(ECONNREFUSED_);
	count(reason);
	if (!(tag->flags & TAG_BOUND)) {
		tag->flags |= TAG_LOCAL;
		set_overlay(&tag->local, ipv6, ep->addr4.word[3]);
	}
	tag->flags |= TAG_REMOTE;
	tag->remote = *dst;
	tag->remote_port = ctx->user_port;
	/* One that is bound to [::] is at an IPv4 address. */
	set_nowhere(ctx, sk6, ipv6 && !is_mapped_underneath(ctx), alias4(ep->id, LOOPBACK4));
	return 1;
}

/* A connect that must fail because nothing listens, or policy says so. A non-blocking one learns it
 * as from any network: EINPROGRESS first. A socket that is bound cannot go there (the RST would not
 * find it) and is told at once. */
static __always_inline int connect_refused(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                           struct sock_tag *tag)
{
	if (sk_of(ctx)->src_ip4)
		return refuse_connect(ECONNREFUSED_);
	set_mark(ctx, tag, false);
	set_nowhere(ctx, sk6, ipv6, LOOPBACK4);
	return 1;
}

#endif

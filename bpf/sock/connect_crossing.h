/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What sockets can do that are bound, and connect where their address is of no use: see
 * tc/crossing.h. */
#ifndef HEDDLE_SOCK_CONNECT_CROSSING_H
#define HEDDLE_SOCK_CONNECT_CROSSING_H

#include "include/abi/endpoint.h"
#include "include/abi/reason.h"
#include "include/abi/tag.h"
#include "include/address.h"
#include "include/mirror.h"
#include "include/once.h"
#include "sock/connect_forbidden.h"
#include "sock/context.h"

/* Whether the socket is bound to a port only: to the node's wildcard, by AF_UNSPEC. It can be given
 * no address any more. */
static __always_inline bool is_wildcard_bound(struct bpf_sock_addr *ctx)
{
	return !sk_of(ctx)->src_ip4 && sk_of(ctx)->src_port;
}

/* Whether the program bound the IPv6 socket to a v4-mapped address: then the kernel lets it go
 * nowhere else. */
static __always_inline bool is_bound_mapped(const struct sock_tag *tag)
{
	return (tag->flags & (TAG_BOUND | TAG_BOUND6 | TAG_ANY6)) == TAG_BOUND;
}

/* To dst, beyond the container, from a socket whose own address is of no use there
 * (tc/crossing.h). */
static __always_inline int connect_crossing(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                            const struct endpoint *ep, const struct address *dst, __u8 path,
                                            __u8 reason)
{
	/* Its device is another network's. */
	if (ep->flags & ENDPOINT_ADOPTED)
		return refuse(REASON_REFUSE_BIND_FOREIGN, EADDRNOTAVAIL_);
	crosses_once(ep->id);
	set_mark(ctx, tag, false);
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_overlay(&tag->local, !is_mapped(dst), ep->addr4.word[3]);
	tag->remote = *dst;
	tag->remote_port = ctx->user_port;
	set_destination(ctx, sk6, crossing_of(ep->id, dst), ctx->user_port);
	return take(tag, path, 0, reason);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* connect() of a container to itself: to its loopback, by an alias, or to a process of it that is
 * not intercepted, by a mirror address. And the source address that a connect gets. */
#ifndef HEDDLE_SOCK_CONNECT_LOOPBACK_H
#define HEDDLE_SOCK_CONNECT_LOOPBACK_H

#include "include/abi/endpoint.h"
#include "include/abi/path.h"
#include "include/abi/reason.h"
#include "include/abi/tag.h"
#include "include/address.h"
#include "include/config.h"
#include "include/headers.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "sock/connect_crossing.h"
#include "sock/connect_forbidden.h"
#include "sock/context.h"
#include "sock/listener.h"
#include "sock/own_stack.h"

/* Fixes the source address: src, or the IPv6 form of that overlay address. Its port is left to
 * connect(). Not for sockets that have one already. */
static __always_inline void bind_source(struct bpf_sock_addr *ctx, bool sk6, bool ipv6, __be32 src)
{
	struct address a;

	if (sk_of(ctx)->src_ip4)
		return;
	set_overlay(&a, ipv6, src);
	bind_to(ctx, sk6, &a, 0);
}

/* Undoes bind_source after a connect that failed: the kernel keeps an address that was bound. */
static __always_inline void unbind_source(struct bpf_sock_addr *ctx, bool sk6)
{
	struct address none = {};

	bind_to(ctx, sk6, &none, 0);
}

/* An accepted connection that the program undid (AF_UNSPEC) keeps the address that it had
 * underneath: that of a direct one is the node's. The container's own takes its place. False: it
 * cannot. */
static __always_inline bool restore_source(struct bpf_sock_addr *ctx, bool sk6, const struct endpoint *ep)
{
	__be32 src = sk_of(ctx)->src_ip4;

	if (!src || src == LOOPBACK4_IPV6 || src == ep->addr4.word[3] || is_alias(src) ||
	    !protects(PROTECT_NODE_ADDRESS))
		return true;
	unbind_source(ctx, sk6);
	bind_source(ctx, sk6, false, ep->addr4.word[3]);
	return sk_of(ctx)->src_ip4 == ep->addr4.word[3];
}

/* The names of a connection to loopback address dst, 0 for ::1. wild: the socket is bound to a
 * wildcard. */
static __always_inline void name_loopback(struct bpf_sock_addr *ctx, struct sock_tag *tag, __be32 dst,
                                          bool wild)
{
	tag->flags |= TAG_REMOTE;
	set_loopback(&tag->remote, !dst, dst);
	tag->remote_port = ctx->user_port;
	if (wild || !(tag->flags & TAG_BOUND)) {
		tag->flags |= TAG_LOCAL;
		set_loopback(&tag->local, !dst, LOOPBACK4);
	}
	/* The accepting side takes 127.0.0.1 (or ::1) for granted. */
	if (tag->flags & TAG_BOUND || (dst && dst != LOOPBACK4))
		tag->flags |= TAG_NAMES;
}

/* Goes to target, the alias at_alias or the own address, from the alias source. dst as above. */
static __always_inline int connect_alias(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                         const struct endpoint *ep, __be32 target, __be32 at_alias,
                                         __be32 source, __be32 dst, bool wild)
{
	__be32 own = ep->addr4.word[3];
	struct listener at = {.loopback = true};

	/* The RST would not find a socket that is bound to the overlay address. */
	if (target == at_alias && sk_of(ctx)->src_ip4 == own &&
	    !listens(ctx, false, own, at_alias, ctx->user_port, ep->id, &at))
		return refuse_connect(ECONNREFUSED_);
	set_mark(ctx, tag, false);
	bind_source(ctx, sk6, false, source);
	name_loopback(ctx, tag, dst, wild);
	set_destination(ctx, sk6, target, ctx->user_port);
	return take(tag, PATH_LOOPBACK, REASON_CONNECT_LOOPBACK, 0);
}

/* Whether a process listens at dst that is not intercepted: then connect_own_stack is the way. */
static __always_inline bool own_stack_listens(struct bpf_sock_addr *ctx, const struct endpoint *ep, bool ipv6,
                                              __be32 dst)
{
	return mirror_of(ep, ipv6, dst) && sk_of(ctx)->src_ip4 != LOOPBACK4_IPV6 &&
	       own_stack_has_listener(ctx, ep, ipv6, dst, ctx->user_port);
}

/* To dst, an address of the container itself, through the veth (include/mirror.h). */
static __always_inline int connect_own_stack(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                             const struct endpoint *ep, bool ipv6, __be32 dst, bool wild)
{
	__be32 own = ep->addr4.word[3], target = mirror_of(ep, ipv6, dst);
	__be32 src = dst == own || ipv6 ? dst : LOOPBACK4, source;
	__be16 port = ctx->user_port;
	struct own_stack_packet p;

	set_mark(ctx, tag, false);
	if (!sk_of(ctx)->src_ip4) {
		/* Not an alias, where the program need not see one: firewalls of Kubernetes' nodes
		 * drop what goes to 127.0.0.0/8 from elsewhere, as the answers would. */
		source = own;
		if (dst != own || ipv6)
			target |= bpf_htonl(MIRROR_WILD);
		set_own_stack_packet(&p, ep, ipv6, src, dst, port);
		if (!bind_own_stack_source(ctx, &p, source, sk6))
			bind_source(ctx, sk6, false, source); /* the kernel's choice must do */
	} else if (sk_of(ctx)->src_ip4 == own && (wild || ipv6)) {
		target |= bpf_htonl(MIRROR_WILD);
	}
	tag->flags |= TAG_REMOTE;
	set_name(&tag->remote, ipv6, dst);
	tag->remote_port = port;
	if (wild || !(tag->flags & TAG_BOUND)) {
		tag->flags |= TAG_LOCAL;
		set_name(&tag->local, ipv6, src);
	}
	set_destination(ctx, sk6, target, port);
	return take(tag, dst == own ? PATH_LOCAL : PATH_LOOPBACK, 0, REASON_FALLBACK_OWN_PLAIN);
}

/* Docker's DNS listens at a port of its own choice. In the container's own stack a DNAT rule for
 * what is sent there leads from port 53 to it; what comes from the node meets no such rule, so it
 * goes to that port at once. False: not so. */
static __always_inline bool lead_to_resolver(struct bpf_sock_addr *ctx, const struct endpoint *ep, __be32 dst)
{
	if (dst != DOCKER_DNS || ctx->user_port != bpf_htons(DNS_PORT) || !ep->resolver_port)
		return false;
	ctx->user_port = ep->resolver_port;
	if (own_stack_listens(ctx, ep, false, dst))
		return true;
	ctx->user_port = bpf_htons(DNS_PORT);
	return false;
}

/* dst is in 127.0.0.0/8, or 0.0.0.0. */
static __always_inline int connect_loopback(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                            const struct endpoint *ep, __be32 dst, bool wild)
{
	__be32 asked = dst ? dst : LOOPBACK4;
	__be32 source = alias4(ep->id, LOOPBACK4);
	__be32 at_alias = alias4(ep->id, asked);
	__be32 own = ep->addr4.word[3], target = at_alias;
	struct listener at = {.loopback = true};
	bool found = listens(ctx, false, source, at_alias, ctx->user_port, ep->id, &at);
	__be16 port = ctx->user_port;
	int ok;

	/* A wildcard listener is bound to the overlay address. */
	if (!found && listens(ctx, false, source, own, ctx->user_port, ep->id, &at) && at.flags & TAG_WILD) {
		target = own;
		found = true;
	}
	if (!found && (own_stack_listens(ctx, ep, false, asked) || lead_to_resolver(ctx, ep, asked))) {
		ok = connect_own_stack(ctx, sk6, tag, ep, false, asked, wild);
		tag->remote_port = port;
		return ok;
	}
	return connect_alias(ctx, sk6, tag, ep, target, at_alias, source, asked, wild);
}

/* To ::1 by IPv6, from the own address to the own address. */
static __always_inline int connect_loopback_ipv6(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                                 const struct endpoint *ep, bool steered, bool wild)
{
	struct address own;

	set_mark(ctx, tag, steered);
	bind_source(ctx, true, true, ep->addr4.word[3]);
	name_loopback(ctx, tag, 0, wild);
	tag->flags |= TAG_NAMES;
	set_overlay6(&own, ep->addr4.word[3]);
	set_user_address(ctx, true, &own);
	return take(tag, PATH_LOOPBACK, REASON_CONNECT_LOOPBACK, 0);
}

/* To ::1, where the listener is on [::] with IPV6_V6ONLY. A socket on [::] without it is at the
 * IPv4 address: it crosses, to the own address, which both ends then have for ::1. */
static __always_inline int connect_loopback_v6only(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                                   const struct endpoint *ep, bool wild)
{
	struct address own;

	if (!is_mapped_underneath(ctx))
		return connect_loopback_ipv6(ctx, tag, ep, false, wild);
	if (!wild || is_alias(sk_of(ctx)->src_ip4))
		return refuse_connect(ECONNREFUSED_);
	set_overlay6(&own, ep->addr4.word[3]);
	return connect_crossing(ctx, true, tag, ep, &own, PATH_LOOPBACK, REASON_FALLBACK_CROSSED);
}

/* To ::1, or ::. The socket goes there as what it is bound to: by an alias, v4-mapped, or by
 * IPv6. */
static __always_inline int connect_loopback6(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                             const struct endpoint *ep, bool wild)
{
	__be32 source = alias6(ep->id), own = ep->addr4.word[3], target = 0;
	bool native = sk_of(ctx)->src_ip4 == LOOPBACK4_IPV6;
	__be16 port = ctx->user_port;
	struct listener at = {.loopback = true};

	if (listens(ctx, false, source, source, port, ep->id, &at))
		target = source;
	else if (listens(ctx, false, source, own, port, ep->id, &at) && at.flags & TAG_ANY6)
		target = own;
	/* The listener is at an IPv4 address: the SYN must be steered to it. */
	if (target && native)
		return connect_loopback_ipv6(ctx, tag, ep, true, wild);
	if (target)
		return connect_alias(ctx, true, tag, ep, target, source, source, 0, wild);
	if (has_overlay6() && listens(ctx, true, own, own, port, ep->id, &at) && at.flags & TAG_WILD)
		return connect_loopback_v6only(ctx, tag, ep, wild);
	if (own_stack_listens(ctx, ep, true, 0))
		return connect_own_stack(ctx, true, tag, ep, true, 0, wild);
	if (native)
		return refuse_connect(ECONNREFUSED_);
	return connect_alias(ctx, true, tag, ep, source, source, source, 0, wild);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* bind(): a program binds the addresses of its container; the kernel binds node addresses.
 *
 *   0.0.0.0, own address   -> the overlay address
 *   127.0.0.0/8            -> the endpoint's loopback alias for it
 *   ::                     -> the overlay address, v4-mapped (packets of both families are steered
 *                             there); with IPV6_V6ONLY the IPv6 overlay address or, on an IPv4
 *                             overlay, the alias of ::1
 *   ::1                    -> the alias of ::1, v4-mapped
 *   own IPv6 address       -> unchanged
 *   AF_UNSPEC and 0.0.0.0  -> unchanged, if the kernel is to choose the port (connect_crossing);
 *                             else EAFNOSUPPORT
 *   anything else          -> EADDRNOTAVAIL (the socket is transparent: the kernel would not
 *                             refuse)
 *
 * Who may bind a port below 1024 is asked of the container, not of the node. / */

#include "include/abi/reason.h"
#include "include/address.h"
#include "include/credential.h"
#include "include/endpoint.h"
#include "include/protection.h"
#include "sock/context.h"
#include "sock/own_stack.h"
#include "sock/portbind.h"
#include "sock/reserved_ports.h"

#define BIND_ANY_PORT 3 /* allowed, and without the kernel's own check of the port */

/* Gives the node address to bind for IPv4 address a, 0 if a is not the container's. Notes in tag
 * what getsockname must show. */
static __always_inline __be32 bind_target4(struct sock_tag *tag, const struct endpoint *ep, __be32 a,
                                           bool any_port)
{
	tag->flags &= ~TAGS_OF_NAMES;
	tag->local_port = 0;
	if (a == 0) {
		tag->flags |= TAG_BOUND | TAG_WILD;
		request_portbind(tag, PORTBIND_ANY4, any_port);
		return ep->addr4.word[3];
	}
	if (a == ep->addr4.word[3]) {
		tag->flags |= TAG_BOUND;
		request_portbind(tag, PORTBIND_NONE, any_port);
		return a;
	}
	if (is_loopback4(a)) {
		tag->flags |= TAG_BOUND | TAG_LOCAL;
		set_mapped(&tag->local, a);
		request_portbind(tag, PORTBIND_LOOPBACK4, any_port);
		return alias4(ep->id, a);
	}
	return protects(PROTECT_BIND) ? 0 : a;
}

/* Turns the address *a that the program asked for into the one to bind; false if it is not the
 * container's. */
static __always_inline bool bind_target(struct sock_tag *tag, const struct endpoint *ep, struct address *a,
                                        bool any_port)
{
	bool v6only = tag->flags & TAG_V6ONLY;
	__be32 own = ep->addr4.word[3];

	if (is_mapped(a)) {
		tag->flags &= ~TAG_BOUND6;
		own = v6only ? 0 : bind_target4(tag, ep, a->word[3], any_port);
		set_mapped(a, own);
		return own;
	}
	tag->flags &= ~(TAGS_OF_NAMES | TAG_BOUND6);
	tag->local_port = 0;
	if (is_unspecified6(a)) {
		tag->flags |= TAG_BOUND | TAG_WILD | TAG_ANY6;
		request_portbind(tag, v6only ? PORTBIND_ANY6 : PORTBIND_ANY, any_port);
		if (!v6only)
			set_mapped(a, own);
		else if (has_overlay6())
			set_overlay6(a, own);
		else
			set_mapped(a, alias6(ep->id));
		return true;
	}
	if (is_loopback6(a)) {
		tag->flags |= TAG_BOUND | TAG_BOUND6 | TAG_LOCAL;
		set_loopback6(&tag->local);
		request_portbind(tag, PORTBIND_LOOPBACK6, any_port);
		set_mapped(a, alias6(ep->id));
		return true;
	}
	if (is_overlay6(a) && a->word[3] == own) {
		tag->flags |= TAG_BOUND | TAG_BOUND6;
		request_portbind(tag, PORTBIND_OWN6, any_port);
		return true;
	}
	return false;
}

/* The errno for IPv6 address a on a device that does not have it; 0 for others. */
static __always_inline int not_on_device(const struct sock_tag *tag, const struct endpoint *ep,
                                         const struct address *a)
{
	if (is_mapped(a) || is_unspecified6(a))
		return 0;
	switch (way_of_device(tag, ep, is_loopback6(a))) {
	case DEVICE_UNKNOWN:
		return ENODEV_;
	case DEVICE_SILENT:
		return EADDRNOTAVAIL_;
	}
	return 0;
}

/* Whether the caller may have the port, or refuses bind(). */
static __always_inline bool may_have_port(struct bpf_sock_addr *ctx, const struct endpoint *ep)
{
	if (may_bind_port(ep, (__be16)ctx->user_port))
		return true;
	bpf_set_retval(-EACCES_);
	return false;
}

/* Turns *a, which the program asked for, into the address to bind. False: bind() is refused. */
static __always_inline bool bind_address(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                         struct address *a)
{
	struct endpoint *ep = tagged_endpoint(tag);
	struct sock_tag next = *tag;
	struct address asked = *a;

	if (!ep)
		return refuse(REASON_REFUSE_UNKNOWN_ENDPOINT, ENETDOWN_);
	/* The kernel asks for IPv6 in another order than for IPv4: the port, a second bind, the
	 * address. */
	if (sk6 && !may_have_port(ctx, ep))
		return false;
	if (!bind_target(&next, ep, a, !ctx->user_port))
		return refuse(REASON_REFUSE_BIND_FOREIGN,
		              sk6 && (sk_of(ctx)->src_port || (next.flags & TAG_V6ONLY && is_mapped(&asked)))
		                      ? EINVAL_
		                      : EADDRNOTAVAIL_);
	if (!sk6 && !may_have_port(ctx, ep))
		return false;
	/* The kernel refuses to bind a socket twice: then its names must stay. */
	if (sk_of(ctx)->src_port)
		return true;
	if (sk6 && not_on_device(tag, ep, &asked))
		return refuse(REASON_REFUSE_DEVICE, not_on_device(tag, ep, &asked));
	if (own_stack_conflicts(ctx, &next, ep, &asked)) {
		bpf_set_retval(-EADDRINUSE_);
		return false;
	}
	*tag = next;
	return true;
}

SEC("cgroup/bind4")
int bind4(struct bpf_sock_addr *ctx)
{
	struct sock_tag *tag;
	struct address a;

	if (ctx->protocol != IPPROTO_TCP_ || !sk_of(ctx))
		return 1;
	/* The kernel refuses other families, and AF_UNSPEC with any other address. */
	if (ctx->user_family != AF_INET && (ctx->user_family != AF_UNSPEC || ctx->user_ip4))
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, sk_of(ctx), 0, 0);
	if (!tag)
		return 1;
	get_user_address(ctx, false, &a);
	if (!bind_address(ctx, false, tag, &a))
		return 0;
	/* AF_UNSPEC must stay 0.0.0.0, the node's wildcard, of which a container gets ports of the
	 * kernel's choice only: one that it named it would keep from all others. */
	if (ctx->user_family == AF_INET || (ctx->user_port && protects(PROTECT_BIND)))
		set_user_address(ctx, false, &a);
	return BIND_ANY_PORT;
}

SEC("cgroup/bind6")
int bind6(struct bpf_sock_addr *ctx)
{
	struct sock_tag *tag;
	struct address a;

	if (ctx->protocol != IPPROTO_TCP_ || !sk_of(ctx) || ctx->user_family != AF_INET6)
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, sk_of(ctx), 0, 0);
	if (!tag)
		return 1;
	get_user_address(ctx, true, &a);
	if (!bind_address(ctx, true, tag, &a))
		return 0;
	set_user_address(ctx, true, &a);
	return BIND_ANY_PORT;
}

/* bind() would succeed. */
static __always_inline int bound(struct bpf_sock *sk)
{
	struct sock_tag *tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);

	if (!tag)
		return 1;
	if (!bind_within_quota(sk, tag))
		return 0;
	if (portbind(tag, sk->src_port))
		return 1;
	port_unbound(sk, tag);
	return 0;
}

SEC("cgroup/post_bind4")
int post_bind4(struct bpf_sock *sk)
{
	return bound(sk);
}

SEC("cgroup/post_bind6")
int post_bind6(struct bpf_sock *sk)
{
	return bound(sk);
}

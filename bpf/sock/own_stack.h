/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What bind and connect ask of the container's own stack, where its processes are that are not
 * intercepted. */
#ifndef HEDDLE_SOCK_OWN_STACK_H
#define HEDDLE_SOCK_OWN_STACK_H

#include "include/abi/endpoint.h"
#include "include/abi/portbind.h"
#include "include/abi/tag.h"
#include "include/address.h"
#include "include/lookup.h"
#include "include/mirror.h"
#include "sock/context.h"
#include "sock/node_ports.h"

/* Looks a packet up in the container's own stack: its state there, 0 for none. src and dst are
 * given as in struct flow. */
static __always_inline __u32 own_stack_state(struct bpf_sock_addr *ctx, const struct endpoint *ep, bool ipv6,
                                             __be32 src, __be16 sport, __be32 dst, __be16 port)
{
	struct bpf_sock_tuple t = {};
	struct address from, to;
	struct bpf_sock *sk;
	__u32 state, size;

	if (ep->nsid < 0)
		return 0;
	if (ipv6) {
		set_name(&from, true, src);
		set_name(&to, true, dst);
	} else {
		set_mapped(&from, src);
		set_mapped(&to, dst);
	}
	size = set_lookup(&t, ipv6, &from, sport, &to, port);
	sk = bpf_skc_lookup_tcp(ctx, &t, size, (__u32)ep->nsid, 0);
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

/* Whether a process that is not intercepted listens at a:port, or, if any, at port of one of the
 * container's addresses of the family. */
static __always_inline bool own_stack_listens_at(struct bpf_sock_addr *ctx, const struct endpoint *ep,
                                                 bool ipv6, __be32 a, bool any, __be16 port)
{
	__be32 own = ep->addr4.word[3];

	if (any)
		a = ipv6 ? 0 : LOOPBACK4;
	if (own_stack_state(ctx, ep, ipv6, a, 0, a, port) == BPF_TCP_LISTEN)
		return true;
	return any && (!ipv6 || has_overlay6()) &&
	       own_stack_state(ctx, ep, ipv6, own, 0, own, port) == BPF_TCP_LISTEN;
}

/* Whether bind() to asked conflicts with such a listener. */
static __always_inline bool own_stack_conflicts(struct bpf_sock_addr *ctx, const struct sock_tag *tag,
                                                const struct endpoint *ep, const struct address *asked)
{
	__be16 port = ctx->user_port;
	__be32 v4 = asked->word[3];
	bool any;

	/* With SO_REUSEPORT it may share, but two stacks cannot. */
	if (!port || tag->claim_flags & PORTBIND_REUSEPORT)
		return false;
	any = is_unspecified6(asked);
	if (is_mapped(asked))
		return own_stack_listens_at(ctx, ep, false, v4, !v4, port);
	if (own_stack_listens_at(ctx, ep, true, is_loopback6(asked) ? 0 : v4, any, port))
		return true;
	return any && !(tag->flags & TAG_V6ONLY) && own_stack_listens_at(ctx, ep, false, 0, true, port);
}

/* Source ports for connects into the container's own stack: of the usual range, but odd. The
 * container's own connects take even ones while there are any, and the two must not meet. */
#define OWN_STACK_PORT_FIRST 32769
#define OWN_STACK_PORTS      14116
#define OWN_STACK_PORT_TRIES 8

/* Binds to node address source with a port that is free there and, for a connect from src to dst,
 * in the container's own stack. False if none is found. */
static __always_inline bool bind_own_stack_source(struct bpf_sock_addr *ctx, bool sk6,
                                                  const struct endpoint *ep, __be32 source, bool ipv6,
                                                  __be32 src, __be32 dst)
{
	struct address at;
	__be16 sport;
	__u32 state;
	int i;

	set_mapped(&at, source);
	for (i = 0; i < OWN_STACK_PORT_TRIES; i++) {
		sport = bpf_htons(OWN_STACK_PORT_FIRST + 2 * (bpf_get_prandom_u32() % OWN_STACK_PORTS));
		if (is_node_port(sport))
			continue;
		state = own_stack_state(ctx, ep, ipv6, src, sport, dst, ctx->user_port);
		if (state && state != BPF_TCP_LISTEN)
			continue;
		if (!bind_to(ctx, sk6, &at, sport))
			return true;
	}
	return false;
}

#endif

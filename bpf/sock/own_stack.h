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

/* A packet in the container's own stack; src and dst are given as in struct flow. */
struct own_stack_packet {
	int nsid; /* of the container's network namespace; -1: none */
	__u32 ipv6;
	__be32 src;
	__be32 dst;
	__be16 sport;
	__be16 port;
};

static __always_inline void set_own_stack_packet(struct own_stack_packet *p, const struct endpoint *ep,
                                                 bool ipv6, __be32 src, __be32 dst, __be16 port)
{
	p->nsid = ep->nsid;
	p->ipv6 = ipv6;
	p->src = src;
	p->dst = dst;
	p->sport = 0;
	p->port = port;
}

/* The state of the socket that the packet is for, 0 for none. Not static, so that the verifier
 * looks at it once. */
__noinline __u32 own_stack_state(struct bpf_sock_addr *ctx, const struct own_stack_packet *p)
{
	struct bpf_sock_tuple t = {};
	struct address from, to;
	struct bpf_sock *sk;
	__u32 state, size;

	if (!p || p->nsid < 0)
		return 0;
	if (p->ipv6) {
		set_name(&from, true, p->src);
		set_name(&to, true, p->dst);
	} else {
		set_mapped(&from, p->src);
		set_mapped(&to, p->dst);
	}
	size = set_lookup(&t, p->ipv6, &from, p->sport, &to, p->port);
	sk = bpf_skc_lookup_tcp(ctx, &t, size, (__u32)p->nsid, 0);
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

/* Whether a process that is not intercepted listens at a:port. */
static __always_inline bool own_stack_has_listener(struct bpf_sock_addr *ctx, const struct endpoint *ep,
                                                   bool ipv6, __be32 a, __be16 port)
{
	struct own_stack_packet p;

	set_own_stack_packet(&p, ep, ipv6, a, a, port);
	return own_stack_state(ctx, &p) == BPF_TCP_LISTEN;
}

/* Whether a process that is not intercepted listens at a:port, or, if any, at port of one of the
 * container's addresses of the family. */
static __always_inline bool own_stack_listens_at(struct bpf_sock_addr *ctx, const struct endpoint *ep,
                                                 bool ipv6, __be32 a, bool any, __be16 port)
{
	__be32 own = ep->addr4.word[3];

	if (any)
		a = ipv6 ? 0 : LOOPBACK4;
	if (own_stack_has_listener(ctx, ep, ipv6, a, port))
		return true;
	return any && (!ipv6 || has_overlay6()) && own_stack_has_listener(ctx, ep, ipv6, own, port);
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

/* A search for such a port. */
struct own_stack_search {
	struct bpf_sock_addr *ctx;
	struct own_stack_packet packet;
	struct address source;
	__u32 sk6;
	__u32 bound;
};

static int try_own_stack_port(__u32 i, struct own_stack_search *s)
{
	__u32 state;

	s->packet.sport = bpf_htons(OWN_STACK_PORT_FIRST + 2 * (bpf_get_prandom_u32() % OWN_STACK_PORTS));
	if (is_node_port(s->packet.sport))
		return 0;
	state = own_stack_state(s->ctx, &s->packet);
	if (state && state != BPF_TCP_LISTEN)
		return 0;
	s->bound = !bind_to(s->ctx, s->sk6, &s->source, s->packet.sport);
	return s->bound;
}

/* Binds to node address source with a port that is free there and, for a connect of p's, in the
 * container's own stack. False if none is found. Not static, and by bpf_loop: unrolled where it is
 * called it was two thirds of what the verifier went through for connect6. */
__noinline bool bind_own_stack_source(struct bpf_sock_addr *ctx, const struct own_stack_packet *p,
                                      __be32 source, bool sk6)
{
	struct own_stack_search s = {.ctx = ctx, .sk6 = sk6};

	if (!p)
		return false;
	s.packet = *p;
	set_mapped(&s.source, source);
	bpf_loop(OWN_STACK_PORT_TRIES, try_own_stack_port, &s, 0);
	return s.bound;
}

#endif

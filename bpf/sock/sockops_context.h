/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The socket of a sockops program: its tag and addresses. */
#ifndef HEDDLE_SOCK_SOCKOPS_CONTEXT_H
#define HEDDLE_SOCK_SOCKOPS_CONTEXT_H

#include "include/abi/flow.h"
#include "include/address.h"
#include "include/config.h"
#include "include/tag.h"
#include "sock/context.h"

static __always_inline struct sock_tag *tag_of(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;

	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
}

/* Whether the socket's addresses are IPv6 ones, not v4-mapped. */
static __always_inline bool on_ipv6(struct bpf_sock_ops *ops)
{
	return ops->family == AF_INET6 && ops->local_ip4 == LOOPBACK4_IPV6;
}

/* The socket's addresses: IPv4, or what overlay addresses embed, or 0. */
static __always_inline __be32 overlay_of(const struct address *a)
{
	return is_overlay6(a) ? a->word[3] : 0;
}

static __always_inline __be32 remote_address(struct bpf_sock_ops *ops)
{
	struct address a;

	if (!on_ipv6(ops))
		return ops->remote_ip4;
	a.word[0] = ops->remote_ip6[0];
	a.word[1] = ops->remote_ip6[1];
	a.word[2] = ops->remote_ip6[2];
	a.word[3] = ops->remote_ip6[3];
	return overlay_of(&a);
}

static __always_inline __be32 local_address(struct bpf_sock_ops *ops)
{
	struct address a;

	if (!on_ipv6(ops))
		return ops->local_ip4;
	a.word[0] = ops->local_ip6[0];
	a.word[1] = ops->local_ip6[1];
	a.word[2] = ops->local_ip6[2];
	a.word[3] = ops->local_ip6[3];
	return overlay_of(&a);
}

/* The connection as packets from the other end show it. */
static __always_inline struct flow_key remote_first(struct bpf_sock_ops *ops)
{
	struct flow_key k = {};

	k.saddr = remote_address(ops);
	k.daddr = local_address(ops);
	k.sport = (__be16)(ops->remote_port >> 16); /* the upper half of a big-endian word */
	k.dport = bpf_htons((__u16)ops->local_port);
	k.ipv6 = on_ipv6(ops);
	return k;
}

/* Both ends are node sockets: lo is the way from now on. */
static __always_inline void move_to_lo(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	__u32 mark = config_mark;

	if (!bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		tag->flags &= ~TAGS_OF_MARK;
}

static __always_inline void remote_of(struct bpf_sock_ops *ops, struct address *remote)
{
	if (on_ipv6(ops)) {
		remote->word[0] = ops->remote_ip6[0];
		remote->word[1] = ops->remote_ip6[1];
		remote->word[2] = ops->remote_ip6[2];
		remote->word[3] = ops->remote_ip6[3];
	} else {
		set_mapped(remote, ops->remote_ip4);
	}
}

#endif

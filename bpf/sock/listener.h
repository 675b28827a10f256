/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Who listens where a connect() goes: asked of the kernel's own lookup, before the path is
 * chosen. */
#ifndef HEDDLE_SOCK_LISTENER_H
#define HEDDLE_SOCK_LISTENER_H

#include "include/endpoint.h"
#include "include/lookup.h"

/* What listens() found. */
struct listener {
	bool loopback; /* asked for: what comes by the container's loopback */
	__u32 flags;   /* of its tag */
};

/* Whether sk, which it releases, is a listener of endpoint owner. */
static __always_inline bool is_listener_of(struct bpf_sock *sk, __u32 owner, struct listener *found)
{
	struct sock_tag *tag;
	bool ours = false;

	if (sk->state == BPF_TCP_LISTEN) {
		tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
		if (is_of(tag, owner) && takes_from(tag, found->loopback)) {
			ours = true;
			found->flags = tag->flags;
		}
	}
	bpf_sk_release(sk);
	return ours;
}

/* Finds the listener of endpoint owner at addr:port, or at the IPv6 form of addr, by the kernel's
 * own lookup from such a src. A node process that listens on the wildcard matches too and is not
 * ours: the tag decides. */
static __always_inline bool listens(struct bpf_sock_addr *ctx, bool ipv6, __be32 src, __be32 addr,
                                    __be16 port, __u32 owner, struct listener *found)
{
	struct bpf_sock_tuple t = {};
	struct address from, to;
	struct bpf_sock *sk;
	__u32 size;

	set_overlay(&from, ipv6, src);
	set_overlay(&to, ipv6, addr);
	size = set_lookup(&t, ipv6, &from, 0, &to, port);
	sk = bpf_sk_lookup_tcp(ctx, &t, size, BPF_F_CURRENT_NETNS, 0);
	return sk && is_listener_of(sk, owner, found);
}

#endif

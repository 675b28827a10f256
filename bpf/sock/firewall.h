/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Rules that an operator has for packets between containers, in the forward chain of a node, do not
 * see connections that go past the overlay. Where a node wants them to (heddled
 * --overlay-firewall), the first connection from an address to an address and port goes as the
 * container's own stack would send it, through the forward chain of either node; once it stands,
 * others may go past it for a time. The Slim paper, section 4, keeps an overlay's firewall by a
 * connection over the overlay beside each one of the host. */
#ifndef HEDDLE_SOCK_FIREWALL_H
#define HEDDLE_SOCK_FIREWALL_H

#include "include/abi/endpoint.h"
#include "include/abi/firewall.h"
#include "include/abi/path.h"
#include "include/abi/reason.h"
#include "include/address.h"
#include "include/config.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/route.h"
#include "sock/context.h"
#include "sock/sockops_context.h"

/* How long what passed counts on a node that only its peer's firewall concerns. */
#define FIREWALL_PEERS_NS 10000000000ULL

/* Whether a firewall is to see connections of endpoint ep to what route to leads to. */
static __always_inline bool meets_firewall(const struct endpoint *ep, const struct route *to)
{
	/* What carries others is another network, with rules of its own. */
	if (ep->flags & ENDPOINT_ADOPTED)
		return false;
	return config_firewall_ns || to->flags & ROUTE_FIREWALL;
}

/* Whether such a connection to port (network byte order) of dst has passed lately. */
static __noinline bool passed_firewall(const struct endpoint *ep, const struct address *dst, __be16 port)
{
	struct firewall_key k = {};
	__u64 *passed;

	if (!ep || !dst)
		return false;
	k.src = ep->addr4.word[3];
	k.port = port;
	k.dst = *dst;
	passed = bpf_map_lookup_elem(&passed_firewall_at, &k);
	return passed && bpf_ktime_get_ns() - *passed < (config_firewall_ns ?: FIREWALL_PEERS_NS);
}

/* A connection that was sent through the firewall is established. */
static __always_inline void passes_firewall(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	__u64 now = bpf_ktime_get_ns();
	struct firewall_key k = {};

	/* What became of a probe says who let it pass (tc/firewall.h). */
	if (tag->reason != REASON_FALLBACK_FIREWALL || tag->flags & TAG_PROBE)
		return;
	k.src = tag->local.word[3];
	k.port = tag->remote_port;
	k.dst = tag->remote;
	bpf_map_update_elem(&passed_firewall_at, &k, &now, BPF_ANY);
}

#endif

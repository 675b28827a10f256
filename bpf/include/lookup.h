/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The kernel's lookup of sockets, for both families. */
#ifndef HEDDLE_LOOKUP_H
#define HEDDLE_LOOKUP_H

#include "include/abi/address.h"
#include "include/kernel.h"

/* Fills in t for a lookup of what receives packets from src:sport to dst:dport, of IPv6 if ipv6,
 * else of the IPv4 addresses that src and dst end with. Gives the size for the helper. */
static __always_inline __u32 set_lookup(struct bpf_sock_tuple *t, bool ipv6, const struct address *src,
                                        __be16 sport, const struct address *dst, __be16 dport)
{
	int i;

	if (!ipv6) {
		t->ipv4.saddr = src->word[3];
		t->ipv4.sport = sport;
		t->ipv4.daddr = dst->word[3];
		t->ipv4.dport = dport;
		return sizeof(t->ipv4);
	}
	for (i = 0; i < 4; i++) {
		t->ipv6.saddr[i] = src->word[i];
		t->ipv6.daddr[i] = dst->word[i];
	}
	t->ipv6.sport = sport;
	t->ipv6.dport = dport;
	return sizeof(t->ipv6);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where an address is. */
#ifndef HEDDLE_ROUTE_H
#define HEDDLE_ROUTE_H

#include "include/abi/route.h"
#include "include/address.h"
#include "include/config.h"
#include "include/maps.h"

static __always_inline struct route *route_to(__be32 dst)
{
	struct route_key key;

	key.prefixlen = 128;
	set_mapped(&key.addr, dst);
	return bpf_map_lookup_elem(&route_by_prefix, &key);
}

/* Whether IPv6 address dst, no overlay address, is the node's own. */
static __always_inline bool is_node_address6(const struct address *dst)
{
	struct route_key key;
	struct route *to;

	key.prefixlen = 128;
	key.addr = *dst;
	to = bpf_map_lookup_elem(&route_by_prefix, &key);
	return to && to->flags & ROUTE_NODE_ADDR;
}

static __always_inline bool in_direct_ports(__be16 port)
{
	__u16 p = bpf_ntohs(port);

	return p >= config_port_first && p <= config_port_last;
}

#endif

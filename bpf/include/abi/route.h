/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where overlay prefixes and nodes are. */
#ifndef HEDDLE_ABI_ROUTE_H
#define HEDDLE_ABI_ROUTE_H

#include <linux/types.h>
#include "include/abi/address.h"

/* route.flags */
enum route_flags {
	ROUTE_SELF = 1 << 0,      /* the prefix of this node's own endpoints */
	ROUTE_NODE_ADDR = 1 << 1, /* an address of this node itself */
	ROUTE_DIRECT = 1 << 2,    /* the node takes direct connections */
	/* one endpoint that is not intercepted, or addresses of an adopted network */
	ROUTE_PLAIN = 1 << 3,
	/* Why the overlay carries what could be direct: what probes of the path say. */
	ROUTE_UNPROVEN = 1 << 4, /* none has been answered yet */
	ROUTE_STRIPPED = 1 << 5, /* SYNs arrive without the option */
	ROUTE_BLOCKED = 1 << 6,  /* SYNs or their answers do not arrive */
	ROUTE_NOT_PROVEN = ROUTE_UNPROVEN | ROUTE_STRIPPED | ROUTE_BLOCKED,
	/* another network carries what is not direct: it comes by any device */
	ROUTE_ADOPTED = 1 << 7,
	/* the node wants its firewall to see connections of containers (sock/firewall.h) */
	ROUTE_FIREWALL = 1 << 8,
};

struct route_key {
	__u32 prefixlen; /* bits of addr that count: 96 + n for an IPv4 prefix of n bits */
	struct address addr;
};

/* Where an overlay prefix lives. */
struct route {
	struct address underlay; /* of its node */
	__u32 flags;             /* enum route_flags */
	__u16 port_first;        /* the node's direct ports, host byte order */
	__u16 port_last;
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Endpoints of this node. */
#ifndef HEDDLE_ABI_ENDPOINT_H
#define HEDDLE_ABI_ENDPOINT_H

#include <linux/types.h>
#include "include/abi/address.h"

/* endpoint.flags */
enum endpoint_flags {
	ENDPOINT_INTERCEPTED = 1 << 0,
	ENDPOINT_ADOPTED = 1 << 1, /* device and address are another network's */
	ENDPOINT_STACK = 1 << 2,   /* a module may run its TCP: stack_device */
};

/* One endpoint of this node. */
struct endpoint {
	struct address addr4; /* its IPv4 overlay address, v4-mapped */
	__u32 id;
	__u32 flags;             /* enum endpoint_flags */
	__u32 ifindex;           /* node side of its veth */
	__u32 netns;             /* inode of the container's network namespace */
	__u32 container_ifindex; /* container side of its veth */
	char device[16];         /* its name there */
	__s32 nsid;              /* of that namespace as the node names it; -1: none */
	__s32 node_nsid;         /* of the node's as the container's names it; -1: none */
	__u32 incarnation;       /* tells it from others that have had its id */
	/* of Docker's DNS over TCP at 127.0.0.11 in that namespace; 0: none */
	__be16 resolver_port;
	__u16 unused;
};

#endif

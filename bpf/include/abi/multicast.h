/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Multicast groups that programs join by TCP sockets. */
#ifndef HEDDLE_ABI_MULTICAST_H
#define HEDDLE_ABI_MULTICAST_H

#include <linux/types.h>
#include "include/abi/address.h"

#define GROUPS_MAX 20 /* as the kernel's igmp_max_memberships */

/* A multicast group that a program joined by a TCP socket. */
struct joined_group {
	struct address addr;
	__u32 ifindex; /* of the container's device; 0: none */
};

struct joined_groups {
	struct joined_group group[GROUPS_MAX];
};

#endif

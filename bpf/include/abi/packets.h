/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where packets between containers go past the node's stack. */
#ifndef HEDDLE_ABI_PACKETS_H
#define HEDDLE_ABI_PACKETS_H

#include <linux/types.h>

/* The hardware address of a node's overlay device. */
struct vtep {
	__u8 mac[6];
	__u16 pad;
};

/* Two overlay addresses, the lower one first. */
struct address_pair {
	__be32 low;
	__be32 high;
};

#endif

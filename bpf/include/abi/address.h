/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Addresses as every map and tag has them: four words in network byte order. IPv4 ones are
 * v4-mapped (::ffff:a.b.c.d), so that there is room for both families. */
#ifndef HEDDLE_ABI_ADDRESS_H
#define HEDDLE_ABI_ADDRESS_H

#include <linux/types.h>

/* An address of either family, network byte order. */
struct address {
	__be32 word[4];
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections that an operator's firewall has let pass. */
#ifndef HEDDLE_ABI_FIREWALL_H
#define HEDDLE_ABI_FIREWALL_H

#include <linux/types.h>
#include "include/abi/address.h"

/* From which container to what. */
struct firewall_key {
	struct address dst;
	__be32 src;  /* IPv4 overlay address */
	__be16 port; /* of dst */
	__u16 unused;
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Nodes of an IPv6 underlay. */
#ifndef HEDDLE_ABI_UNDERLAY_H
#define HEDDLE_ABI_UNDERLAY_H

#include <linux/types.h>
#include "include/abi/address.h"

/* A node by which addresses it is known: within nodes by an IPv4 one, between them by an IPv6
 * one. */
struct mapped_node {
	struct address outer;
	__be32 inner;
	__u16 port_first; /* its direct ports, host byte order */
	__u16 port_last;
};

#endif

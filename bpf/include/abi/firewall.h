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

/* A probe of the agent's that goes where a new connection would, through the firewalls. */
struct firewall_probe {
	__be32 expected; /* what an answer acknowledges; 0: the probe has not left its container yet */
	__u32 passed;    /* 1: it was answered, so the firewalls let such a connection pass */
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Caps of endpoints. */
#ifndef HEDDLE_ABI_LIMIT_H
#define HEDDLE_ABI_LIMIT_H

#include <linux/types.h>

/* A block of classes of one endpoint and direction: of what is no connection, of one connection
 * each, and, last, of all of these together. */
#define LIMIT_SLOTS 256

/* A cap in one direction. Classes are minor numbers in the shaping device's HTB qdisc. */
struct limit_side {
	__u64 rate;        /* the tighter of its caps, bytes a second; 0: none */
	__u32 class;       /* of what is no connection, or of everything; 0: no cap */
	__u32 connections; /* first of LIMIT_SLOTS classes; 0: no cap a connection */
};

/* limit.flags */
enum limit_flags {
	LIMIT_DSCP = 1 << 0,     /* dscp is written into what the endpoint sends */
	LIMIT_PRIORITY = 1 << 1, /* so is priority into skb->priority */
};

/* What the operator allows one endpoint. */
struct limit {
	struct limit_side egress; /* what it sends */
	struct limit_side ingress;
	__u32 priority; /* of the kernel's TC_PRIO_* */
	__u32 flags;    /* enum limit_flags */
	__u32 dscp;     /* 0..63 */
	__u32 pad;
};

/* Which connection has which class. */
struct limit_slots {
	__u64 owner[LIMIT_SLOTS];   /* addresses and ports, mixed; 0: nobody */
	__u64 seen_ns[LIMIT_SLOTS]; /* its last packet, on the monotonic clock */
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Bind reservations: which ports of a container its bound sockets have. */
#ifndef HEDDLE_ABI_PORTBIND_H
#define HEDDLE_ABI_PORTBIND_H

#include <linux/types.h>

/* Which addresses of its container a bound socket holds a port of. Those at the same node address need no
 * claim against each other: the kernel knows. */
enum claim_kind {
	CLAIM_NONE,      /* not bound, or an address that overlaps with no other node address */
	CLAIM_ANY4,      /* 0.0.0.0 */
	CLAIM_ANY,       /* ::, IPv4 included */
	CLAIM_ANY6,      /* :: with IPV6_V6ONLY */
	CLAIM_LOOPBACK4, /* in 127.0.0.0/8 */
	CLAIM_LOOPBACK6, /* ::1 */
	CLAIM_OWN6,      /* the IPv6 overlay address */
	CLAIM_KINDS = 8,
};

enum claim_flags {
	CLAIM_REUSEADDR = 1 << 0, /* SO_REUSEADDR is set */
	CLAIM_REUSEPORT = 1 << 1, /* SO_REUSEPORT is set */
	CLAIM_LISTENS = 1 << 2,   /* shares with no other address, whatever SO_REUSEADDR says */
	CLAIM_PORT_ZERO = 1 << 3, /* the kernel chose the port */
};

/* A port of a container. */
struct port_key {
	__u32 endpoint_id;
	__u16 port; /* host byte order */
	__u16 pad;
};

/* The sockets of one container bound to one port, by what they hold. */
struct port_claims {
	struct {
		__u32 sockets;
		__u32 exclusive; /* those that SO_REUSEADDR does not open to others */
		__u32 alone;     /* those without SO_REUSEPORT */
	} by_kind[CLAIM_KINDS];
	__u32 uid; /* of the last one */
};

#endif

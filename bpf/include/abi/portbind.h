/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Bind reservations: which ports of a container its bound sockets have. */
#ifndef HEDDLE_ABI_PORTBIND_H
#define HEDDLE_ABI_PORTBIND_H

#include <linux/types.h>

/* Which addresses of its container a bound socket has a port of. Those at the same node address
 * need no reservation against each other: the kernel knows. */
enum portbind_kind {
	PORTBIND_NONE,      /* not bound, or an address that overlaps with no other node address */
	PORTBIND_ANY4,      /* 0.0.0.0 */
	PORTBIND_ANY,       /* ::, IPv4 included */
	PORTBIND_ANY6,      /* :: with IPV6_V6ONLY */
	PORTBIND_LOOPBACK4, /* in 127.0.0.0/8 */
	PORTBIND_LOOPBACK6, /* ::1 */
	PORTBIND_OWN6,      /* the IPv6 overlay address */
	PORTBIND_KINDS = 8,
};

enum portbind_flags {
	PORTBIND_REUSEADDR = 1 << 0, /* SO_REUSEADDR is set */
	PORTBIND_REUSEPORT = 1 << 1, /* SO_REUSEPORT is set */
	PORTBIND_LISTENS = 1 << 2,   /* shares with no other address, whatever SO_REUSEADDR says */
	PORTBIND_PORT_ZERO = 1 << 3, /* the kernel chose the port */
};

/* A port of a container. */
struct port_key {
	__u32 endpoint_id;
	__u16 port; /* host byte order */
	__u16 pad;
};

/* The sockets of one container bound to one port, by what they have. */
struct portbinds {
	struct {
		__u32 sockets;
		__u32 exclusive; /* those that SO_REUSEADDR does not open to others */
		__u32 alone;     /* those without SO_REUSEPORT */
	} by_kind[PORTBIND_KINDS];
	__u32 uid; /* of the last one */
};

#endif

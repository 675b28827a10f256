/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ports of the node that endpoints keep from everybody's connect(). */
#ifndef HEDDLE_ABI_RESERVED_PORTS_H
#define HEDDLE_ABI_RESERVED_PORTS_H

#include <linux/bpf.h>
#include <linux/types.h>

/* The port of the node that a socket keeps from everybody's connect(). Lives in socket-local
 * storage; accepted sockets start with a copy of their listener's. */
struct reserved_port {
	__u64 group; /* key in group_by_listener; 0: it holds the port by itself */
	__u32 port;  /* host byte order; 0: it holds none */
	__u32 flags; /* enum reserved_flags */
};

/* reserved_port.flags */
enum reserved_flags {
	/* no connection holds it: never connected, or in state CLOSE again */
	RESERVED_CLOSED = 1 << 0,
	RESERVED_RELEASED = 1 << 1,     /* no program holds it */
	RESERVED_ACCEPTED = 1 << 2,     /* of an accepted connection: gone with it */
	RESERVED_WAITS = 1 << 3,        /* a connection of it may be in TIME_WAIT */
	RESERVED_SIMULTANEOUS = 1 << 4, /* both ends connected at once */
	RESERVED_OVER_QUOTA = 1 << 5,   /* of a listener above the limit, which the agent ends */
};

/* A listener's port, which its accepted connections keep when it is gone. */
struct port_group {
	__u32 sockets; /* it and they */
	__u32 waits;   /* not 0: one of them may be in TIME_WAIT */
};

#define PORT_SLOT_SECONDS 5
#define PORT_SLOTS        16 /* more than the 60 seconds of TIME_WAIT */

/* The node's ports that an endpoint holds. */
struct port_account {
	struct bpf_spin_lock lock;
	__u32 held;
	struct {
		__u32 when; /* in units of PORT_SLOT_SECONDS since boot */
		__u32 ports;
		/* given up while a connection may be in TIME_WAIT, which holds them, too */
	} waiting[PORT_SLOTS];
};

#define NODE_PORTS_MAX 8192 /* an eighth of all ports */

/* A port that the node keeps for its own connects, and sockets of containers hold all the same. */
struct node_port {
	struct bpf_spin_lock lock;
	__u32 sockets; /* listeners with what they accepted are one */
	__u32 waits;   /* not 0: since one of them had it, a connection may be in TIME_WAIT */
};

#endif

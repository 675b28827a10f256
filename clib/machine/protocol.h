/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What libheddle-machine.so, in programs of a virtual machine, says to `heddle-machine guest`:
 * one request on a connection of its own, a SEQPACKET socket of AF_UNIX. All of a request's but
 * SOCKET's come with the program's socket (SCM_RIGHTS); the answer to SOCKET brings it.
 * rust/heddle-machine/src/guest/asked.rs has the same layouts. */
#ifndef HEDDLE_MACHINE_PROTOCOL_H
#define HEDDLE_MACHINE_PROTOCOL_H

#include <stdint.h>

#define MACHINE_SOCKET_PATH "/run/heddle-machine.sock"

enum machine_type {
	MACHINE_SOCKET = 1, /* family */
	MACHINE_BIND = 2,   /* address, port */
	MACHINE_LISTEN = 3, /* value: the backlog */
	MACHINE_CONNECT =
	        4, /* address, port; value: bytes that lie in the socket and are not the program's */
	MACHINE_NAMES = 5,
	MACHINE_SET = 6, /* option, of enum queues_option; value */
	MACHINE_GET = 7, /* option; MACHINE_ERROR */
};

/* The connect is not waited for. */
#define MACHINE_NO_WAIT 1u
/* SO_ERROR. */
#define MACHINE_ERROR   0u

struct machine_request {
	uint32_t type;
	uint32_t flags;
	uint32_t family; /* 4 or 6 */
	uint32_t value;
	uint8_t address[16]; /* IPv6, or IPv4 as ::ffff:a.b.c.d */
	uint16_t port;       /* in the machine's own byte order */
	uint16_t option;
	uint32_t reserved;
};

enum machine_state {
	MACHINE_FRESH = 0,
	MACHINE_BOUND = 1,
	MACHINE_LISTENS = 2,
	MACHINE_CONNECTS = 3,
	MACHINE_CONNECTED = 4,
};

struct machine_answer {
	int32_t error; /* 0 or an errno; ENOTSOCK: the descriptor is none of the guest's */
	uint32_t state;
	uint32_t family;
	uint32_t value; /* of GET */
	uint8_t local[16];
	uint8_t remote[16];
	uint16_t local_port;
	uint16_t remote_port;
	uint32_t reserved;
};

/* What lies in a listener's socket for each connection, with the connection's own socket. */
struct machine_accepted {
	uint8_t remote[16];
	uint16_t remote_port;
	uint8_t reserved[6];
};

_Static_assert(sizeof(struct machine_request) == 40 && sizeof(struct machine_answer) == 56 &&
                       sizeof(struct machine_accepted) == 24,
               "no padding");

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Layout of the memory by which the bytes of one TCP connection go between two containers of a
 * node: docs/protocols/memory-lanes.md. A lane is one direction: what its writer and its reader
 * write lies in lines of its own. */
#ifndef HEDDLE_LANES_H
#define HEDDLE_LANES_H

#include <stdatomic.h>
#include <stdint.h>

#define LANES_MAGIC    0x53454e414c4c4448UL /* "HDLLANES" in memory */
#define LANES_VERSION  1
#define LANES_CAPACITY (1u << 20) /* bytes of a ring */
#define LANES_HEAD     4096
#define LANES_SIZE     (LANES_HEAD + 2 * (uint64_t)LANES_CAPACITY)

/* What the program's socket() asks the agent with, as its fourth and sixth argument; the fifth is
 * the descriptor, and the role above bit 32. */
#define LANES_ASK 0x9c4be1f27d5830a6UL

/* Set in lane.produced by the reader: nothing more is to be put into the ring. */
#define LANE_CLOSED (1UL << 63)

struct lane_end {
	_Atomic uint64_t stream; /* bytes of the TCP stream, its doorbells among them, up to here */
	_Atomic uint64_t ring;   /* bytes of the ring */
};

struct lane {
	/* The writer's. */
	_Atomic uint64_t produced; /* bytes put into the ring so far; LANE_CLOSED is the reader's */
	_Atomic uint64_t epoch;    /* even: bytes go by TCP, odd: by the ring */
	_Atomic uint64_t stream;   /* bytes of the TCP stream that are accounted for, see below */
	struct lane_end ended[4];  /* where an epoch has ended, by its number modulo 4 */
	uint8_t reserved[128 - 88];
	/* The reader's. */
	_Atomic uint64_t consumed; /* bytes taken out of the ring so far */
	_Atomic uint64_t followed; /* the epoch in which it reads */
	_Atomic uint32_t attached; /* 1: it reads the ring, too */
	_Atomic uint32_t waiting;  /* 1: the writer waits for room (a futex) */
	_Atomic uint32_t armed;    /* 1: the reader sleeps, the next bytes want a doorbell */
	uint32_t reserved2;
	_Atomic uint64_t taken; /* 1 more than bytes of the stream taken; 0: a library of before */
	uint8_t reserved3[128 - 40];
};

struct lanes {
	uint64_t magic;
	uint32_t version, capacity;
	uint8_t reserved[112];
	_Atomic uint32_t stop; /* by the agent: 1: bytes are to go by TCP */
	_Atomic uint32_t beat; /* by the agent, each second another number */
	uint8_t reserved2[120];
	struct lane lane[2]; /* of the one that connected, of the one that accepted */
};

_Static_assert(sizeof(struct lane) == 256 && sizeof(struct lanes) == 768, "layout of version 1");

#endif

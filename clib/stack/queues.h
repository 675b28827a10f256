/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Layout of the memory by which programs of one tenant and the queue service of a node exchange
 * nqes and bytes, and of what the service and whoever starts it say to each other:
 * docs/protocols/stack-queues.md, which says what each field means.
 *
 * This file is the only source of these layouts: bindgen makes rust/heddle-stack/src/queues/abi.rs
 * of it, and cgo -godefs internal/plane/queues/protocol/abi.go (make generate). Numbers are in the
 * machine's own byte order, addresses and ports as the fields say. Structs have no padding. */
#ifndef HEDDLE_STACK_QUEUES_H
#define HEDDLE_STACK_QUEUES_H

#include <stdint.h>

/* Whoever uses the memory in C includes this with its words as atomics. */
#ifdef QUEUES_LAYOUT_ONLY
#define QUEUES_ATOMIC
#else
#include <stdatomic.h>
#define QUEUES_ATOMIC _Atomic
#endif

#define QUEUES_MAGIC   0x45554555514c4448 /* "HDLQUEUE" in memory */
#define QUEUES_VERSION 1
/* In a service's HELLO, beside the version: it reads `owner` of REGION. */
#define QUEUES_OWNERS  0x100000000

/* What a region may have. */
#define QUEUES_SLOTS_MIN    16u
#define QUEUES_SLOTS_MAX    4096u
#define QUEUES_STREAMS_MAX  1024u
#define QUEUES_CAPACITY_MIN 65536u
#define QUEUES_CAPACITY_MAX 1048576u

/* Flags of a region. */
#define QUEUES_CONTROL 1u /* the guest has no other way to its sockets: nqes make and end them */
#define QUEUES_POLLED  2u /* there are no doorbells: both sides look by themselves */
/* In the header alone, without QUEUES_CONTROL: the service knows QUEUES_WAITS_EDGE. */
#define QUEUES_EDGES   4u

/* At the beginning of a region. */
struct queues_header {
	/* Written once, by the service. */
	uint64_t magic;
	uint32_t version;
	uint32_t flags;
	uint64_t size;       /* bytes of the region */
	uint64_t generation; /* another one is another region, though it may lie in the same place */
	uint32_t slots;      /* of each of the two rings of nqes */
	uint32_t streams;    /* pairs of byte rings */
	uint32_t capacity;   /* bytes of each byte ring */
	uint32_t reserved;
	uint64_t jobs_at;        /* where the job ring lies, a ring of docs/protocols/shared-rings.md */
	uint64_t completions_at; /* the completion ring */
	uint64_t streams_at;     /* struct queues_stream[streams] */
	uint64_t bytes_at;       /* uint8_t[streams][2][capacity]: out, in */
	uint8_t reserved2[128 - 80];
	/* Written by the service. */
	QUEUES_ATOMIC uint32_t beat;  /* another number each second */
	QUEUES_ATOMIC uint32_t ended; /* QUEUES_ENDED_...; 0: it is served */
	QUEUES_ATOMIC uint32_t stop;  /* 1: nothing more is to be put into byte rings */
	uint8_t reserved3[128 - 12];
	/* Written by the guest. */
	QUEUES_ATOMIC uint32_t guest_beat; /* with QUEUES_POLLED: another number each second */
	uint8_t reserved4[128 - 4];
	/* Doorbells, as in docs/protocols/shared-rings.md. */
	QUEUES_ATOMIC uint32_t job_bell; /* the service sleeps */
	uint8_t reserved5[128 - 4];
	QUEUES_ATOMIC uint32_t completion_bell; /* the guest sleeps */
	uint8_t reserved6[128 - 4];
};

/* Why a region is not served any more. */
#define QUEUES_ENDED_GIVEN_UP 1u /* the service, which lives, has given it up */
#define QUEUES_ENDED_DIED     2u /* the service has died: the agent says so */

/* Flags in queues_stream.state. */
#define QUEUES_STREAM_USED 1u /* a connection has it */
#define QUEUES_STREAM_END  2u /* the peer sends nothing after in_produced */
#define QUEUES_STREAM_DEAD 4u /* the connection is over; error says how */

/* Bits of queues_stream.out_waiting. */
#define QUEUES_WAITS      1u /* it waits, at the word or for WRITABLE */
#define QUEUES_WAITS_EDGE 2u /* it waits for EPOLLOUT of its socket, without QUEUES_CONTROL */

/* A pair of byte rings. Out is from the guest to the service. */
struct queues_stream {
	/* The guest's; the service takes the last two, and writes 0. */
	QUEUES_ATOMIC uint64_t out_produced; /* bytes put into the out ring since the stream began */
	QUEUES_ATOMIC uint64_t in_consumed;  /* bytes taken out of the in ring */
	QUEUES_ATOMIC uint32_t out_waiting;  /* QUEUES_WAITS_...: the guest wants room in the out ring */
	QUEUES_ATOMIC uint32_t in_waiting;   /* 1: the guest waits for bytes in the in ring */
	uint8_t reserved[128 - 24];
	/* The service's; the guest exchanges 1 for 0 in the two that are named asleep. */
	QUEUES_ATOMIC uint64_t out_consumed; /* bytes that the socket has taken */
	QUEUES_ATOMIC uint64_t in_produced;
	QUEUES_ATOMIC uint32_t out_asleep; /* 1: the service waits for bytes in the out ring */
	QUEUES_ATOMIC uint32_t in_asleep;  /* 1: the service waits for room in the in ring */
	QUEUES_ATOMIC uint32_t generation; /* of the connection that has the stream */
	QUEUES_ATOMIC uint32_t state;
	QUEUES_ATOMIC int32_t error;
	uint8_t reserved2[128 - 36];
};

enum queues_operation {
	/* Jobs. */
	QUEUES_SOCKET = 1,
	QUEUES_BIND = 2,
	QUEUES_LISTEN = 3,
	QUEUES_CONNECT = 4,
	QUEUES_ACCEPT = 5,
	QUEUES_NAME = 6,
	QUEUES_SET = 7,
	QUEUES_GET = 8,
	QUEUES_SHUTDOWN = 9,
	QUEUES_CLOSE = 10,
	QUEUES_SEND = 11,
	QUEUES_RECEIVE = 12,
	QUEUES_NOTHING = 13,
	/* Events. */
	QUEUES_READABLE = 32,
	QUEUES_WRITABLE = 33,
	QUEUES_ENDED = 34,
	/* In the operation of a completion, beside that of the job. */
	QUEUES_DONE = 128,
};

/* Flags of nqes. */
#define QUEUES_QUIET 1u /* of a job: no completion is wanted */
#define QUEUES_ABORT 2u /* of CLOSE: drop what was not sent, and reset */
#define QUEUES_PEER  4u /* of NAME: the other end's */

/* What SHUTDOWN's length says, as shutdown() does. */
#define QUEUES_SHUT_READ  0u
#define QUEUES_SHUT_WRITE 1u
#define QUEUES_SHUT_BOTH  2u

enum queues_option {
	QUEUES_OPTION_REUSE_ADDRESS = 1,
	QUEUES_OPTION_REUSE_PORT = 2,
	QUEUES_OPTION_V6_ONLY = 3,
	QUEUES_OPTION_NO_DELAY = 4,
	QUEUES_OPTION_KEEPALIVE = 5,
	QUEUES_OPTION_KEEPALIVE_IDLE = 6,     /* seconds */
	QUEUES_OPTION_KEEPALIVE_INTERVAL = 7, /* seconds */
	QUEUES_OPTION_KEEPALIVE_COUNT = 8,
	QUEUES_OPTION_USER_TIMEOUT = 9, /* milliseconds */
	QUEUES_OPTION_LINGER = 10,      /* seconds; QUEUES_LINGER_OFF */
	QUEUES_OPTION_SEND_BUFFER = 11, /* bytes */
	QUEUES_OPTION_RECEIVE_BUFFER = 12,
	QUEUES_OPTION_SEND_QUEUE = 13, /* bytes that the peer has not acknowledged; GET only */
};

#define QUEUES_LINGER_OFF 0xffffffffu

/* A slot of the job ring or of the completion ring. */
struct queues_nqe {
	uint8_t operation; /* enum queues_operation */
	uint8_t flags;
	uint16_t stream;     /* number of a pair of byte rings */
	int32_t error;       /* of completions and events: 0, or a positive errno */
	uint32_t socket;     /* the guest's number */
	uint32_t generation; /* of the connection that has the stream; 0: of none */
	uint32_t sequence;   /* the guest's; comes back in the completion */
	uint32_t length;
	uint64_t offset;     /* bytes of a byte ring since its stream began */
	uint8_t address[16]; /* IPv6, or IPv4 as ::ffff:a.b.c.d */
	uint16_t port;       /* in the machine's own byte order */
	uint16_t option;     /* enum queues_option */
	uint32_t credit;
	uint64_t stamp; /* the guest's; comes back in the completion */
};

/* What the service and whoever starts it say: each message is one packet of an AF_UNIX socket of
 * type SEQPACKET. */
#define QUEUES_MESSAGE_MAX     128
#define QUEUES_DESCRIPTORS_MAX 4
/* In the type of an answer, beside that of the request. */
#define QUEUES_ANSWER          0x80000000u

enum queues_type {
	/* Of the agent. */
	QUEUES_HELLO = 1,
	QUEUES_REGION = 2,
	QUEUES_REGION_GONE = 3,
	QUEUES_GIVE = 4,
	QUEUES_STOP = 5,
	QUEUES_STATS = 6,
	/* Of the service. */
	QUEUES_MAKE = 32,
	QUEUES_GONE = 33,
	/* To the guest, on the socket of a region. */
	QUEUES_MADE = 48,
};

struct queues_head {
	uint32_t type;   /* enum queues_type; an answer's with QUEUES_ANSWER */
	uint32_t tag;    /* whoever asks', comes back in the answer */
	uint64_t region; /* the agent's number; 0: of none */
	int32_t error;   /* 0, or a positive errno; 0 in requests */
	uint32_t reserved;
};

/* HELLO and its answer; the answers of REGION, REGION_GONE and STOP; GONE. */
struct queues_plain {
	struct queues_head head;
	uint64_t value; /* HELLO: the version. REGION_GONE, GONE: 0. STOP: 0 or 1 */
};

/* REGION, with the service's end of the region's socket. */
struct queues_region {
	struct queues_head head;
	uint32_t flags;
	uint32_t slots;
	uint32_t streams;
	uint32_t capacity;
	uint32_t sockets; /* that it may have at a time, with QUEUES_CONTROL */
	uint32_t owner;   /* whose share of the service it has; 0: one of its own */
};

/* GIVE, with a connection; and its answer, which says the stream. */
struct queues_give {
	struct queues_head head;
	uint32_t stream;
	uint32_t generation;
};

/* MAKE, whose answer has a socket. */
struct queues_make {
	struct queues_head head;
	uint32_t family; /* 4 or 6 */
	uint32_t reserved;
};

/* MADE, with the memory of the region and, unless it is polled, the eventfd of job_bell and the
 * epoll set of completion_bell. */
struct queues_made {
	struct queues_head head;
	uint64_t size;
	uint32_t flags;
	uint32_t reserved;
};

/* Answer of STATS: of a region, or of all with region 0. */
struct queues_stats {
	struct queues_head head;
	uint64_t connections;    /* that have a stream now */
	uint64_t sockets;        /* that are no connections */
	uint64_t jobs;           /* nqes that were served */
	uint64_t completions;    /* nqes that were pushed */
	uint64_t refused;        /* jobs that broke a rule */
	uint64_t bytes_sent;     /* out of byte rings */
	uint64_t bytes_received; /* into byte rings */
	uint64_t calls;          /* system calls by which bytes were sent and received */
	uint64_t processor;      /* nanoseconds; with region 0 the process's */
};

#ifndef QUEUES_LAYOUT_ONLY
_Static_assert(sizeof(struct queues_nqe) == 64, "an nqe is a slot");
_Static_assert(sizeof(struct queues_header) == 640 && sizeof(struct queues_stream) == 256,
               "layout of version 1");
#endif

#endif

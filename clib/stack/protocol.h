/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the agent of a node and a stack module say to each other, docs/protocols/stack-module.md,
 * which says what each field means.
 *
 * This file is the only source of these layouts: bindgen makes rust/heddle-stack/src/abi.rs of it,
 * and cgo -godefs internal/plane/stacks/protocol/abi.go (make generate; the Go file needs no cgo).
 * Numbers are in the machine's own byte order, addresses in network byte order. Structs have no
 * padding: what the compiler would add is named, and is 0. */
#ifndef HEDDLE_STACK_PROTOCOL_H
#define HEDDLE_STACK_PROTOCOL_H

#include <stdint.h>

#define STACK_VERSION 1

/* The longest message, and the most descriptors with one. */
#define STACK_MESSAGE_MAX     512
#define STACK_DESCRIPTORS_MAX 1

/* In the type of an answer, beside that of the request. */
#define STACK_ANSWER       0x80000000u
/* In each number that a module gives to a connection, and in none that an agent gives. */
#define STACK_ID_OF_MODULE 0x8000000000000000u

enum stack_type {
	STACK_HELLO = 1,
	STACK_BEGIN = 2,
	STACK_END = 3,
	STACK_TENANT = 4,
	STACK_TENANT_GONE = 5,
	STACK_BIND = 6,
	STACK_LISTEN = 7,
	STACK_CONNECT = 8,
	STACK_TAKEN = 9,
	STACK_SET = 10,
	STACK_INFO = 11,
	STACK_CLOSE = 12,
	STACK_STATS = 13,
	STACK_LIST = 14,
	STACK_TELL_SENT = 15,
	/* Of the module's own accord. */
	STACK_ACCEPTED = 32,
	STACK_ENDED = 33,
	STACK_LISTED = 34,
	STACK_SENT = 35,
};

/* What a tenant's device takes and gives. */
enum stack_link {
	STACK_LINK_IP = 0,       /* IP packets: TUN */
	STACK_LINK_ETHERNET = 1, /* Ethernet frames: TAP */
};

enum stack_congestion {
	STACK_CONGESTION_DEFAULT = 0, /* the module's */
	STACK_CONGESTION_NONE = 1,
	STACK_CONGESTION_RENO = 2,
	STACK_CONGESTION_CUBIC = 3,
	STACK_CONGESTION_BBR = 4,
};

/* Where the ports begin that the container's own stack chooses, which has the same addresses. A
 * module chooses lower ones. */
#define STACK_FIRST_OWN_PORT 57469u

/* Flags of BIND and LISTEN. */
#define STACK_REUSE_ADDRESS 1u
#define STACK_REUSE_PORT    2u
#define STACK_V6_ONLY       4u

/* Flags of CLOSE. */
#define STACK_ABORT 1u

/* Bits of stack_options.mask: which members count. */
#define STACK_SET_CONGESTION     0x001u
#define STACK_SET_NO_DELAY       0x002u
#define STACK_SET_KEEPALIVE      0x004u
#define STACK_SET_KEEPALIVE_IDLE 0x008u
#define STACK_SET_KEEPALIVE_INTV 0x010u
#define STACK_SET_KEEPALIVE_CNT  0x020u
#define STACK_SET_USER_TIMEOUT   0x040u
#define STACK_SET_LINGER         0x080u
#define STACK_SET_ACK_DELAY      0x100u
#define STACK_SET_SEND_BUFFER    0x200u
#define STACK_SET_RECEIVE_BUFFER 0x400u
#define STACK_SET_HOP_LIMIT      0x800u
#define STACK_SET_ALL            0xfffu

#define STACK_LINGER_OFF 0xffffffffu

/* Bits of stack_hello.features: what a module can do. */
#define STACK_CAN_RENO      0x01u
#define STACK_CAN_CUBIC     0x02u
#define STACK_CAN_BBR       0x04u
#define STACK_CAN_SACK      0x08u
#define STACK_CAN_IPV6      0x10u
#define STACK_CAN_TELL_SENT 0x20u

/* stack_info.kind */
enum stack_kind {
	STACK_KIND_BOUND = 1,
	STACK_KIND_LISTENER = 2,
	STACK_KIND_CONNECTION = 3,
};

/* Head of each message. */
struct stack_head {
	uint32_t type;   /* enum stack_type; an answer's with STACK_ANSWER */
	uint32_t tag;    /* the agent's, comes back in the answer; 0 where there is none */
	uint64_t tenant; /* id of the endpoint; 0: of none */
	uint64_t id;     /* socket of the tenant; 0: of none */
	int32_t error;   /* 0, or a positive errno; 0 in requests */
	uint32_t reserved;
};

/* A message of nothing else. */
struct stack_plain {
	struct stack_head head;
};

struct stack_address {
	uint8_t address[16]; /* IPv6, or IPv4 as ::ffff:a.b.c.d */
	uint16_t port;
	uint16_t reserved[3];
};

struct stack_hello {
	struct stack_head head;
	uint32_t version;
	uint32_t features; /* of an answer */
	uint8_t name[32];  /* of an answer: the stack's name and version, UTF-8, the rest 0 */
};

struct stack_options {
	uint32_t mask;
	uint32_t congestion; /* enum stack_congestion */
	uint32_t no_delay;   /* 0 or 1, as keepalive */
	uint32_t keepalive;
	uint32_t keepalive_idle;     /* seconds */
	uint32_t keepalive_interval; /* seconds */
	uint32_t keepalive_count;
	uint32_t user_timeout;   /* milliseconds; 0: the module's */
	uint32_t linger;         /* seconds; STACK_LINGER_OFF */
	uint32_t ack_delay;      /* milliseconds; 0: at once */
	uint32_t send_buffer;    /* bytes; at CONNECT and LISTEN only */
	uint32_t receive_buffer; /* bytes; at CONNECT and LISTEN only */
	uint32_t hop_limit;      /* 1 to 255 */
	uint32_t reserved[3];
};

/* What a tenant may have; 0 is the module's own default. */
struct stack_limits {
	uint64_t memory;       /* bytes */
	uint64_t send_rate;    /* bytes of data a second; 0: no cap */
	uint64_t receive_rate; /* bytes of data a second; 0: no cap */
	uint32_t connections;
	uint32_t connect_rate; /* new connections a second, both ways; 0: no cap */
	uint32_t sockets;      /* bound ones and listeners */
	uint32_t weight;       /* share of the module beside that of others, 1 to 100 */
	uint32_t processor;    /* thousandths of one processor; 0: no cap */
	uint32_t reserved;
};

struct stack_tenant {
	struct stack_head head;
	uint64_t generation; /* another one is another container */
	uint8_t address6[16];
	uint8_t address4[4];
	uint32_t mtu;
	uint32_t link;      /* enum stack_link */
	uint32_t offloads;  /* 1: the device segments and fills in checksums */
	uint8_t mac[6];     /* its own, with STACK_LINK_ETHERNET */
	uint8_t gateway[6]; /* the one that all frames go to */
	uint32_t reserved;
	struct stack_limits limits;
	struct stack_options options; /* of its connections, unless they have their own */
	uint8_t name[32];             /* for people: UTF-8, the rest 0 */
};

struct stack_bind {
	struct stack_head head;
	struct stack_address address;
	uint32_t flags;
	uint32_t reserved;
};

struct stack_listen {
	struct stack_head head;
	struct stack_address address;
	uint32_t flags;
	uint32_t backlog;
	struct stack_options options;
};

struct stack_connect {
	struct stack_head head;
	struct stack_address remote;
	uint32_t skip; /* bytes at the head of the pair that are not the program's, at least 1 */
	uint32_t reserved;
	struct stack_options options;
};

/* Answer to BIND, LISTEN and CONNECT. */
struct stack_named {
	struct stack_head head;
	struct stack_address local;
};

struct stack_set {
	struct stack_head head;
	struct stack_options options;
};

struct stack_close {
	struct stack_head head;
	uint32_t flags;
	uint32_t reserved;
};

struct stack_accepted {
	struct stack_head head; /* id: the new connection's */
	uint64_t listener;
	struct stack_address local;
	struct stack_address remote;
};

/* Answer to INFO, and ENDED and LISTED. */
struct stack_info {
	struct stack_head head;
	uint32_t kind;     /* enum stack_kind */
	uint32_t state;    /* of a connection, as in TCP_INFO: 1 ESTABLISHED ... 11 CLOSING */
	uint64_t listener; /* that accepted it, or 0 */
	struct stack_address local;
	struct stack_address remote;
	struct stack_options options; /* in force; every bit of the mask is set */
	uint64_t bytes_sent;          /* acknowledged data */
	uint64_t bytes_received;      /* data in order */
	uint64_t segments_sent;
	uint64_t segments_received;
	uint64_t retransmits;
	uint32_t rtt;           /* smoothed, microseconds; 0: not measured */
	uint32_t rtt_variation; /* microseconds */
	uint32_t mss;           /* bytes of data in a segment */
	uint32_t send_queue;    /* bytes: not yet acknowledged, with those not yet sent */
	uint32_t receive_queue; /* bytes: not yet given to the program's pair */
	uint32_t pending;       /* of a listener: connections that nobody took */
	uint32_t backlog;       /* of a listener */
	uint32_t reserved;
};

/* Counters since the tenant was made; those up to `receive_queued` are of now. Tenant 0 is the
 * module: the sums. */
struct stack_stats {
	struct stack_head head;
	uint64_t processor;       /* nanoseconds; of tenant 0: of the process */
	uint64_t memory;          /* bytes in use */
	uint64_t memory_reserved; /* bytes that count against the limit */
	uint64_t tenants;
	uint64_t sockets;
	uint64_t connections; /* in any state but CLOSED */
	uint64_t half_open;
	uint64_t time_wait;
	uint64_t send_queued;
	uint64_t receive_queued;
	uint64_t connected; /* established from here */
	uint64_t accepted;  /* established from there */
	uint64_t failed;    /* connects that were not established */
	uint64_t reset;     /* established connections that ended with an error */
	uint64_t bytes_sent;
	uint64_t bytes_received;
	uint64_t segments_sent;
	uint64_t segments_received;
	uint64_t retransmits;
	/* Packets that were dropped, by reason. */
	uint64_t drop_malformed;
	uint64_t drop_martian;
	uint64_t drop_checksum;
	uint64_t drop_protocol;
	uint64_t drop_backlog;
	uint64_t drop_connections;
	uint64_t drop_memory;
	uint64_t drop_rate;
	uint64_t drop_device;
	/* Requests that were refused, by reason. */
	uint64_t refuse_connections;
	uint64_t refuse_memory;
	uint64_t refuse_rate;
	uint64_t refuse_sockets;
	uint64_t refuse_ports;
};

/* No compiler may lay them out in another way. */
#define STACK_SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " has another size")
STACK_SIZE(stack_head, 32);
STACK_SIZE(stack_plain, 32);
STACK_SIZE(stack_address, 24);
STACK_SIZE(stack_hello, 72);
STACK_SIZE(stack_options, 64);
STACK_SIZE(stack_limits, 48);
STACK_SIZE(stack_tenant, 232);
STACK_SIZE(stack_bind, 64);
STACK_SIZE(stack_listen, 128);
STACK_SIZE(stack_connect, 128);
STACK_SIZE(stack_named, 56);
STACK_SIZE(stack_set, 96);
STACK_SIZE(stack_close, 40);
STACK_SIZE(stack_accepted, 88);
STACK_SIZE(stack_info, 232);
STACK_SIZE(stack_stats, 296);
#undef STACK_SIZE

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a router of the verbs plane and its agent say to each other: docs/protocols/verbs-agent.md
 * says what each field means.
 *
 * This file is the only source of these layouts: bindgen makes rust/verbs-protocol/src/agent_abi.rs
 * of it, and cgo internal/plane/verbs/protocol/abi.go (make generate). Agents meet routers of other
 * builds, so that nothing here may change but by members that are added to the end of a record:
 * tests of both sides know the bytes (rust/verbs-protocol/tests/agent-messages.txt). Numbers are in
 * the machine's own byte order, addresses in network byte order. Structs have no padding. */
#ifndef HEDDLE_VERBS_AGENT_H
#define HEDDLE_VERBS_AGENT_H

#include <stdint.h>

#define VERBS_AGENT_VERSION 3

#define VERBS_AGENT_GID            16 /* bytes */
#define VERBS_AGENT_NAME           64
#define VERBS_AGENT_GROUPS_MAX     256
#define VERBS_AGENT_CARD_GIDS      8
/* The marks of an ANSWER: below these a DSCP, which is the operator's with the first one; with the
 * second one the priority is. */
#define VERBS_AGENT_MARK_DSCP      64
#define VERBS_AGENT_MARK_PRIORITY  128
/* The longest message of a router, in bytes: a STATISTICS. */
#define VERBS_AGENT_STATISTICS_MAX 16384

enum verbs_agent_type {
	VERBS_AGENT_HELLO = 1, /* verbs_agent_number */
	VERBS_AGENT_BEGIN = 2, /* verbs_agent_head, as all that have no other name here */
	VERBS_AGENT_END = 3,
	VERBS_AGENT_ENDPOINT = 4, /* verbs_agent_endpoint */
	VERBS_AGENT_REMOVE = 5,
	VERBS_AGENT_CONNECT = 6,     /* verbs_agent_ends */
	VERBS_AGENT_CONNECTED = 7,   /* verbs_agent_number */
	VERBS_AGENT_ACCEPTED = 8,    /* verbs_agent_ends */
	VERBS_AGENT_REFUSED = 9,     /* verbs_agent_number */
	VERBS_AGENT_STATS = 10,      /* verbs_agent_stats */
	VERBS_AGENT_STATISTICS = 11, /* verbs_agent_statistics, and records */
	VERBS_AGENT_DRAIN = 12,
	VERBS_AGENT_RELEASED = 13,
	VERBS_AGENT_GROUPS = 14, /* verbs_agent_groups, and GIDs */
	VERBS_AGENT_ANSWER = 15, /* verbs_agent_answer */
	VERBS_AGENT_ASK_ANEW = 16,
	VERBS_AGENT_CARD = 17, /* verbs_agent_card, and GIDs */
	VERBS_AGENT_ASK = 18,  /* verbs_agent_ends */
};

struct verbs_agent_head {
	uint32_t type; /* enum verbs_agent_type */
	uint32_t tag;
	uint64_t endpoint;
};

struct verbs_agent_number {
	struct verbs_agent_head head;
	uint32_t number; /* a version, or an errno */
	uint32_t reserved;
};

struct verbs_agent_limits {
	uint32_t contexts;
	uint32_t qps;
	uint32_t cqs;
	uint32_t mrs;
	uint32_t pds;
	uint32_t srqs;
	uint32_t ahs;
	uint32_t channels;
	uint32_t memory_mib;
	uint32_t sends_per_second;
	uint32_t spin_us;
	uint32_t egress_kbit;
	uint32_t ingress_kbit;
	uint32_t outside; /* 1: it may have peers without Heddle */
	uint32_t reserved[2];
};

struct verbs_agent_endpoint {
	struct verbs_agent_head head;
	uint8_t gids[2][VERBS_AGENT_GID];
	struct verbs_agent_limits limits;
	uint8_t name[VERBS_AGENT_NAME]; /* UTF-8, the rest 0 */
};

struct verbs_agent_ends {
	struct verbs_agent_head head;
	uint8_t source[VERBS_AGENT_GID];
	uint8_t destination[VERBS_AGENT_GID];
};

struct verbs_agent_answer {
	struct verbs_agent_head head;
	uint8_t destination[VERBS_AGENT_GID];
	uint32_t number; /* an errno */
	uint32_t marks;  /* VERBS_AGENT_MARK_... */
};

struct verbs_agent_groups {
	struct verbs_agent_head head;
	uint8_t gids[2][VERBS_AGENT_GID];
};

struct verbs_agent_card {
	struct verbs_agent_head head;
	uint32_t lid;
	uint32_t count;
};

/* What a STATS asks for. */
enum verbs_agent_kind {
	VERBS_AGENT_ENDPOINTS = 1,
	VERBS_AGENT_QPS = 2,
	VERBS_AGENT_IDS = 3,
};

struct verbs_agent_stats {
	struct verbs_agent_head head;
	uint32_t kind; /* enum verbs_agent_kind */
	uint32_t cursor;
};

struct verbs_agent_statistics {
	struct verbs_agent_head head;
	uint32_t kind;
	uint32_t cursor;
	uint32_t count;
	uint32_t size; /* of a record: a later build's may be longer */
};

#define VERBS_AGENT_QUOTAS         10
#define VERBS_AGENT_REASONS        64
/* Reasons that routers of before have. */
#define VERBS_AGENT_REASONS_BEFORE 32

struct verbs_agent_traffic {
	uint64_t requests; /* that were done for queue pairs */
	uint64_t served;   /* of peers that were done at queue pairs */
	uint64_t sent;     /* bytes that left the endpoint's memory */
	uint64_t received; /* bytes that came into it */
};

struct verbs_agent_endpoint_record {
	uint64_t endpoint;
	uint64_t used[VERBS_AGENT_QUOTAS];
	uint64_t limits[VERBS_AGENT_QUOTAS];
	struct verbs_agent_traffic traffic[3]; /* by memory, TCP, card */
	uint64_t errors;
	uint64_t reasons[VERBS_AGENT_REASONS];
};

struct verbs_agent_qp_record {
	uint64_t endpoint;
	uint32_t number;
	uint32_t peer;
	uint8_t gid[VERBS_AGENT_GID];
	uint8_t peer_gid[VERBS_AGENT_GID];
	uint32_t pid;
	uint8_t service;
	uint8_t state;
	uint8_t path;
	uint8_t last_error;
	struct verbs_agent_traffic traffic;
	uint64_t errors;
};

struct verbs_agent_id_record {
	uint64_t endpoint;
	uint32_t number;
	uint32_t pid;
	uint8_t source[VERBS_AGENT_GID];
	uint8_t destination[VERBS_AGENT_GID];
	uint16_t source_port;
	uint16_t destination_port;
	uint16_t space;
	uint8_t state;
	uint8_t reserved;
	uint32_t qp;
	uint32_t peer_qp;
};

#endif

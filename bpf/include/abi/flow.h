/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections as packets show them, and what is remembered of them. */
#ifndef HEDDLE_ABI_FLOW_H
#define HEDDLE_ABI_FLOW_H

#include <linux/types.h>

/* A connection as its packets show it, remote end first. */
struct flow_key {
	__be32 saddr; /* of IPv6 packets: what the overlay addresses embed */
	__be32 daddr;
	__be16 sport;
	__be16 dport;
	__u32 ipv6; /* 1 if the packets are IPv6 */
};

/* flow.kind */
enum flow_kind {
	FLOW_PLAIN,      /* neither of what follows */
	FLOW_RELAY,      /* rewritten and handed to the endpoint's veth */
	FLOW_CONTAINERS, /* between containers' own stacks, past a node socket in TIME_WAIT */
	FLOW_NAMES,      /* both ends are one container's: src and dst are what its programs see */
};

/* What the SYN of a direct connection asked for. Kept until it is accepted, because a SYN cookie
 * loses the option, and for the life of a relayed connection. */
struct flow {
	__be32 src; /* overlay addresses */
	__be32 dst;
	__be16 dst_port;
	__u8 kind;         /* enum flow_kind */
	__u8 ipv6;         /* 1 if src and dst stand for their IPv6 forms */
	__u32 ifindex;     /* of that veth, if relayed */
	__be16 relay_port; /* source port there, if relayed */
	__u16 ended;       /* enum flow_ended, if relayed */
};

/* flow.ended: who said by a FIN that a relayed connection ends; a RST says it for both. */
enum flow_ended {
	ENDED_BY_SENDER = 1 << 0,
	ENDED_BY_ENDPOINT = 1 << 1,
	ENDED = ENDED_BY_SENDER | ENDED_BY_ENDPOINT,
	RELAY_TOLD = 1 << 2, /* that it was established has been told of */
};

/* Flows of flow_by_wire by who began them: each owner has TUPLE_SETS sets of SET_TUPLES of its
 * keys. */
#define TUPLE_SETS 1024
#define SET_TUPLES 8

struct tuple_slot {
	__u32 id;   /* a digest of the key; TUPLE_FREE, TUPLE_BUSY */
	__u32 seen; /* when it was put here, in units of 2^30 ns since boot */
	struct flow_key key;
};

struct tuple_set {
	struct tuple_slot wire[SET_TUPLES];
};

#endif

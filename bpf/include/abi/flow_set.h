/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Flows that the packet filter remembers, and its work space. */
#ifndef HEDDLE_ABI_FLOW_SET_H
#define HEDDLE_ABI_FLOW_SET_H

#include <linux/types.h>
#include "include/abi/address.h"

/* Who talks to whom, as the packets of the end that began show it. */
struct flow_id {
	struct address from;
	struct address to;
	__be16 sport; /* of an ICMP echo: its identifier, in both */
	__be16 dport;
	__u8 protocol; /* as model.Protocol */
	/* 1: not a flow, but the fragments of a packet; the ports are its identification */
	__u8 kind;
	__u16 pad;
};

/* Remembered flows are kept by who began them, so that nobody's flood pushes out those of others.
 * Each owner has OWNER_SETS sets; a flow has its place in one of them. */
#define OWNER_SETS 4096
#define SET_FLOWS  4

struct flow_set_key {
	/* the overlay address that the flow is from; 0: all hosts and nodes outside */
	__be32 owner;
	__u32 set;
};

struct flow_set {
	struct {
		__u64 id;    /* a digest of struct flow_id; 0: nothing */
		__u32 value; /* what is remembered of it */
		__u32 seen;  /* when it was last heard of, in units of 2^30 ns since boot */
	} flow[SET_FLOWS];
};

enum fragment {
	FRAGMENT_NONE,
	FRAGMENT_FIRST,
	FRAGMENT_LATER,
};

/* Where policy/filter.h works: its callers' stacks are full. */
struct filter_state {
	struct flow_id flow;
	struct flow_id other;
	__u32 offset;   /* of the transport header in the frame */
	__u32 fragment; /* enum fragment */
	__be32 ident;
	__u8 next; /* what the last header said comes next */
	__u8 pad[3];
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Tables of policy: classes of addresses, and verdicts on pairs of them. */
#ifndef HEDDLE_ABI_POLICY_H
#define HEDDLE_ABI_POLICY_H

#include <linux/types.h>
#include "include/abi/address.h"

/* What policy says of a connection or datagram; internal/model.Verdict has the meanings. The
 * greater forbids more. */
enum heddle_verdict {
	VERDICT_ALLOW,
	VERDICT_REJECT,
	VERDICT_DROP,
};

/* policy_state. Every table but that of ports is there twice, so that a change comes into force at
 * once: programs read the side in force, the agent writes the other one. */
enum policy_flags {
	POLICY_ACTIVE = 1 << 0, /* there are rules: without it nothing else is looked up */
	POLICY_SIDE = 1 << 1,   /* the side in force: 0 or 1 */
};

struct class_key {
	__u32 side;
	struct address addr;
};

struct class_prefix_key {
	__u32 prefixlen; /* of the rest: 128 + n for an IPv4 prefix of n bits */
	/* side is 2 more for IPv6: ::/0 holds no v4-mapped addresses. */
	struct class_key of;
};

/* The class of an address, and what holds where no pair says otherwise. */
struct class_info {
	__u32 class_id;
	__u8 egress; /* enum heddle_verdict */
	__u8 ingress;
	__u16 pad;
};

/* The classes of the two ends of a connection, the one that opens it first. */
struct pair_key {
	__u32 from;
	__u32 to;
	__u32 side;
};

struct pair_verdict {
	__u32 ports;   /* the set of port ranges that differ; 0: none */
	__u32 verdict; /* enum heddle_verdict: for all others */
};

/* Ranges of ports are cut into prefixes. A set never changes while a pair has it, so sets have no
 * sides. */
struct port_range_key {
	__u32 prefixlen; /* of what follows: 48 + n for n bits of the port */
	__u32 ports;     /* the set */
	__u8 protocol;   /* as model.Protocol: ICMPv6 is ICMP */
	__u8 pad;
	__be16 port;
};

#endif

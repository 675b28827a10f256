/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where packets between containers go past the node's stack. */
#ifndef HEDDLE_ABI_PACKETS_H
#define HEDDLE_ABI_PACKETS_H

#include <linux/types.h>
#include "include/headers.h"

/* The hardware address of a node's overlay device. */
struct vtep {
	__u8 mac[6];
	__u16 pad;
};

/* Two overlay addresses, the lower one first. */
struct address_pair {
	__be32 low;
	__be32 high;
};

/* What is in happened_once: not 0 once it was done. */
enum once {
	ONCE_TRANSLATED, /* translated_pairs may have an entry */
	ONCE_RELAYED,    /* wire_by_relay may */
	ONCE_KNOWN,      /* these and crossed_by_id have what was done before there were they */
	ONCE_MAX,
};

/* How packets reach a node. */
struct way {
	__u64 until; /* believed until then, ns since boot */
	__be32 hop;  /* the neighbour that they go to, 0: only the overlay's device is to send them */
	__u32 pad;
};

/* For how many milliseconds one answer to a probe counts: the agent probes each second. */
enum neighbour_times {
	NEIGHBOUR_ANSWER_MS = 3500,
};

/* A node that shares a network with this one, which takes packets without a tunnel while it answers
 * probes for it. */
struct neighbour {
	__u64 until;    /* macs and near are believed until then, ns since boot */
	__u64 answered; /* its last answer, ns since boot; 0: none yet */
	__u64 sent;     /* when a container last sent something to it, about: it is worth a probe */
	__u8 macs[12];  /* of a frame to it: its hardware address, this node's; all 0: not known yet */
	__u32 near;     /* not 0: no router is on the way, whose MTU fits */
};

/* What a processor has found of an address of another node whose packets go without a tunnel. */
struct near_address {
	__u64 until; /* believed until then, as what the neighbour has */
	__be32 addr;
	__be32 node;
	__u8 macs[12]; /* the neighbour's */
	__u32 pad;
};

/* What goes between the outer Ethernet header and the inner IP header. */
struct tunnel_headers {
	struct iphdr_ ip;
	struct udphdr_ udp;
	struct vxlanhdr_ vxlan;
	__u8 macs[12];
	__be16 protocol;
};

/* Work space of tc/tunnel.h: its callers' stacks are full. */
struct tunnel_scratch {
	struct tunnel_headers headers;
	struct way way;
	__u64 lookup[8]; /* struct bpf_fib_lookup, whose unions bpf2go has no names for */
};

#endif

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

/* How packets reach a node. */
struct way {
	__u64 until; /* believed until then, ns since boot */
	__be32 hop;  /* the neighbour that they go to, 0: only the overlay's device is to send them */
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

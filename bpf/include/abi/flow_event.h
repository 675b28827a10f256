/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What happened to a connection, as the programs tell the agent. */
#ifndef HEDDLE_ABI_FLOW_EVENT_H
#define HEDDLE_ABI_FLOW_EVENT_H

#include <linux/types.h>
#include "include/abi/address.h"

enum flow_event_kind {
	FLOW_EVENT_OPENED, /* a connection is established */
	FLOW_EVENT_ENDED,  /* ... and is over */
	FLOW_EVENT_FAILED, /* connect() came to none */
	FLOW_EVENT_DENIED, /* it must not be: reason says why */
	/* Of packets, not of sockets: endpoint_id and cookie are 0. */
	FLOW_EVENT_PACKET_PASSED, /* the first of a flow was let through */
	FLOW_EVENT_PACKET_DENIED,
	FLOW_EVENT_WHOLE, /* a connection is over, and this tells of its opening, too */
};

/* flow_event.protocol of a connection of the verbs plane; all else has IP's numbers. */
#define FLOW_PROTOCOL_RDMA 254

/* One record of flow_events. It is small, because the ring's memory is in nobody's cache. */
struct flow_event {
	__u64 time; /* ns of the monotonic clock */
	__u64 cookie;
	__u64 bytes_sent; /* acknowledged by the peer */
	__u64 bytes_received;
	struct address local; /* as the program sees them; of a connect that is denied all zero */
	struct address remote;
	__be16 local_port;
	__be16 remote_port;
	__u32 endpoint_id;
	__u32 retransmits;
	__u32 rtt;     /* smoothed, in us; 0: none was measured */
	__u16 error;   /* errno by which the kernel ended it; 0: none */
	__u8 kind;     /* enum flow_event_kind */
	__u8 path;     /* enum heddle_path */
	__u8 reason;   /* enum heddle_reason */
	__u8 accepted; /* the peer opened the connection */
	__u8 protocol; /* as policy tells them apart, or FLOW_PROTOCOL_RDMA */
	__u8 pad;
	__u64 opened; /* of FLOW_EVENT_WHOLE: as time */
};

/* whole_flow.flags */
enum whole_flow_flags {
	WHOLE_ACCEPTED = 1 << 0,
	WHOLE_RDMA = 1 << 1,
};

/* A record of flow_events, too, told from a flow_event by its size: FLOW_EVENT_WHOLE of IPv4, where
 * the numbers fit. With the ring's header it is as long as a line of the cache. */
struct whole_flow {
	__u64 time;
	__u64 cookie;
	__be32 local;
	__be32 remote;
	__be16 local_port;
	__be16 remote_port;
	__u32 endpoint_id;
	__u32 bytes_sent;
	__u32 bytes_received;
	__u32 lasted; /* in units of 1,024 ns */
	__u32 rtt;
	__u16 retransmits;
	__u8 error;
	__u8 path;
	__u8 reason;
	__u8 flags;
	__u16 pad;
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Records that the iterators write to the agent. */
#ifndef HEDDLE_ABI_RECORD_H
#define HEDDLE_ABI_RECORD_H

#include <linux/types.h>
#include "include/abi/tag.h"

/* One record of the connection listing (iter/list.bpf.c). */
struct connection_record {
	struct sock_tag tag;
	struct address node_local; /* as the kernel has it */
	struct address node_remote;
	__be16 node_local_port;
	__be16 node_remote_port;
	__u8 state;  /* the kernel's TCP state */
	__u8 family; /* AF_INET or AF_INET6 */
	__u16 pad;
	__u64 bytes_sent; /* acknowledged by the peer */
	__u64 bytes_received;
	__u64 cookie;
	__u32 receive_queue; /* bytes not read yet; of a listener: connections not accepted yet */
	/* bytes not acknowledged yet; of a listener: how many connections may wait */
	__u32 send_queue;
	__u32 retransmits;
	__u32 pad2;
};

/* A socket that is to be ended, or whose lock is held (iter/unlocked.bpf.c), or that is no node
 * socket (cut_plain): what SOCK_DESTROY wants to know of it. */
struct socket_record {
	struct address local; /* as the kernel has it */
	struct address remote;
	__u64 cookie;
	__u32 endpoint_id;
	__u32 ifindex; /* that it is bound to, or 0 */
	__be16 local_port;
	__be16 remote_port;
	__u8 locked; /* a system call has its lock */
	__u8 ended;  /* by the program that wrote this */
	__u8 pad[2];
};

/* A descriptor that holds a socket of an endpoint in a process whose ioctls nobody traps
 * (iter/socket_owners.bpf.c). */
struct socket_owner_record {
	__u32 endpoint_id;
	__u32 pid;
};

#endif

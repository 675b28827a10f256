/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Endpoints and sockets whose TCP a stack module runs: docs/architecture/stacks.md. */
#ifndef HEDDLE_ABI_STACK_H
#define HEDDLE_ABI_STACK_H

#include <linux/types.h>

/* The other one of two devices: the node's side of a veth, and a stack module's. */
struct stack_device {
	__u32 ifindex;
	__u8 mac[6]; /* that frames to that device must have */
	__u16 unused;
};

/* What the agent notes of the program's end of a socket pair. Programs do not look into it: the
 * layout is that of `Note` in internal/plane/stacks/socket. */
struct stack_note {
	__u64 words[32];
};

#endif

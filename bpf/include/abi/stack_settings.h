/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a stack profile sets of the kernel's TCP for the sockets of one endpoint. */
#ifndef HEDDLE_ABI_STACK_SETTINGS_H
#define HEDDLE_ABI_STACK_SETTINGS_H

#include <linux/types.h>

#define STACK_CONGESTION_SIZE 16 /* TCP_CA_NAME_MAX */

/* stack_settings.set and .held, and, by their numbers, parts of sock_tag.options. */
enum stack_setting {
	STACK_CONGESTION = 1 << 0,
	STACK_RECEIVE_BUFFER = 1 << 1,
	STACK_SEND_BUFFER = 1 << 2,
	STACK_PACING = 1 << 3,
	STACK_KEEPALIVE = 1 << 4,
	STACK_USER_TIMEOUT = 1 << 5,
	STACK_NOTSENT_LOWAT = 1 << 6,
	STACK_MSS = 1 << 7,
	STACK_WINDOW = 1 << 8,
	STACK_ECN = 1 << 9,
	STACK_DELAYED_ACK = 1 << 10,
	STACK_REFUSED = 1 << 11, /* the endpoint's programs get no TCP sockets */
};

struct stack_settings {
	__u32 set;                              /* enum stack_setting: which of what follows is to be */
	__u32 held;                             /* of these, those that programs cannot change */
	char congestion[STACK_CONGESTION_SIZE]; /* zero-filled */
	__u32 pacing_rate;                      /* bytes a second */
	__u32 receive_buffer;                   /* bytes, as SO_RCVBUF takes them */
	__u32 send_buffer;
	__u32 keepalive_idle; /* seconds */
	__u32 keepalive_interval;
	__u32 keepalive_count;
	__u32 user_timeout; /* ms */
	__u32 notsent_lowat;
	__u32 mss;
	__u32 window;      /* segments */
	__u32 delayed_ack; /* microseconds */
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Accounts of endpoints. */
#ifndef HEDDLE_ABI_ACCOUNT_H
#define HEDDLE_ABI_ACCOUNT_H

#include <linux/types.h>

/* What an endpoint's sockets did. Bytes and retransmits are those of connections that have
 * ended. */
struct account {
	__u64 opened;    /* connections made by connect() */
	__u64 accepted;  /* connections taken by a listener */
	__u64 refused;   /* connects that ended in ECONNREFUSED */
	__u64 timed_out; /* connects that ended in ETIMEDOUT */
	__u64 failed;    /* connects that ended otherwise: unreachable, given up by the program */
	__u64 closed;    /* of those opened and accepted */
	__u64 broken;    /* of those closed, by an error: RST, timeout */
	__u64 bytes_sent;
	__u64 bytes_received;
	__u64 retransmits;
};

#endif

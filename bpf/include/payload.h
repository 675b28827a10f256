/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a connection has carried. */
#ifndef HEDDLE_PAYLOAD_H
#define HEDDLE_PAYLOAD_H

#include "include/kernel_types.h"

/* Payload that the peer acknowledged. bytes_acked counts SYN and FIN as well: no more than was sent
 * can have been acknowledged. */
static __always_inline __u64 payload_sent(const struct tcp_sock *tcp)
{
	__u64 sent = tcp->bytes_sent - tcp->bytes_retrans;

	return tcp->bytes_acked < sent ? tcp->bytes_acked : sent;
}

static __always_inline bool has_fin(const struct tcp_sock *tcp)
{
	return ((struct sock_common *)tcp)->skc_flags & 1UL << SOCK_DONE_;
}

/* bytes_received counts the FIN. */
static __always_inline __u64 payload_received(const struct tcp_sock *tcp)
{
	__u64 n = tcp->bytes_received;

	return n && has_fin(tcp) ? n - 1 : n;
}

#endif

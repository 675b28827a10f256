/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reading sockets by the kernel's own structs. */
#ifndef HEDDLE_SOCKET_H
#define HEDDLE_SOCKET_H

#include "include/address.h"
#include "include/kernel_types.h"
#include "include/payload.h"

/* The kernel's addresses of the socket. */
static __always_inline void addresses_of(struct sock_common *sk, struct address *local,
                                         struct address *remote)
{
	int i;

	if (sk->skc_family == AF_INET6 && sk->skc_rcv_saddr == LOOPBACK4_IPV6) {
		for (i = 0; i < 4; i++) {
			local->word[i] = sk->skc_v6_rcv_saddr.in6_u.u6_addr32[i];
			remote->word[i] = sk->skc_v6_daddr.in6_u.u6_addr32[i];
		}
		return;
	}
	set_mapped(local, sk->skc_rcv_saddr);
	set_mapped(remote, sk->skc_daddr);
}

/* Bytes not read and not acknowledged yet; of a listener, connections that wait for accept(), and
 * how many may. */
static __always_inline void queues_of(const struct tcp_sock *tcp, int state, __u32 *receive, __u32 *send)
{
	if (state == BPF_TCP_LISTEN) {
		*receive = ((struct sock *)tcp)->sk_ack_backlog;
		*send = ((struct sock *)tcp)->sk_max_ack_backlog;
		return;
	}
	*receive = tcp->rcv_nxt - tcp->copied_seq;
	if (*receive && has_fin(tcp))
		*receive -= 1;
	*send = tcp->write_seq - tcp->snd_una;
}

#endif

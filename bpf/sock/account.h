/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Accounts of endpoints: connections opened, accepted, failed and closed, and what closed ones
 * carried. Called by sockops when a connection changes its state and by nothing else, so that bytes
 * cost nothing. What live connections have carried so far is in their sockets (iter/list.bpf.c). */
#ifndef HEDDLE_SOCK_ACCOUNT_H
#define HEDDLE_SOCK_ACCOUNT_H

#include "include/abi/account.h"
#include "include/abi/path.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/payload.h"
#include "include/reprobe.h"

/* The account of the socket's endpoint; NULL if that is gone. */
static __always_inline struct account *account_of(const struct sock_tag *tag)
{
	return bpf_map_lookup_elem(&account_by_endpoint, &tag->endpoint_id);
}

/* Asks for the state changes of this connection. */
static __always_inline void account_follow(struct bpf_sock_ops *ops)
{
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

static __always_inline void account_opened(const struct sock_tag *tag)
{
	struct account *a = account_of(tag);

	if (a)
		__sync_fetch_and_add(&a->opened, 1);
}

static __always_inline void account_accepted(const struct sock_tag *tag)
{
	struct account *a = account_of(tag);

	if (a)
		__sync_fetch_and_add(&a->accepted, 1);
}

/* A connect ends without a connection. No error: the program gave it up. */
static __always_inline void account_failed(struct account *a, int err)
{
	if (err == ECONNREFUSED_)
		__sync_fetch_and_add(&a->refused, 1);
	else if (err == ETIMEDOUT_)
		__sync_fetch_and_add(&a->timed_out, 1);
	else
		__sync_fetch_and_add(&a->failed, 1);
}

static __always_inline void account_closed(struct account *a, const struct tcp_sock *tcp, int err)
{
	if (err)
		__sync_fetch_and_add(&a->broken, 1);
	__sync_fetch_and_add(&a->bytes_sent, payload_sent(tcp));
	__sync_fetch_and_add(&a->bytes_received, payload_received(tcp));
	__sync_fetch_and_add(&a->retransmits, tcp->total_retrans);
	__sync_fetch_and_add(&a->closed, 1);
}

/* BPF_SOCK_OPS_STATE_CB: args[0] is the state that the socket leaves, args[1] that it enters. One
 * that goes to TIME_WAIT enters CLOSE: what waits is not the socket. */
static __always_inline void account_state(struct bpf_sock_ops *ops, const struct sock_tag *tag,
                                          const struct tcp_sock *tcp)
{
	__u32 from = ops->args[0];
	struct account *a;
	int err;

	if (ops->args[1] != BPF_TCP_CLOSE || from == BPF_TCP_LISTEN || from == BPF_TCP_SYN_RECV)
		return;
	a = account_of(tag);
	if (!a)
		return;
	/* Set before the state: why the kernel ends the connection. */
	err = ((struct sock *)tcp)->sk_err;
	if (from == BPF_TCP_SYN_SENT) {
		account_failed(a, err);
		if (err && tag->path == PATH_DIRECT) /* the path may be why */
			ask_reprobe(ops->remote_ip4);
	} else {
		account_closed(a, tcp, err);
	}
}

#endif

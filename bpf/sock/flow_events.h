/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Events of connections: opened, ended, failed, denied. Each costs a record in a ring and nothing
 * else; bytes cost nothing. The functions are global ones, which the verifier looks at once for
 * each program and not for each call. */
#ifndef HEDDLE_SOCK_FLOW_EVENTS_H
#define HEDDLE_SOCK_FLOW_EVENTS_H

#include "include/abi/flow_event.h"
#include "include/abi/path.h"
#include "include/address.h"
#include "include/count.h"
#include "include/event_share.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/payload.h"
#include "include/socket.h"
#include "sock/context.h"

static __always_inline struct flow_event *begin_event(const struct sock_tag *tag, __u32 kind)
{
	struct flow_event *e = reserve_event(tag->endpoint_id, kind);

	if (e && tag->flags & TAG_RDMA)
		e->protocol = FLOW_PROTOCOL_RDMA;
	return e;
}

/* The ends as the program sees them, as sock/names.bpf.c has it. */
static __always_inline void set_ends(struct flow_event *e, const struct sock_tag *tag, struct sock_common *sk)
{
	addresses_of(sk, &e->local, &e->remote);
	e->local_port = bpf_htons(sk->skc_num);
	e->remote_port = sk->skc_dport;
	if (tag->flags & TAG_LOCAL) {
		e->local = tag->local;
		if (tag->local_port)
			e->local_port = tag->local_port;
	}
	if (tag->flags & TAG_REMOTE) {
		e->remote = tag->remote;
		if (tag->remote_port)
			e->remote_port = tag->remote_port;
	}
}

/* Reports what happens to the connection of ops. reason 0: the tag's own. */
__noinline int report_flow(struct bpf_sock_ops *ops, const struct sock_tag *tag, __u32 kind, __u32 reason)
{
	struct bpf_sock *sk = ops->sk;
	struct flow_event *e;
	struct tcp_sock *tcp;

	if (!sk || !tag || tag->flags & TAG_PROBE)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	e = begin_event(tag, kind);
	if (!e)
		return 0;
	set_ends(e, tag, (struct sock_common *)tcp);
	e->path = tag->path;
	e->reason = reason ? reason : tag->reason;
	e->accepted = !!(tag->flags & TAG_ACCEPTED);
	e->cookie = bpf_get_socket_cookie(ops);
	e->bytes_sent = payload_sent(tcp);
	e->bytes_received = payload_received(tcp);
	e->retransmits = tcp->total_retrans;
	e->rtt = tcp->srtt_us >> 3;
	e->error = ((struct sock *)tcp)->sk_err;
	submit_event(e);
	return 0;
}

/* BPF_SOCK_OPS_STATE_CB. What was denied has been reported: it has no path. */
static __always_inline void flow_ends(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	__u32 from = ops->args[0];

	if (ops->args[1] != BPF_TCP_CLOSE || from == BPF_TCP_LISTEN || from == BPF_TCP_SYN_RECV)
		return;
	if (from != BPF_TCP_SYN_SENT)
		report_flow(ops, tag, FLOW_EVENT_ENDED, 0);
	else if (tag->path != PATH_NONE)
		report_flow(ops, tag, FLOW_EVENT_FAILED, 0);
}

/* Reports that the connect() of ctx to an address and ctx's port is denied. Always gives 0. */
__noinline int report_denied(struct bpf_sock_addr *ctx, const struct sock_tag *tag, const struct address *to,
                             __u32 reason)
{
	struct flow_event *e;

	if (!to || !tag)
		return 0;
	e = begin_event(tag, FLOW_EVENT_DENIED);
	if (!e)
		return 0;
	__builtin_memset(&e->local, 0, sizeof(e->local));
	e->remote = *to;
	e->local_port = 0;
	e->remote_port = ctx->user_port;
	e->path = PATH_NONE;
	e->reason = reason;
	e->accepted = 0;
	e->cookie = bpf_get_socket_cookie(ctx);
	e->bytes_sent = e->bytes_received = 0;
	e->retransmits = e->rtt = e->error = 0;
	submit_event(e);
	return 0;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Events of connections: opened, ended, failed, denied. Each costs a record in a ring and nothing
 * else, and one that ends soon has one for its opening and its end; bytes cost nothing. The
 * functions are global ones, which the verifier looks at once for each program and not for each
 * call. */
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
#include "sock/untold.h"

static __always_inline void set_protocol(struct flow_event *e, const struct sock_tag *tag)
{
	e->protocol = tag->flags & TAG_RDMA ? FLOW_PROTOCOL_RDMA : IPPROTO_TCP_;
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

/* What a connection has but for its cookie and what it carried. */
static __always_inline void set_connection(struct flow_event *e, const struct sock_tag *tag,
                                           struct tcp_sock *tcp)
{
	set_protocol(e, tag);
	set_ends(e, tag, (struct sock_common *)tcp);
	e->path = tag->path;
	e->accepted = !!(tag->flags & TAG_ACCEPTED);
	e->rtt = tcp->srtt_us >> 3;
}

/* Reports what happens to the connection of ops. reason 0: the tag's own. opened: of
 * FLOW_EVENT_WHOLE. */
__noinline int report_flow(struct bpf_sock_ops *ops, const struct sock_tag *tag, __u32 kind, __u32 reason,
                           __u64 opened)
{
	struct bpf_sock *sk = ops->sk;
	struct flow_event *e;
	struct tcp_sock *tcp;

	if (!sk || !tag || tag->flags & TAG_PROBE)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	e = reserve_event(tag->endpoint_id, kind);
	if (!e) {
		if (opened) /* two are lost */
			count(REASON_LOST_FLOW_EVENT);
		return 0;
	}
	set_connection(e, tag, tcp);
	e->reason = reason ? reason : tag->reason;
	e->cookie = bpf_get_socket_cookie(ops);
	e->bytes_sent = payload_sent(tcp);
	e->bytes_received = payload_received(tcp);
	e->retransmits = tcp->total_retrans;
	e->error = ((struct sock *)tcp)->sk_err;
	e->opened = opened;
	submit_event(e);
	return 0;
}

/* Whether set_ends gives IPv4 addresses. */
static __always_inline bool is_ipv4(const struct sock_tag *tag, const struct sock_common *sk)
{
	if (tag->flags & TAG_REMOTE)
		return is_mapped(&tag->remote);
	return sk->skc_family != AF_INET6 || sk->skc_rcv_saddr != LOOPBACK4_IPV6;
}

/* set_ends of IPv4. */
static __always_inline void set_ends4(struct whole_flow *e, const struct sock_tag *tag,
                                      const struct sock_common *sk)
{
	e->local = sk->skc_rcv_saddr;
	e->remote = sk->skc_daddr;
	e->local_port = bpf_htons(sk->skc_num);
	e->remote_port = sk->skc_dport;
	if (tag->flags & TAG_LOCAL) {
		e->local = tag->local.word[3];
		if (tag->local_port)
			e->local_port = tag->local_port;
	}
	if (tag->flags & TAG_REMOTE) {
		e->remote = tag->remote.word[3];
		if (tag->remote_port)
			e->remote_port = tag->remote_port;
	}
}

/* Reports what a whole_flow has room for; false: it has not. What has no place in the ring is
 * report_flow's, which counts it. */
static __always_inline bool report_small(struct bpf_sock_ops *ops, const struct sock_tag *tag,
                                         struct tcp_sock *tcp, __u64 opened)
{
	__u64 sent = payload_sent(tcp), received = payload_received(tcp);
	__u64 now = bpf_ktime_get_ns(), lasted = (now - opened) >> UNTOLD_SHIFT;
	struct sock_common *sk = (struct sock_common *)tcp;
	struct whole_flow *e;
	__u64 waiting;

	if (!is_ipv4(tag, sk) || (sent | received | lasted) >> 32 || tcp->total_retrans >> 16)
		return false;
	waiting = bpf_ringbuf_query(&flow_events, BPF_RB_AVAIL_DATA);
	if (waiting >= FLOW_EVENTS_SCARCE && !has_scarce(tag->endpoint_id))
		return false;
	e = bpf_ringbuf_reserve(&flow_events, sizeof(*e), 0);
	if (!e)
		return false;
	e->time = now;
	e->cookie = bpf_get_socket_cookie(ops);
	set_ends4(e, tag, sk);
	e->endpoint_id = tag->endpoint_id;
	e->bytes_sent = sent;
	e->bytes_received = received;
	e->lasted = lasted;
	e->rtt = tcp->srtt_us >> 3;
	e->retransmits = tcp->total_retrans;
	e->error = ((struct sock *)tcp)->sk_err;
	e->path = tag->path;
	e->reason = tag->reason;
	e->flags =
	        (tag->flags & TAG_ACCEPTED ? WHOLE_ACCEPTED : 0) | (tag->flags & TAG_RDMA ? WHOLE_RDMA : 0);
	e->pad = 0;
	bpf_ringbuf_submit(e, waiting >= FLOW_EVENTS_WAKE ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
	return true;
}

/* Reports the end of the connection of ops, and its opening. */
__noinline int report_whole(struct bpf_sock_ops *ops, const struct sock_tag *tag, __u64 opened)
{
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tcp;

	if (!sk || !tag)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp && !report_small(ops, tag, tcp, opened))
		report_flow(ops, tag, FLOW_EVENT_WHOLE, 0, opened);
	return 0;
}

/* A connection is established. */
static __always_inline void flow_opens(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	if (!(tag->flags & TAG_PROBE) && !remember_opening(tag))
		report_flow(ops, tag, FLOW_EVENT_OPENED, 0, 0);
}

/* BPF_SOCK_OPS_STATE_CB. What was denied has been reported: it has no path. What leaves SYN_RECV
 * was established if the SYN had data (TCP Fast Open), and else nothing. */
static __always_inline void flow_ends(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	__u32 from = ops->args[0];
	__u64 opened = 0;

	if (ops->args[1] != BPF_TCP_CLOSE || from == BPF_TCP_LISTEN)
		return;
	if (tag->flags & TAG_UNTOLD) {
		tag->flags &= ~TAG_UNTOLD;
		opened = take_opening(tag);
	}
	if (opened)
		report_whole(ops, tag, opened);
	else if (from == BPF_TCP_SYN_RECV)
		return;
	else if (from != BPF_TCP_SYN_SENT)
		report_flow(ops, tag, FLOW_EVENT_ENDED, 0, 0);
	else if (tag->path != PATH_NONE)
		report_flow(ops, tag, FLOW_EVENT_FAILED, 0, 0);
}

/* Reports that the connect() of ctx to an address and ctx's port is denied. Always gives 0. */
__noinline int report_denied(struct bpf_sock_addr *ctx, const struct sock_tag *tag, const struct address *to,
                             __u32 reason)
{
	struct flow_event *e;

	if (!to || !tag)
		return 0;
	e = reserve_event(tag->endpoint_id, FLOW_EVENT_DENIED);
	if (!e)
		return 0;
	set_protocol(e, tag);
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
	e->opened = 0;
	submit_event(e);
	return 0;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the agent runs when a pass over the TCP sockets waits for the lock of one: iterators over
 * the tags, which wait for no lock. What they read may be of a socket in the midst of a call, and
 * they hold no reference to it, so nothing is written before the tag is known to be on it still
 * (decision 0075). */

#include "include/abi/record.h"
#include "include/count.h"
#include "include/kernel_types.h"
#include "include/tag.h"
#include "iter/pass.h"
#include "include/socket.h"
#include "policy/filter.h"
#include "sock/flow_events.h"

/* Whether a pass over the TCP sockets would see a step's socket. One in SYN_RECV has the
 * underlay's addresses until established_passive names it, and decides. */
static __always_inline bool is_seen(const struct sock *sk)
{
	int state = ((struct sock_common *)sk)->skc_state;

	return state != BPF_TCP_CLOSE && state != BPF_TCP_SYN_RECV;
}

/* The tag of a step's socket, if it is the one of the step. */
static __always_inline struct sock_tag *step_tag(struct sock *sk, const void *value)
{
	struct sock_tag *tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);

	return tag && (void *)tag == value ? tag : NULL;
}

static __always_inline void write_socket(struct bpf_iter__bpf_sk_storage_map *ctx, struct sock *sk,
                                         struct sock_tag *tag, __u32 reason)
{
	struct sock_common *common = (struct sock_common *)sk;
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);
	struct socket_record r = {};
	int state = common->skc_state;

	if (!tcp)
		return;
	r.cookie = bpf_get_socket_cookie(tcp);
	addresses_of(common, &r.local, &r.remote);
	r.local_port = bpf_htons(common->skc_num);
	r.remote_port = common->skc_dport;
	r.endpoint_id = tag->endpoint_id;
	r.ifindex = common->skc_bound_dev_if;
	r.locked = sk->sk_lock.owned != 0;
	barrier();
	if (common->skc_state != state || !step_tag(sk, tag))
		return;
	if (reason && !r.locked) {
		count(reason);
		tag->reason = reason; /* its end is an event (sock/flow_events.h) */
	}
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
}

/* list, without locks. */
SEC("iter/bpf_sk_storage_map")
int list_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct sock *sk = ctx->sk;
	void *value = ctx->value;
	struct tcp_sock *tcp;
	struct sock_tag *tag;

	if (!sk || !value || !is_seen(sk))
		return 0;
	tag = step_tag(sk, value);
	if (!tag || tag->flags & TAG_PROBE)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp)
		list_socket(ctx->meta, (struct sock_common *)sk, tag, tcp);
	return 0;
}

/* Lists sockets, to be ended for a reason unless it is 0. */
static __always_inline int list_where(struct bpf_iter__bpf_sk_storage_map *ctx, condition *is_to_list,
                                      __u32 reason)
{
	struct sock *sk = ctx->sk;
	void *value = ctx->value;
	struct sock_tag *tag;

	if (!sk || !value || !is_seen(sk))
		return 0;
	tag = step_tag(sk, value);
	if (tag && is_to_list((struct sock_common *)sk, tag))
		write_socket(ctx, sk, tag, reason);
	return 0;
}

static __always_inline bool is_locked(struct sock_common *sk, const struct sock_tag *tag)
{
	return ((struct sock *)sk)->sk_lock.owned;
}

/* Sockets whose lock a system call has at this moment. */
SEC("iter/bpf_sk_storage_map")
int locked_sockets(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, is_locked, 0);
}

/* What the passes of cut.bpf.c would end, each by its condition. */
SEC("iter/bpf_sk_storage_map")
int forbidden_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, is_forbidden, REASON_CUT_POLICY);
}

SEC("iter/bpf_sk_storage_map")
int firewall_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, firewall_forbids, REASON_CUT_FIREWALL);
}

SEC("iter/bpf_sk_storage_map")
int clear_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, in_the_clear, REASON_CUT_CLEAR);
}

SEC("iter/bpf_sk_storage_map")
int over_quota_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, is_over_quota, REASON_CUT_PORT_QUOTA);
}

SEC("iter/bpf_sk_storage_map")
int leaving_unlocked(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	return list_where(ctx, is_leaving, REASON_CUT_MIGRATED);
}

/* Tells of a connection that opened, unless its end does. Without room in the ring it waits. */
static __always_inline void tell_opening(struct sock_tag *tag, struct tcp_sock *tcp)
{
	struct flow_event *e = has_room() ? new_event(tag->endpoint_id, FLOW_EVENT_OPENED) : NULL;
	__u64 opened;

	if (!e) {
		untold = 1;
		return;
	}
	set_connection(e, tag, tcp);
	e->reason = REASON_NONE;
	e->cookie = bpf_get_socket_cookie(tcp);
	e->bytes_sent = e->bytes_received = 0;
	e->retransmits = e->error = 0;
	/* From here on the end is an event of its own, which comes behind this one. */
	opened = take_opening(tag);
	if (!opened) {
		bpf_ringbuf_discard(e, BPF_RB_NO_WAKEUP);
		return;
	}
	e->time = opened;
	e->opened = 0;
	submit_event(e);
}

/* Tells of connections that live and whose opening was not told (sock/untold.h). Writes nothing, so
 * that it is one pass, and none is left out. */
SEC("iter/bpf_sk_storage_map")
int tell_openings(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	const struct sock_tag *seen = ctx->value;
	struct sock *sk = ctx->sk;
	struct tcp_sock *tcp;
	struct sock_tag *tag;

	if (!sk || !seen || !(seen->flags & TAG_UNTOLD) || !seen->claim_uid)
		return 0;
	if (!is_due(seen)) {
		untold = 1;
		return 0;
	}
	tag = step_tag(sk, seen);
	if (!tag)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp)
		tell_opening(tag, tcp);
	return 0;
}

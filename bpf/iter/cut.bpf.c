/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Passes that end sockets, such as those that policy forbids after each change of it. They write
 * one byte for each of them: 1 if it was ended, 0 if the kernel cannot (before Linux 6.5); those of
 * a container's own namespace write a socket_record, by which the agent ends it then. */

#include "include/abi/path.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/route.h"
#include "iter/pass.h"
#include "include/socket.h"
#include "policy/decide.h"
#include "policy/filter.h"
#include "policy/flow_set.h"

extern int bpf_sock_destroy(struct sock_common *sk) __ksym __weak; /* Linux 6.5 */

/* Asks the kernel to end sk: the program sees ECONNABORTED, the other end a RST. */
static __always_inline bool destroy(struct sock_common *sk)
{
	if (!bpf_sock_destroy)
		return false;
	return bpf_sock_destroy(sk) == 0;
}

/* Ends sockets for a reason: the condition is inlined, each pass has its own. */
static __always_inline int end_where(struct bpf_iter__tcp *ctx, condition *is_to_end, __u32 reason)
{
	struct sock_common *sk = ctx->sk_common;
	struct sock_tag *tag;
	__u8 ended;

	if (!sk || sk->skc_state == BPF_TCP_CLOSE)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0); /* what is not a full socket has none */
	if (!tag || !is_to_end(sk, tag))
		return 0;
	tag->reason = reason; /* its end is an event (sock/flow_events.h) */
	ended = destroy(sk);
	if (ended)
		count(reason);
	bpf_seq_write(ctx->meta->seq, &ended, sizeof(ended));
	return 0;
}

/* What policy forbids. */
SEC("iter/tcp")
int cut(struct bpf_iter__tcp *ctx)
{
	return end_where(ctx, is_forbidden, REASON_CUT_POLICY);
}

/* What the nodes' firewalls forbid now, of what went past them: run by the agent when it has found
 * such (tc/firewall.h). */
SEC("iter/tcp")
int cut_firewall(struct bpf_iter__tcp *ctx)
{
	return end_where(ctx, firewall_forbids, REASON_CUT_FIREWALL);
}

/* Direct connections that stood before this node began to encrypt: run by the agent while it
 * does. */
SEC("iter/tcp")
int cut_clear(struct bpf_iter__tcp *ctx)
{
	return end_where(ctx, in_the_clear, REASON_CUT_CLEAR);
}

/* What is left of the endpoint that leaves: sockets whose program has ended and that have yet to
 * send, or that another container's program has. Their peers see a RST while this node still speaks
 * for the address. Run again when the endpoint is forgotten, for those that connected meanwhile:
 * the tag is enough, since no id is given out again that a socket carries, and what connects from
 * then on is_forgotten (sock/sockops.bpf.c). */
SEC("iter/tcp")
int cut_leaving(struct bpf_iter__tcp *ctx)
{
	return end_where(ctx, is_leaving, REASON_CUT_MIGRATED);
}

/* Listeners that have a port which they must not have: run by the agent when one is reported. The
 * iterator has the socket's lock, so it finds none in the midst of listen(). */
SEC("iter/tcp")
int end_over_quota(struct bpf_iter__tcp *ctx)
{
	return end_where(ctx, is_over_quota, REASON_CUT_PORT_QUOTA);
}

/* Shortens the wait of direct connects to nodes whose path is blocked, one record each: they get
 * ETIMEDOUT within seconds, not minutes. Live connections are left alone: what blocks may pass. */
SEC("iter/tcp")
int give_up(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct sock_tag *tag;
	struct route *to;
	int once = 1;
	__u8 ended;

	if (!sk || sk->skc_state != BPF_TCP_SYN_SENT)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	if (!tag || tag->path != PATH_DIRECT || tag->flags & TAG_PROBE)
		return 0;
	to = route_to(tag->remote.word[3]);
	if (!to || !(to->flags & ROUTE_BLOCKED))
		return 0;
	ended = bpf_setsockopt(sk, SOL_TCP_, 7 /* TCP_SYNCNT */, &once, sizeof(once)) == 0;
	if (ended)
		count(REASON_CUT_PATH_BLOCKED);
	bpf_seq_write(ctx->meta->seq, &ended, sizeof(ended));
	return 0;
}

/* Ends a socket of a container's own namespace. */
static __always_inline void end_plain(struct bpf_iter__tcp *ctx, struct sock_common *sk, __u32 reason)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);
	struct socket_record r = {};

	if (!tcp)
		return;
	addresses_of(sk, &r.local, &r.remote);
	r.local_port = bpf_htons(sk->skc_num);
	r.remote_port = sk->skc_dport;
	r.cookie = bpf_get_socket_cookie(tcp);
	r.ifindex = sk->skc_bound_dev_if;
	r.ended = destroy(sk);
	count(reason);
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
}

/* opener_of for an iterator, which is no packet: nobody is heard of. */
static __always_inline __u32 opener_seen(const struct flow_id *f)
{
	return recall_flow(&openers_by_owner, f, ANY_TIME, false, false);
}

/* Ends what policy forbids of the connections of processes that are not intercepted: run in each
 * container's namespace. Only those whose SYN was seen: of others it is not known who opened them,
 * and they are left to their packets. */
SEC("iter/tcp")
int cut_plain(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct flow_id flow = {}, other = {};
	__u32 verdict, opener;

	if (!sk || !has_policy())
		return 0;
	if (sk->skc_state == BPF_TCP_LISTEN || sk->skc_state == BPF_TCP_CLOSE ||
	    sk->skc_state == BPF_TCP_TIME_WAIT || sk->skc_state == BPF_TCP_NEW_SYN_RECV)
		return 0;
	addresses_of(sk, &flow.from, &flow.to);
	flow.sport = bpf_htons(sk->skc_num);
	flow.dport = sk->skc_dport;
	flow.protocol = IPPROTO_TCP_;
	reverse_flow(&flow, &other);
	opener = opener_seen(&flow);
	if (opener) {
		verdict = decide_opened(&flow, opener);
	} else {
		opener = opener_seen(&other);
		verdict = opener ? decide_opened(&other, opener) : VERDICT_ALLOW;
	}
	if (verdict != VERDICT_ALLOW)
		end_plain(ctx, sk, REASON_CUT_POLICY);
	return 0;
}

/* cut_leaving of processes that are not intercepted: run in the container's namespace. */
SEC("iter/tcp")
int cut_leaving_plain(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;

	if (!sk || sk->skc_state == BPF_TCP_CLOSE || sk->skc_state == BPF_TCP_TIME_WAIT ||
	    sk->skc_state == BPF_TCP_NEW_SYN_RECV)
		return 0;
	end_plain(ctx, sk, REASON_CUT_MIGRATED);
	return 0;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Counts the sockets of each endpoint: those its programs hold, and connections that wait for accept(). The agent asks for a
 * socket to be counted before it gives it away (SOL_HEDDLE below), so one that nobody got is counted off again when
 * the agent closes it, or ends. */

/* What a socket option's level must be to be the agent's request to count a socket. */
#define SOL_HEDDLE          0x4864
#define HEDDLE_COUNT_SOCKET 1
#define EDQUOT_             122

/* Counts a socket. False: its endpoint has more than it may. It is counted all the same. */
static __always_inline bool count_socket(struct sock_tag *tag)
{
	__u64 *open = bpf_map_lookup_elem(&sockets_by_endpoint, &tag->endpoint_id);

	if (!open)
		return true; /* the endpoint is gone; other programs refuse what is new */
	tag->flags |= TAG_COUNTED;
	return __sync_fetch_and_add(open, 1) < config_endpoint_sockets || !protects(PROTECT_SOCKET_QUOTA);
}

static __always_inline void uncount_socket(struct sock_tag *tag)
{
	__u64 *open;

	if (!(tag->flags & TAG_COUNTED))
		return;
	tag->flags &= ~TAG_COUNTED;
	open = bpf_map_lookup_elem(&sockets_by_endpoint, &tag->endpoint_id);
	if (open)
		__sync_fetch_and_add(open, -1);
}

/* The agent's request. A program that makes it of a socket it has is told that there is no such option. */
static __always_inline int ask_to_count(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	if (tag->flags & TAG_COUNTED || ctx->optname != HEDDLE_COUNT_SOCKET) {
		bpf_set_retval(-ENOPROTOOPT_);
		return 0;
	}
	if (!count_socket(tag)) {
		uncount_socket(tag);
		count(REASON_REFUSE_SOCKET_QUOTA);
		bpf_set_retval(-EDQUOT_);
		return 0;
	}
	ctx->optlen = -1;
	return 1;
}

/* A connection that nobody accepted ends: no program will close it. */
static __always_inline void uncount_unaccepted(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct sock_tag *tag;
	struct tcp_sock *tcp;

	if (ops->args[1] != BPF_TCP_CLOSE || !sk)
		return;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tag && tcp && !((struct sock *)tcp)->sk_socket)
		uncount_socket(tag);
}

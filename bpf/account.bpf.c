/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Accounts of endpoints: connections opened, accepted, failed and closed, and what closed ones carried. Called
 * by sockops when a connection changes its state and by nothing else, so that bytes cost nothing. What live
 * connections have carried so far is in their sockets (list.bpf.c). */

/* Payload that the peer acknowledged. bytes_acked counts SYN and FIN as well: no more than was sent can have
 * been acknowledged. */
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

/* The account of the socket's endpoint; NULL for sockets of no endpoint and of one that is gone. */
static __always_inline struct account *account_of(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct sock_tag *tag;

	if (!sk)
		return NULL;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return tag ? bpf_map_lookup_elem(&account_by_endpoint, &tag->endpoint_id) : NULL;
}

/* Asks for the state changes of this connection. */
static __always_inline void account_follow(struct bpf_sock_ops *ops)
{
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* A connect sends its SYN. */
static __always_inline void account_connecting(struct bpf_sock_ops *ops)
{
	if (account_of(ops))
		account_follow(ops);
}

static __always_inline void account_opened(struct bpf_sock_ops *ops)
{
	struct account *a = account_of(ops);

	if (a)
		__sync_fetch_and_add(&a->opened, 1);
}

static __always_inline void account_accepted(struct bpf_sock_ops *ops)
{
	struct account *a = account_of(ops);

	if (!a)
		return;
	__sync_fetch_and_add(&a->accepted, 1);
	account_follow(ops);
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

/* A connect failed: if it was direct, the path may be why. */
static __always_inline void suspect_direct(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct sock_tag *tag;

	if (!sk)
		return;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	if (tag && tag->path == PATH_DIRECT)
		suspect(ops->remote_ip4);
}

/* BPF_SOCK_OPS_STATE_CB: args[0] is the state that the socket leaves, args[1] that it enters. One that goes to
 * TIME_WAIT enters CLOSE: what waits is not the socket. */
static __always_inline void account_state(struct bpf_sock_ops *ops)
{
	__u32 from = ops->args[0];
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tcp;
	struct account *a;
	int err;

	if (ops->args[1] != BPF_TCP_CLOSE || from == BPF_TCP_LISTEN || from == BPF_TCP_SYN_RECV || !sk)
		return;
	a = account_of(ops);
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!a || !tcp)
		return;
	/* Set before the state: why the kernel ends the connection. */
	err = ((struct sock *)tcp)->sk_err;
	if (from == BPF_TCP_SYN_SENT) {
		account_failed(a, err);
		if (err)
			suspect_direct(ops);
	} else {
		account_closed(a, tcp, err);
	}
}

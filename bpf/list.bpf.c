/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Lists the node's tagged TCP sockets: one connection_record each, for `heddle connections`. */

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

/* Bytes not read and not acknowledged yet; of a listener, connections that wait for accept(), and how many may. */
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

SEC("iter/tcp")
int list(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct connection_record r = {};
	struct tcp_sock *tcp;
	struct sock_tag *tag;

	if (!sk)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	if (!tag || tag->flags & TAG_PROBE)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	r.tag = *tag;
	addresses_of(sk, &r.node_local, &r.node_remote);
	r.node_local_port = bpf_htons(sk->skc_num);
	r.node_remote_port = sk->skc_dport;
	r.state = sk->skc_state;
	r.family = sk->skc_family;
	r.bytes_sent = payload_sent(tcp);
	r.bytes_received = payload_received(tcp);
	r.retransmits = tcp->total_retrans;
	queues_of(tcp, r.state, &r.receive_queue, &r.send_queue);
	r.cookie = bpf_get_socket_cookie(tcp);
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
	return 0;
}

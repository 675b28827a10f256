/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Lists the node's tagged TCP sockets: one connection_record each, for `heddle connections`. */

#include "include/abi/record.h"
#include "include/kernel_types.h"
#include "include/payload.h"
#include "include/tag.h"
#include "iter/socket.h"

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

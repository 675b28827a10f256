/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Lists the node's tagged TCP sockets: one connection_record each, for `heddle connections`. */

#include "include/abi/record.h"
#include "include/kernel_types.h"
#include "include/tag.h"
#include "iter/pass.h"

SEC("iter/tcp")
int list(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct tcp_sock *tcp;
	struct sock_tag *tag;

	if (!sk)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	if (!tag || tag->flags & TAG_PROBE)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp)
		list_socket(ctx->meta, sk, tag, tcp);
	return 0;
}

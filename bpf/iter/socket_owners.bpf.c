/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Lists who holds tagged sockets and is neither in their namespace, the node's, nor under a seccomp
 * filter with a listener: what such a process asks of a socket by ioctl() is answered by the node.
 * One record for each of its descriptors. */

#include "include/abi/record.h"
#include "include/kernel_types.h"
#include "include/tag.h"

#define MAX_FILTERS 64

static __always_inline bool has_listener_above(struct task_struct *task)
{
	struct seccomp_filter *filter = task->seccomp.filter;
	int i;

	for (i = 0; i < MAX_FILTERS && filter; i++) {
		if (filter->notif)
			return true;
		filter = filter->prev;
	}
	return false;
}

SEC("iter/task_file")
int socket_owners(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct socket_owner_record r = {};
	struct nsproxy *proxy;
	struct socket *socket;
	struct sock_tag *tag;
	struct sock *sk;

	if (!task || !file)
		return 0;
	socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	sk = socket->sk;
	if (!sk)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	proxy = task->nsproxy;
	if (!tag || tag->flags & TAG_PROBE || !proxy || has_listener_above(task) ||
	    proxy->net_ns == ((struct sock_common *)sk)->skc_net.net)
		return 0;
	r.endpoint_id = tag->endpoint_id;
	r.pid = task->tgid;
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
	return 0;
}

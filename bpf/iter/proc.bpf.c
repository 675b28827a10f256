/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* /proc/net/tcp and /proc/net/tcp6 of intercepted containers: two iterators over the node's tagged
 * sockets. Their links are files, whose content is made while a program reads them: the sockets of
 * the endpoint in whose network namespace it is, as it sees them. */

#include "include/address.h"
#include "include/credential.h"
#include "include/endpoint.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/socket.h"

/* Lines end where the kernel ends those of sockets in TIME_WAIT: what follows of others, programs
 * do without. Neither the number of a line nor a timer is told: the one would count the sockets of
 * others. */
static const char proc_head4[] = "  sl  local_address rem_address   st tx_queue rx_queue tr "
                                 "tm->when retrnsmt   uid  timeout inode\n";
static const char proc_head6[] =
        "  sl  local_address                         remote_address                        st "
        "tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
static const char proc_names4[] = "   0: %08X:%04X %08X:%04X";
static const char proc_names6[] = "   0: %08X%08X%08X%08X:%04X %08X%08X%08X%08X:%04X";
static const char proc_rest[] = " %02X %08X:%08X 00:00000000 %08X %5u        0 %lu 1 0000000000000000\n";

/* The addresses of a socket as sock/names.bpf.c shows them, and its ports in host byte order. */
struct proc_names {
	struct address local;
	struct address remote;
	__u16 local_port;
	__u16 remote_port;
};

static __always_inline void local_name(struct sock_common *sk, const struct sock_tag *tag,
                                       struct proc_names *n)
{
	n->local_port = tag->local_port ? bpf_ntohs(tag->local_port) : sk->skc_num;
	if (tag->flags & TAG_WILD && !sk->skc_dport) {
		set_mapped(&n->local, 0);
		if (tag->flags & TAG_ANY6)
			n->local.word[2] = 0;
	} else if (tag->flags & TAG_LOCAL) {
		n->local = tag->local;
	}
}

static __always_inline void remote_name(struct sock_common *sk, const struct sock_tag *tag,
                                        struct proc_names *n)
{
	struct service_key *asked = NULL;
	__be16 port = sk->skc_dport;

	if (sk->skc_state == BPF_TCP_LISTEN) {
		if (sk->skc_family == AF_INET6)
			n->remote.word[2] = 0;
		return;
	}
	if (tag->flags & TAG_SERVICE)
		asked = bpf_sk_storage_get(&service_by_sock, sk, 0, 0);
	if (asked) {
		n->remote = asked->addr;
		port = asked->port;
	} else if (tag->flags & TAG_REMOTE) {
		n->remote = tag->remote;
		if (tag->remote_port)
			port = tag->remote_port;
	}
	n->remote_port = bpf_ntohs(port);
}

/* The inode by which /proc/PID/fd names a socket; 0: no program has it. */
static __always_inline __u64 inode_of(const struct sock *sk)
{
	struct socket_alloc *alloc = sk->sk_socket;

	return alloc ? BPF_CORE_READ(alloc, vfs_inode.i_ino) : 0;
}

/* Whether a socket with this tag is listed for the calling program. */
static __always_inline bool is_readers(const struct sock_tag *tag)
{
	return !protects(PROTECT_PROC_NET) || net_of(tagged_endpoint(tag));
}

static __always_inline void print_names(struct seq_file *seq, const struct proc_names *n, bool v6)
{
	const struct address *l = &n->local, *r = &n->remote;
	__u64 names4[] = {l->word[3], n->local_port, r->word[3], n->remote_port};
	__u64 names6[] = {l->word[0], l->word[1], l->word[2], l->word[3], n->local_port,
	                  r->word[0], r->word[1], r->word[2], r->word[3], n->remote_port};

	if (v6)
		bpf_seq_printf(seq, proc_names6, sizeof(proc_names6), names6, sizeof(names6));
	else
		bpf_seq_printf(seq, proc_names4, sizeof(proc_names4), names4, sizeof(names4));
}

/* One line, if the socket is the reader's. The iterator holds no reference to it: what is read of
 * one that was freed meanwhile would be another's by now, so nothing is printed before the tag is
 * known to be on it still. */
static __always_inline int proc_line(struct bpf_iter__bpf_sk_storage_map *ctx, int family)
{
	struct sock *sk = ctx->sk;
	struct sock_tag *tag = ctx->value;
	struct sock_common *common;
	struct proc_names names = {};
	struct tcp_sock *tcp;
	__u32 receive, send;
	__u64 rest[6];
	int state;

	if (!sk || !tag || !is_readers(tag)) /* of most, no more than the tag is looked at */
		return 0;
	common = (struct sock_common *)sk;
	state = common->skc_state;
	/* One in SYN_RECV is about to be accepted, and has the underlay's addresses until
	 * established_passive names it. */
	if (common->skc_family != family || state == BPF_TCP_CLOSE || state == BPF_TCP_SYN_RECV)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	addresses_of(common, &names.local, &names.remote);
	local_name(common, tag, &names);
	remote_name(common, tag, &names);
	queues_of(tcp, state, &receive, &send);
	rest[0] = state;
	rest[1] = state == BPF_TCP_LISTEN ? 0 : send;
	rest[2] = receive;
	rest[3] = ((struct inet_connection_sock *)tcp)->icsk_retransmits;
	rest[4] = uid_here(sk->sk_uid.val);
	rest[5] = inode_of(sk);
	barrier();
	/* A child begins as a copy of its listener, state and all, and gets the underlay's
	 * addresses next. */
	if (common->skc_state != state)
		return 0;
	if ((void *)bpf_sk_storage_get(&tag_by_sock, sk, 0, 0) != (void *)tag)
		return 0;
	print_names(ctx->meta->seq, &names, family == AF_INET6);
	bpf_seq_printf(ctx->meta->seq, proc_rest, sizeof(proc_rest), rest, sizeof(rest));
	return 0;
}

SEC("iter/bpf_sk_storage_map")
int proc_tcp(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	if (ctx->meta->seq_num == 0)
		bpf_seq_printf(ctx->meta->seq, proc_head4, sizeof(proc_head4), NULL, 0);
	return proc_line(ctx, AF_INET);
}

SEC("iter/bpf_sk_storage_map")
int proc_tcp6(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	if (ctx->meta->seq_num == 0)
		bpf_seq_printf(ctx->meta->seq, proc_head6, sizeof(proc_head6), NULL, 0);
	return proc_line(ctx, AF_INET6);
}

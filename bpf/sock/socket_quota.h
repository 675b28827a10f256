/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Counts the sockets of each endpoint: those its programs hold, and connections that wait for
 * accept(). The agent asks for a socket to be counted before it gives it away (SOL_HEDDLE below),
 * so one that nobody got is counted off again when the agent closes it, or ends. */
#ifndef HEDDLE_SOCK_SOCKET_QUOTA_H
#define HEDDLE_SOCK_SOCKET_QUOTA_H

#include "include/config.h"
#include "include/count.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/stack_settings.h"

/* What a socket option's level must be to be the agent's request to count a socket. */
#define SOL_HEDDLE          0x4864
#define HEDDLE_COUNT_SOCKET 1
#define ESRCH_              3
#define EXDEV_              18
#define ESTALE_             116
#define EDQUOT_             122

extern struct task_struct *bpf_task_from_pid(__s32 pid) __ksym __weak; /* Linux 6.2 */
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

/* The counter of the socket's endpoint; NULL if that is gone, also if another has its id by now:
 * who lives on after the endpoint must not change what a later one is charged. Not tagged_endpoint,
 * so that it holds without PROTECT_INCARNATION. */
static __always_inline __u64 *counter_in(const struct endpoint *ep, const struct sock_tag *tag)
{
	if (!ep || ep->incarnation != tag->incarnation)
		return NULL;
	return bpf_map_lookup_elem(&sockets_by_endpoint, &tag->endpoint_id);
}

static __always_inline __u64 *counter_of(const struct sock_tag *tag)
{
	return counter_in(bpf_map_lookup_elem(&endpoint_by_id, &tag->endpoint_id), tag);
}

/* Counts a socket of endpoint ep (NULL: gone). False: that has more than it may. It is counted all
 * the same. */
static __always_inline bool count_socket(const struct endpoint *ep, struct sock_tag *tag)
{
	__u64 *open = counter_in(ep, tag);

	if (!open)
		return true; /* the endpoint is gone; other programs refuse what is new */
	tag->flags |= TAG_COUNTED;
	return (__s64)__sync_fetch_and_add(open, 1) < (__s64)config_endpoint_sockets ||
	       !protects(PROTECT_SOCKET_QUOTA);
}

/* One less. Below 0, for a moment only, is as 0 (count_socket). */
static __always_inline void give_back(__u64 *open)
{
	if ((__s64)__sync_fetch_and_add(open, -1) <= 0)
		__sync_fetch_and_add(open, 1);
}

static __always_inline void uncount_socket(struct sock_tag *tag)
{
	__u64 *open;

	if (!(__sync_fetch_and_and(&tag->flags, ~TAG_COUNTED) & TAG_COUNTED))
		return;
	open = counter_of(tag);
	if (open)
		give_back(open);
}

/* Counts a socket, unless its endpoint has as many as it may: then false. The flag is set only of
 * what stays counted, because other hooks, which change the flags at the same time, could bring
 * back one that was taken away. */
static __always_inline bool count_within(struct sock_tag *tag)
{
	__u64 *open = counter_of(tag);

	if (!open)
		return true;
	if ((__s64)__sync_fetch_and_add(open, 1) >= (__s64)config_endpoint_sockets &&
	    protects(PROTECT_SOCKET_QUOTA)) {
		give_back(open);
		return false;
	}
	if (__sync_fetch_and_or(&tag->flags, TAG_COUNTED) & TAG_COUNTED)
		give_back(open);
	return true;
}

/* Counts a socket that a program holds uncounted and puts to use: accept() hands out a connection
 * that ended before (uncount_unaccepted), and connect(AF_UNSPEC) makes a socket of it again. False:
 * its endpoint has as many as it may, and it is not counted. */
static __always_inline bool count_reused(struct sock_tag *tag)
{
	return tag->flags & TAG_COUNTED || !protects(PROTECT_SOCKET_QUOTA) || count_within(tag);
}

/* Whether the thread is as the agent demands; it waits for an answer, and cannot change meanwhile.
 * Asked here, together with the count, because it takes a tenth of what reading /proc does. Gives
 * an errno. */
static __noinline int misfit(const struct admission *asked)
{
	struct task_struct *task;
	int err = 0;

	if (!asked || !asked->thread || !config_agent)
		return 0;
	task = bpf_task_from_pid(asked->thread);
	if (!task)
		return ESRCH_;
	if (asked->netns && task->nsproxy->net_ns->ns.inum != asked->netns)
		err = EXDEV_;
	else if (asked->flags & ADMIT_OWNER &&
	         (task->cred->euid.val != asked->uid || task->cred->egid.val != asked->gid))
		err = ESTALE_;
	bpf_task_release(task);
	return err;
}

/* Whether another process than the agent asks: of a socket that is not counted (uncount_unaccepted)
 * a program could learn by it what processes there are on the node, and of whom. Without
 * config_agent nothing is looked at. */
static __always_inline bool asked_by_another(void)
{
	return config_agent && bpf_get_current_pid_tgid() >> 32 != config_agent &&
	       protects(PROTECT_AGENT_OPTION);
}

/* The agent's request. A program that makes it of a socket it has is told that there is no such
 * option. */
static __always_inline int ask_to_count(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	struct admission *asked = ctx->optval;
	int err;

	if (tag->flags & TAG_COUNTED || ctx->optname != HEDDLE_COUNT_SOCKET || asked_by_another() ||
	    ctx->optlen != sizeof(*asked) || (void *)(asked + 1) > ctx->optval_end) {
		bpf_set_retval(-ENOPROTOOPT_);
		return 0;
	}
	err = misfit(asked);
	if (err) {
		bpf_set_retval(-err);
		return 0;
	}
	if (stack_refuses(tag)) {
		count(REASON_REFUSE_STACK);
		bpf_set_retval(-EPROTONOSUPPORT_);
		return 0;
	}
	if (!count_within(tag)) {
		count(REASON_REFUSE_SOCKET_QUOTA);
		bpf_set_retval(-EDQUOT_);
		return 0;
	}
	ctx->optlen = -1;
	return 1;
}

/* A connection that nobody accepted ends: no program will close it; if one accepts it still, it is
 * counted when it is put to use (count_reused). A child that its listener takes along before it is
 * established was never counted: its TAG_COUNTED is the listener's, and it lacks TAG_ACCEPTED. */
static __always_inline void uncount_unaccepted(struct bpf_sock_ops *ops, struct sock_tag *tag,
                                               const struct tcp_sock *tcp)
{
	if (ops->args[1] == BPF_TCP_CLOSE && tag->flags & TAG_ACCEPTED && !((struct sock *)tcp)->sk_socket)
		uncount_socket(tag);
}

#endif

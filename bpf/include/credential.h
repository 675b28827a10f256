/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the calling program may do in its container. The kernel asks for capabilities in the user
 * namespace that owns the socket's network namespace; here that is the node's, so these hooks ask
 * for the container's instead, at the moment of the call, as the kernel would. */
#ifndef HEDDLE_CREDENTIAL_H
#define HEDDLE_CREDENTIAL_H

#include "include/abi/endpoint.h"
#include "include/kernel_types.h"

#define CAP_NET_BIND_SERVICE_ 10
#define CAP_NET_ADMIN_        12
#define CAP_NET_RAW_          13
#define USER_NAMESPACE_LEVELS 33 /* the kernel's own limit is 32 below the first */
#define UNPRIVILEGED_PORTS    1024
#define OVERFLOW_UID          65534 /* a user that a namespace has no number for */

/* The network namespace of ep (which may be NULL), if the calling program is in it. Elsewhere, with
 * a socket it was passed, or in a namespace it made, it is NULL. */
static __always_inline struct net *net_of(const struct endpoint *ep)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	struct nsproxy *proxy = task->nsproxy;
	struct net *net;

	if (!ep || !proxy)
		return NULL;
	net = proxy->net_ns;
	return net && net->ns.inum == ep->netns ? net : NULL;
}

/* Whether the calling program has capability cap over ep's network namespace: the kernel's
 * ns_capable(). A program outside of it must have cap over the whole node. Not static, so that the
 * verifier looks at it once. */
__noinline bool capable_in(const struct endpoint *ep, int cap)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	const struct cred *cred = task->cred;
	struct net *net = net_of(ep);
	struct user_namespace *ns, *own;
	bool has;
	int i;

	if (!cred)
		return false;
	/* all that matter here are in the lower half */
	has = *(__u32 *)&cred->cap_effective >> cap & 1;
	own = cred->user_ns;
	if (!own)
		return false;
	if (!net)
		return has && own->level == 0;
	ns = net->user_ns;
	for (i = 0; i < USER_NAMESPACE_LEVELS && ns; i++) {
		if (ns == own)
			return has;
		if (ns->level <= own->level)
			return false;
		if (ns->parent == own && ns->owner.val == cred->euid.val)
			return true;
		ns = ns->parent;
	}
	return false;
}

/* The number that the calling program's user namespace has for user uid. */
static __always_inline __u32 uid_here(__u32 uid)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	struct user_namespace *ns = BPF_CORE_READ(task, cred, user_ns);
	__u32 extents = BPF_CORE_READ(ns, uid_map.nr_extents);
	struct uid_gid_extent e;
	int i;

	for (i = 0; i < UID_EXTENTS; i++) {
		if (i >= extents || extents > UID_EXTENTS ||
		    bpf_core_read(&e, sizeof(e), &ns->uid_map.extent[i]))
			break;
		if (uid - e.lower_first < e.count)
			return e.first + (uid - e.lower_first);
	}
	return OVERFLOW_UID;
}

/* Whether the calling program may bind port in its container. */
static __always_inline bool may_bind_port(const struct endpoint *ep, __be16 port)
{
	struct net *net = net_of(ep);
	int first = net ? net->ipv4.sysctl_ip_prot_sock : UNPRIVILEGED_PORTS;

	return !port || bpf_ntohs(port) >= first || capable_in(ep, CAP_NET_BIND_SERVICE_);
}

#endif

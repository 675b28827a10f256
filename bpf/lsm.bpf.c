/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A second check, on LSM hooks, where the kernel has BPF LSM: what a program in another network
 * namespace may not do with a node's socket, it may not do even if the first check is gone (the
 * cgroup's hook of sock/setsockopt.bpf.c, the filter of internal/runtime). An object of its own,
 * since most kernels load no such programs and the others must load there.
 *
 * A security hook runs before the cgroup's and knows no values, so here is only what the first
 * check refuses whatever its value. */
#include "include/kernel_types.h"
#include "include/tag.h"

#include <bpf/bpf_tracing.h>

/* Whether a program that is in another network namespace than sk has it by interception. The agent,
 * and whatever else runs on the node, is in the socket's. */
static __always_inline bool is_lent(struct sock *sk)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct net *theirs, *its;

	if (!sk || !bpf_sk_storage_get(&tag_by_sock, sk, 0, 0))
		return false;
	theirs = BPF_CORE_READ(task, nsproxy, net_ns);
	its = BPF_CORE_READ((struct sock_common *)sk, skc_net.net);
	return theirs != its;
}

static __always_inline bool is_netfilter(int name)
{
	return name == 64 || name == 65 || name == 96 || name == 97;
}

static __always_inline bool is_refused(int level, int name)
{
	switch (level) {
	case SOL_SOCKET_:
		/* SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_EBPF */
		return name == 26 || name == 50 || name == 52;
	case SOL_IP_:
		/* IP_IPSEC_POLICY, IP_XFRM_POLICY */
		return name == 16 || name == 17 || is_netfilter(name);
	case SOL_IPV6_:
		/* IPV6_IPSEC_POLICY, IPV6_XFRM_POLICY */
		return name == 34 || name == 35 || is_netfilter(name);
	case SOL_TCP_:
		/* TCP_MD5SIG and _EXT, TCP_REPAIR, TCP_AO_REPAIR */
		return name == 14 || name == 32 || name == 19 || name == 42;
	}
	return false;
}

SEC("lsm/socket_setsockopt")
int BPF_PROG(lsm_setsockopt, struct socket *sock, int level, int optname, int ret)
{
	if (ret)
		return ret;
	return is_refused(level, optname) && is_lent(sock->sk) ? -EPERM_ : 0;
}

/* ioctls of network devices, SIOCGSKNS among them, are made by the agent, on sockets of the
 * container's namespace. What acts on the socket itself is left: owners, the urgent mark, time
 * stamps. */
static __always_inline bool is_refused_ioctl(unsigned int cmd)
{
	cmd &= 0xffff;
	return (cmd >= 0x890b && cmd <= 0x89ff && cmd != 0x894b /* SIOCOUTQNSD */) ||
	       (cmd >= 0x8b00 && cmd <= 0x8bff);
}

SEC("lsm/file_ioctl")
int BPF_PROG(lsm_ioctl, struct file *file, unsigned int cmd, unsigned long arg, int ret)
{
	struct socket *sock;

	if (ret)
		return ret;
	if (!is_refused_ioctl(cmd))
		return 0;
	sock = bpf_sock_from_file(file);
	return sock && is_lent(sock->sk) ? -EPERM_ : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Multicast groups that a program joins by a TCP socket (MCAST_JOIN_GROUP, MCAST_LEAVE_GROUP). TCP
 * gets no multicast, so that a membership is no more than what the calls answer: it is kept here,
 * and the node's devices join nothing. */
#ifndef HEDDLE_SOCK_MULTICAST_H
#define HEDDLE_SOCK_MULTICAST_H

#include "include/abi/multicast.h"
#include "include/address.h"
#include "include/maps.h"
#include "sock/sockopt.h"

#define GROUP_REQ      136 /* sizeof(struct group_req) */
#define GROUP_FAMILY   8   /* in it */
#define GROUP_ADDRESS4 12
#define GROUP_ADDRESS6 16

/* The group that the program names, and its device; 0 or an errno. */
static __always_inline int read_group(struct bpf_sockopt *ctx, bool ipv6, struct address *group,
                                      __u32 *ifindex)
{
	__u8 *p = ctx->optval;

	if (ctx->optlen < GROUP_REQ || (void *)(p + GROUP_REQ) > ctx->optval_end)
		return EINVAL_;
	if (*(__u16 *)(p + GROUP_FAMILY) != (ipv6 ? AF_INET6 : AF_INET))
		return ipv6 ? EADDRNOTAVAIL_ : EINVAL_;
	*ifindex = *(__u32 *)p;
	if (!ipv6) {
		set_mapped(group, *(__be32 *)(p + GROUP_ADDRESS4));
		return 0;
	}
	p += GROUP_ADDRESS6;
	group->word[0] = *(__be32 *)p;
	group->word[1] = *(__be32 *)(p + 4);
	group->word[2] = *(__be32 *)(p + 8);
	group->word[3] = *(__be32 *)(p + 12);
	return 0;
}

static __always_inline bool is_multicast(const struct address *a)
{
	if (is_mapped(a))
		return (a->word[3] & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000);
	return (a->word[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

/* Where the membership of group by device ifindex is, or, if 0, by any; GROUPS_MAX: nowhere. Not
 * static, so that the verifier does not go on from here with each place. */
__noinline __u32 find_group(const struct joined_groups *all, const struct address *group, __u32 ifindex)
{
	__u32 i;

	if (!all || !group)
		return GROUPS_MAX;
	for (i = 0; i < GROUPS_MAX; i++) {
		const struct joined_group *g = &all->group[i];

		if (g->ifindex && (!ifindex || g->ifindex == ifindex) && same_address(&g->addr, group))
			break;
	}
	return i;
}

/* Where there is a free place; GROUPS_MAX: nowhere. */
__noinline __u32 free_group(const struct joined_groups *all)
{
	__u32 i;

	if (!all)
		return GROUPS_MAX;
	for (i = 0; i < GROUPS_MAX; i++) {
		if (!all->group[i].ifindex)
			break;
	}
	return i;
}

static __noinline int join_group(struct joined_groups *all, const struct address *group, __u32 asked,
                                 __u32 ifindex)
{
	__u32 at;

	if (!all || !group)
		return ENOBUFS_;
	if (find_group(all, group, asked) < GROUPS_MAX)
		return EADDRINUSE_;
	at = free_group(all);
	if (at >= GROUPS_MAX)
		return ENOBUFS_;
	all->group[at].addr = *group;
	all->group[at].ifindex = ifindex;
	return 0;
}

static __noinline int leave_group(struct joined_groups *all, const struct address *group, __u32 asked)
{
	__u32 at = all && group ? find_group(all, group, asked) : GROUPS_MAX;

	if (at >= GROUPS_MAX)
		return EADDRNOTAVAIL_;
	all->group[at].ifindex = 0;
	return 0;
}

/* Answers the options as the kernel does. ep may be NULL. */
static __always_inline int set_group(struct bpf_sockopt *ctx, const struct endpoint *ep, bool ipv6, bool join)
{
	struct joined_groups *all;
	__u32 own = ep ? ep->container_ifindex : 0, asked = 0, ifindex;
	struct address group;
	int err = read_group(ctx, ipv6, &group, &asked);

	if (err)
		return fail_sockopt(err);
	if ((ipv6 || join) && !is_multicast(&group))
		return fail_sockopt(EINVAL_);
	/* Device 0 is that of the route; IPv6 looks for memberships by any then. */
	ifindex = asked ? asked : own;
	if (!ipv6)
		asked = ifindex;
	if (join && (!own || (ifindex != LOOPBACK_IFINDEX && ifindex != own)))
		return fail_sockopt(ENODEV_);
	all = bpf_sk_storage_get(&groups_by_sock, ctx->sk, 0, join ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	err = join ? join_group(all, &group, asked, ifindex) : leave_group(all, &group, asked);
	return err ? fail_sockopt(err) : SOCKOPT_DONE;
}

#endif

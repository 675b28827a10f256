/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reading of socket options: what the program set and sock/sockopt.h calls kept is shown, what the
 * node's kernel knows is not. */

#include "include/abi/reason.h"
#include "include/config.h"
#include "include/credential.h"
#include "include/endpoint.h"
#include "include/headers.h"
#include "include/kernel_types.h"
#include "include/protection.h"
#include "sock/congestion.h"
#include "sock/context.h"
#include "sock/hidden_options.h"
#include "sock/node_ports.h"
#include "sock/sockopt.h"

/* Puts value in the place of the integer that the kernel answered with, or of the bytes of it there
 * was room for. */
static __always_inline void show_int(struct bpf_sockopt *ctx, __u32 value)
{
	__u8 *p = ctx->optval;
	int i;

	if ((void *)(p + sizeof(value)) <= ctx->optval_end) {
		*(__u32 *)p = value;
		return;
	}
	for (i = 0; i < (int)sizeof(value) - 1; i++)
		if ((void *)(p + i + 1) <= ctx->optval_end)
			p[i] = value >> 8 * i;
}

/* The kernel answered what it must not. */
static __always_inline int deny_answer(int err)
{
	return refuse(REASON_REFUSE_SOCKOPT, err);
}

static __always_inline int show_device(struct bpf_sockopt *ctx, const struct sock_tag *tag,
                                       const struct endpoint *ep)
{
	__u8 *p = ctx->optval;
	int i, len = 0;

	if (!tag->ifindex)
		return 1;
	if ((void *)(p + IFNAMSIZ_) > ctx->optval_end) {
		bpf_set_retval(-EINVAL_);
		return 0;
	}
	if (tag->ifindex == 1) {
		p[0] = 'l';
		p[1] = 'o';
		p[2] = 0;
		ctx->optlen = 3;
		return 1;
	}
	if (!ep || tag->ifindex != ep->container_ifindex) {
		bpf_set_retval(-ENODEV_);
		return 0;
	}
	for (i = 0; i < IFNAMSIZ_; i++) {
		p[i] = ep->device[i];
		if (!p[i])
			break;
		len++;
	}
	ctx->optlen = len + 1;
	return 1;
}

static __always_inline int get_socket_level(struct bpf_sockopt *ctx, const struct sock_tag *tag,
                                            const struct endpoint *ep)
{
	__u8 *p = ctx->optval;
	struct net *net;

	switch (ctx->optname) {
	case 12: /* SO_PRIORITY */
		if (tag->priority)
			show_int(ctx, tag->priority);
		return 1;
	case 25: /* SO_BINDTODEVICE */
		return show_device(ctx, tag, ep);
	case 36: /* SO_MARK */
		show_int(ctx, tag->mark);
		return 1;
	case 37: /* SO_TIMESTAMPING */
	case 65:
		show_timestamping(ctx, tag);
		return 1;
	case 38: /* SO_PROTOCOL */
		if (tag->options & OPTION_MPTCP)
			show_int(ctx, IPPROTO_MPTCP_);
		return 1;
	case 62: /* SO_BINDTOIFINDEX */
		show_int(ctx, tag->ifindex);
		return 1;
	case 71: /* SO_NETNS_COOKIE */
		net = net_of(ep);
		if (!net || !bpf_core_field_exists(net->net_cookie))
			return deny_answer(EPERM_);
		if ((void *)(p + sizeof(__u64)) <= ctx->optval_end)
			*(__u64 *)p = net->net_cookie;
		return 1;
	}
	return ctx->optname <= 83 ? 1 : deny_answer(ENOPROTOOPT_);
}

/* SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST: the kernel has answered with what the connection was
 * made to before the node translated it. Of one that was accepted that is the node's address: the
 * container's own takes its place, because what is denied stays in the program's memory. */
static __always_inline int show_original(struct bpf_sockopt *ctx, const struct sock_tag *tag,
                                         const struct endpoint *ep, bool ipv6)
{
	struct sockaddr_in6_ *to6 = ctx->optval;
	struct sockaddr_in_ *to = ctx->optval;
	__be32 *last = ipv6 ? &to6->addr[3] : &to->addr;
	int i;

	if (!ep || !(tag->flags & TAG_ACCEPTED) ||
	    (ipv6 ? (void *)(to6 + 1) : (void *)(to + 1)) > ctx->optval_end || *last == ep->addr4.word[3])
		return deny_answer(ENOENT_);
	to->port = bpf_htons((__u16)ctx->sk->src_port);
	for (i = 0; ipv6 && i < 3; i++)
		to6->addr[i] = config_prefix6[i];
	*last = ep->addr4.word[3];
	return 1;
}

static __always_inline int get_ip_level(struct bpf_sockopt *ctx, const struct sock_tag *tag,
                                        const struct endpoint *ep)
{
	switch (ctx->optname) {
	case 8: /* IP_PKTINFO */
		show_int(ctx, !!(tag->options & OPTION_PKTINFO));
		return 1;
	case 11: /* IP_RECVERR */
		show_int(ctx, !!(tag->options & OPTION_RECVERR4));
		return 1;
	case 19: /* IP_TRANSPARENT */
		show_int(ctx, !!(tag->options & OPTION_TRANSPARENT));
		return 1;
	case 51: /* IP_LOCAL_PORT_RANGE */
		show_port_range(ctx);
		return 1;
	case 80: /* SO_ORIGINAL_DST */
		return show_original(ctx, tag, ep, false);
	}
	if (ctx->optname >= SOL_NETFILTER && ctx->optname < SOL_NETFILTER + 64)
		return deny_answer(EPERM_);
	return ctx->optname <= 52 ? 1 : deny_answer(ENOPROTOOPT_);
}

static __always_inline int get_ipv6_level(struct bpf_sockopt *ctx, const struct sock_tag *tag,
                                          const struct endpoint *ep)
{
	switch (ctx->optname) {
	case 25: /* IPV6_RECVERR */
		show_int(ctx, !!(tag->options & OPTION_RECVERR6));
		return 1;
	case 26: /* IPV6_V6ONLY */
		show_int(ctx, tag->flags & TAG_V6ONLY || (tag->flags & TAG_BOUND6 && ctx->sk->src_port));
		return 1;
	case 49:
		show_int(ctx, !!(tag->options & OPTION_PKTINFO6));
		return 1;
	case 2:
		show_int(ctx, !!(tag->options & OPTION_PKTINFO6_OLD));
		return 1;
	case 74: /* IPV6_RECVORIGDSTADDR */
		show_int(ctx, !!(tag->options & OPTION_ORIGDST6));
		return 1;
	case 75: /* IPV6_TRANSPARENT */
		show_int(ctx, !!(tag->options & OPTION_TRANSPARENT));
		return 1;
	case 64: /* netfilter's */
	case 65:
	case 68:
	case 69:
		return deny_answer(EPERM_);
	case 80: /* IP6T_SO_ORIGINAL_DST */
		return show_original(ctx, tag, ep, true);
	}
	return ctx->optname <= 78 ? 1 : deny_answer(ENOPROTOOPT_);
}

static __always_inline int get_tcp_level(struct bpf_sockopt *ctx, const struct sock_tag *tag)
{
	switch (ctx->optname) {
	case 13: /* TCP_CONGESTION */
		show_congestion(ctx, tag);
		return 1;
	case 26: /* TCP_CC_INFO */
		show_congestion_info(ctx, tag);
		return 1;
	case 27: /* TCP_SAVE_SYN */
		show_int(ctx, tag->options / OPTION_SAVE_SYN & 3);
		return 1;
	case 28: /* TCP_SAVED_SYN */
		return ctx->optlen ? deny_answer(EPERM_) : 1;
	}
	return ctx->optname <= 46 ? 1 : deny_answer(ENOPROTOOPT_);
}

SEC("cgroup/getsockopt")
int getsockopt(struct bpf_sockopt *ctx)
{
	struct sock_tag *tag;
	struct endpoint *ep;
	int ret = 1;

	if (!ctx->sk || !protects(PROTECT_SOCKET_OPTIONS))
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, 0);
	/* IP_MSFILTER: there is no such address on a device of the node. That there is none of that
	 * membership is so of all. */
	if (tag && ctx->level == SOL_IP_ && ctx->optname == 41 && ctx->retval == -ENODEV_)
		return deny_answer(EADDRNOTAVAIL_);
	if (!tag || ctx->retval) /* an error of the kernel's is as good an answer as any */
		goto pass;
	ep = tagged_endpoint(tag);
	switch (ctx->level) {
	case SOL_SOCKET_:
		ret = get_socket_level(ctx, tag, ep);
		break;
	case SOL_IP_:
		ret = get_ip_level(ctx, tag, ep);
		break;
	case SOL_IPV6_:
		ret = get_ipv6_level(ctx, tag, ep);
		break;
	case SOL_TCP_:
		ret = get_tcp_level(ctx, tag);
	}
	if (!ret)
		return 0;
pass:
	if (ctx->optlen > OPTVAL_PAGE)
		ctx->optlen = 0;
	return 1;
}

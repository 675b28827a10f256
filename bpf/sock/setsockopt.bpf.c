/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Setting of socket options: sock/sockopt.h says what the verdicts mean. */

#include "include/abi/reason.h"
#include "include/address.h"
#include "include/credential.h"
#include "include/endpoint.h"
#include "include/protection.h"
#include "sock/congestion.h"
#include "sock/context.h"
#include "sock/hidden_options.h"
#include "sock/multicast.h"
#include "sock/node_ports.h"
#include "sock/portbind.h"
#include "sock/socket_quota.h"
#include "sock/sockopt.h"
#include "sock/tagging.h"
#include "sock/stack_settings.h"

#define UNKNOWN_OPTION 0x7fff /* none of any kernel's */

/* The integer that a program sets, as most levels read it. */
static __always_inline bool read_int(struct bpf_sockopt *ctx, int *value)
{
	__u8 *p = ctx->optval;

	if (ctx->optlen < (int)sizeof(int) || (void *)(p + sizeof(int)) > ctx->optval_end)
		return false;
	*value = *(int *)p;
	return true;
}

/* The same as IP level reads it: one byte will do, and nothing is 0. */
static __always_inline int read_ip_int(struct bpf_sockopt *ctx)
{
	__u8 *p = ctx->optval;
	int value = 0;

	if (!read_int(ctx, &value) && ctx->optlen > 0 && (void *)(p + 1) <= ctx->optval_end)
		value = *p;
	return value;
}

/* Denied, unless the value is too short for the option: then the kernel would not have looked at
 * rights. */
static __always_inline int deny_if_whole(struct bpf_sockopt *ctx, int size)
{
	return ctx->optlen < size ? fail_sockopt(EINVAL_) : SOCKOPT_DENY;
}

/* Without the socket's lock, under which connect() and the agent note what a profile sets. */
static __always_inline int keep(struct sock_tag *tag, __u32 option, bool on)
{
	if (on)
		__sync_fetch_and_or(&tag->options, option);
	else
		__sync_fetch_and_and(&tag->options, ~option);
	return SOCKOPT_DONE;
}

/* SO_MARK means something to the container's own rules only, which this socket never meets. */
static __always_inline int set_kept_mark(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                         const struct endpoint *ep)
{
	int value;

	if (!read_int(ctx, &value))
		return fail_sockopt(EINVAL_);
	if (!capable_in(ep, CAP_NET_RAW_) && !capable_in(ep, CAP_NET_ADMIN_))
		return fail_sockopt(EPERM_);
	tag->mark = value;
	return SOCKOPT_DONE;
}

/* Priorities above 6 take a capability. They name classes of queueing disciplines, which in the
 * container are its own and here the node's: kept. */
static __always_inline int set_priority(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                        const struct endpoint *ep)
{
	int value;

	if (!read_int(ctx, &value))
		return SOCKOPT_PASS;
	if (value >= 0 && value <= 6) {
		tag->priority = 0;
		return SOCKOPT_PASS;
	}
	if (!capable_in(ep, CAP_NET_RAW_) && !capable_in(ep, CAP_NET_ADMIN_))
		return fail_sockopt(EPERM_);
	tag->priority = value;
	return SOCKOPT_DONE;
}

static __always_inline int bind_device(struct sock_tag *tag, const struct endpoint *ep, __u32 ifindex)
{
	if (tag->ifindex && !capable_in(ep, CAP_NET_RAW_))
		return fail_sockopt(EPERM_);
	tag->ifindex = ifindex;
	return SOCKOPT_DONE;
}

static __always_inline int bind_ifindex(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                        const struct endpoint *ep)
{
	int value;

	if (!read_int(ctx, &value) || value < 0)
		return fail_sockopt(EINVAL_);
	/* the kernel does not ask whether there is such a device */
	return bind_device(tag, ep, value);
}

/* The device of the container that the program names; 0 for "", -1 for one that is not there. Not
 * static, so that the verifier does not go on from here with each name that it can have been. */
__noinline int named_device(struct bpf_sockopt *ctx, const struct endpoint *ep)
{
	__u32 lo = 0, own = 0; /* not 0: it is not that one */
	__u8 *p = ctx->optval;
	int i;

	if (!ep)
		return -1;
	for (i = 0; i < IFNAMSIZ_; i++) {
		char c = 0;

		if (i < IFNAMSIZ_ - 1 && i < ctx->optlen && (void *)(p + i + 1) <= ctx->optval_end)
			c = p[i];
		if (i == 0 && !c)
			return 0;
		lo |= c ^ (i == 0 ? 'l' : i == 1 ? 'o' : 0);
		own |= c ^ ep->device[i];
		if (!c)
			break;
	}
	if (!lo)
		return 1;
	return own ? -1 : (int)ep->container_ifindex;
}

static __always_inline int bind_named(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                      const struct endpoint *ep)
{
	int ifindex = named_device(ctx, ep);

	if (ifindex < 0)
		return fail_sockopt(ENODEV_);
	return bind_device(tag, ep, ifindex);
}

/* SO_REUSEADDR and SO_REUSEPORT decide about conflicts between addresses, too. */
static __always_inline int note_reuse(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	int value;

	if (read_int(ctx, &value))
		set_portbind_flag(tag, ctx->optname == 2 ? PORTBIND_REUSEADDR : PORTBIND_REUSEPORT,
		                  value != 0);
	return SOCKOPT_PASS;
}

static __always_inline int set_socket_level(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                            const struct endpoint *ep)
{
	int value;

	switch (ctx->optname) {
	case 2:  /* SO_REUSEADDR */
	case 15: /* SO_REUSEPORT */
		return note_reuse(ctx, tag);
	case 12: /* SO_PRIORITY */
		return set_priority(ctx, tag, ep);
	case 25: /* SO_BINDTODEVICE */
		return bind_named(ctx, tag, ep);
	case 36: /* SO_MARK */
		return set_kept_mark(ctx, tag, ep);
	case 62: /* SO_BINDTOIFINDEX */
		return bind_ifindex(ctx, tag, ep);
	case 37: /* SO_TIMESTAMPING, in its old and new form */
	case 65:
		return hide_sent_packets(ctx, tag) ? SOCKOPT_PASS : fail_sockopt(EINVAL_);
	case 73: /* SO_RESERVE_MEM: of the agent's control group, which made the socket */
		return fail_sockopt(read_int(ctx, &value) && value >= 0 ? EOPNOTSUPP_ : EINVAL_);
	case 26: /* SO_ATTACH_FILTER: filters read headers, and tell by what they let pass */
	case 50: /* SO_ATTACH_BPF */
	case 52: /* SO_ATTACH_REUSEPORT_EBPF */
		return deny_if_whole(ctx, sizeof(int));
	}
	return ctx->optname > 0 && ctx->optname <= 83 ? SOCKOPT_PASS : SOCKOPT_UNKNOWN;
}

/* IP_TRANSPARENT and IPV6_TRANSPARENT are one. */
static __always_inline int set_transparent(struct sock_tag *tag, const struct endpoint *ep, bool on)
{
	if (on && !capable_in(ep, CAP_NET_RAW_) && !capable_in(ep, CAP_NET_ADMIN_))
		return fail_sockopt(EPERM_);
	return keep(tag, OPTION_TRANSPARENT, on);
}

/* IP_UNICAST_IF and IPV6_UNICAST_IF, in network byte order: TCP does not use them. */
static __always_inline int set_unicast_if(struct bpf_sockopt *ctx, const struct endpoint *ep)
{
	int value;

	if (!read_int(ctx, &value))
		return fail_sockopt(EINVAL_);
	value = bpf_ntohl(value);
	if (value == 0 || value == 1 || (ep && value == (int)ep->container_ifindex))
		return SOCKOPT_DONE;
	return fail_sockopt(EADDRNOTAVAIL_);
}

static __always_inline int set_ip_level(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                        const struct endpoint *ep)
{
	int name = ctx->optname;

	switch (name) {
	case 1: /* IP_TOS: sets the priority as well */
		tag->priority = 0;
		return SOCKOPT_PASS;
	case 4: /* IP_OPTIONS: they would be seen, and answered, by the underlay */
		return ctx->optlen ? SOCKOPT_DENY : SOCKOPT_PASS;
	case 8: /* IP_PKTINFO: read by IP_PKTOPTIONS, which has the kernel's addresses */
		return keep(tag, OPTION_PKTINFO, read_ip_int(ctx));
	case 11: /* IP_RECVERR: errors come with addresses of the underlay */
		return keep(tag, OPTION_RECVERR4, read_ip_int(ctx));
	case 19: /* IP_TRANSPARENT: bind() goes on to refuse foreign addresses */
		return ctx->optlen < 1 ? fail_sockopt(EINVAL_) : set_transparent(tag, ep, read_ip_int(ctx));
	case 41: /* IP_MSFILTER, MCAST_MSFILTER: errors tell which addresses and devices the node has */
		return deny_if_whole(ctx, 16);
	case 48:
		return deny_if_whole(ctx, 144 /* struct group_filter without sources */);
	case 50: /* IP_UNICAST_IF */
		return set_unicast_if(ctx, ep);
	case 51: /* IP_LOCAL_PORT_RANGE */
		cut_port_range(ctx);
		return SOCKOPT_PASS;
	case 16:            /* IP_IPSEC_POLICY */
	case 17:            /* IP_XFRM_POLICY */
	case SOL_NETFILTER: /* iptables, arptables */
	case SOL_NETFILTER + 1:
	case SOL_NETFILTER + 32:
	case SOL_NETFILTER + 33:
		return SOCKOPT_DENY;
	case 42: /* MCAST_JOIN_GROUP, MCAST_LEAVE_GROUP */
	case 45:
		return set_group(ctx, ep, false, name == 42);
	}
	if (name >= 37 && name <= 40) /* memberships: of the node's devices */
		return deny_if_whole(ctx, 12 /* struct ip_mreq_source */);
	if (name >= 42 && name <= 47)
		return deny_if_whole(ctx, 132 /* struct group_req without its padding */);
	return name > 0 && name <= 52 ? SOCKOPT_PASS : SOCKOPT_UNKNOWN;
}

/* The kernel's own flag stays off: it would forbid the v4-mapped addresses underneath. */
static __always_inline int set_v6only(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	int on;

	if (!read_int(ctx, &on) || ctx->sk->src_port)
		return fail_sockopt(EINVAL_);
	/* No other hook runs without the socket's lock: what they change meanwhile must not be
	 * undone. */
	if (on)
		__sync_fetch_and_or(&tag->flags, TAG_V6ONLY);
	else
		__sync_fetch_and_and(&tag->flags, ~TAG_V6ONLY);
	return SOCKOPT_DONE;
}

/* Makes an IPv4 socket of one that is connected to a v4-mapped address: to one that the program
 * sees. */
static __always_inline int set_addrform(struct bpf_sockopt *ctx, const struct sock_tag *tag)
{
	int family;

	if (read_int(ctx, &family) && family == AF_INET && tag->flags & TAG_REMOTE &&
	    !is_mapped(&tag->remote))
		return fail_sockopt(EADDRNOTAVAIL_);
	return SOCKOPT_PASS;
}

static __always_inline int set_kept6(struct bpf_sockopt *ctx, struct sock_tag *tag, const struct endpoint *ep)
{
	int value;

	if (!read_int(ctx, &value))
		return fail_sockopt(EINVAL_);
	if (ctx->optname == 25)
		return keep(tag, OPTION_RECVERR6, value);
	return set_transparent(tag, ep, value);
}

/* IPV6_RECVPKTINFO, IPV6_2292PKTINFO of old, IPV6_RECVORIGDSTADDR. What IPV6_2292PKTOPTIONS then
 * tells of a connection is an address of this node or, accepted, the underlay's of the peer's, and
 * a device. */
static __always_inline int set_pktinfo6(struct bpf_sockopt *ctx, struct sock_tag *tag, __u32 option)
{
	int value;

	if (!read_int(ctx, &value))
		return fail_sockopt(EINVAL_);
	return keep(tag, option, value);
}

static __always_inline int set_ipv6_level(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                          const struct endpoint *ep)
{
	int name = ctx->optname;

	if (ctx->sk->family != AF_INET6)
		return SOCKOPT_PASS; /* the kernel refuses the whole level */
	switch (name) {
	case 1: /* IPV6_ADDRFORM */
		return set_addrform(ctx, tag);
	case 25: /* IPV6_RECVERR */
	case 75: /* IPV6_TRANSPARENT */
		return set_kept6(ctx, tag, ep);
	case 26:
		return set_v6only(ctx, tag);
	case 76: /* IPV6_UNICAST_IF */
		return set_unicast_if(ctx, ep);
	case 49:
		return set_pktinfo6(ctx, tag, OPTION_PKTINFO6);
	case 2:
		return set_pktinfo6(ctx, tag, OPTION_PKTINFO6_OLD);
	case 74: /* IPV6_RECVORIGDSTADDR: of a connection to the outside, the node's */
		return set_pktinfo6(ctx, tag, OPTION_ORIGDST6);
	case 48: /* MCAST_MSFILTER: as of IPv4 */
		return deny_if_whole(ctx, 144);
	case 6: /* IPV6_2292PKTOPTIONS: extension headers and source address, for the underlay */
		return ctx->optlen < 16 /* no control message */ ? SOCKOPT_PASS : SOCKOPT_DENY;
	case 54: /* IPV6_HOPOPTS, RTHDRDSTOPTS, RTHDR, DSTOPTS */
	case 55:
	case 57:
	case 59:
		return ctx->optlen ? deny_if_whole(ctx, 8) : SOCKOPT_PASS;
	case 34: /* IPV6_IPSEC_POLICY, IPV6_XFRM_POLICY, netfilter's */
	case 35:
	case SOL_NETFILTER:
	case SOL_NETFILTER + 1:
		return SOCKOPT_DENY;
	case 27: /* IPV6_JOIN_ANYCAST, IPV6_LEAVE_ANYCAST, IPV6_PKTINFO: of the node's devices */
	case 28:
	case 50:
		return deny_if_whole(ctx, 20);
	case 32: /* IPV6_FLOWLABEL_MGR: labels are the node's */
		return deny_if_whole(ctx, 32 /* struct in6_flowlabel_req */);
	case 42: /* MCAST_JOIN_GROUP, MCAST_LEAVE_GROUP */
	case 45:
		return set_group(ctx, ep, true, name == 42);
	case 68: /* netfilter's, to be read only */
	case 69:
		return SOCKOPT_UNKNOWN;
	}
	if (name >= 42 && name <= 47)
		return deny_if_whole(ctx, 132);
	return name > 0 && name <= 78 ? SOCKOPT_PASS : SOCKOPT_UNKNOWN;
}

static __always_inline int set_tcp_level(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	int value = -1;

	switch (ctx->optname) {
	case 13: /* TCP_CONGESTION */
		note_congestion(ctx, tag);
		return SOCKOPT_PASS;
	case 14: /* TCP_MD5SIG */
	case 32: /* TCP_MD5SIG_EXT: keys go by addresses, and those of packets are the underlay's */
		return deny_if_whole(ctx, 128);
	case 19: /* TCP_REPAIR */
	case 42: /* TCP_AO_REPAIR */
		return deny_if_whole(ctx, sizeof(int));
	case 27: /* TCP_SAVE_SYN: a saved SYN is as it was on the underlay */
		if (!read_int(ctx, &value) || value < 0 || value > 2)
			return fail_sockopt(EINVAL_);
		keep(tag, OPTION_SAVE_SYN * 3, false);
		keep(tag, OPTION_SAVE_SYN * value, true);
		return SOCKOPT_DONE;
	case 30: /* TCP_FASTOPEN_CONNECT */
		read_int(ctx, &value);
		if (value == 0 || value == 1)
			keep(tag, OPTION_FASTOPEN, value);
		return SOCKOPT_PASS;
	case 31: /* TCP_ULP */
		return ctx->optlen < 1 || asks_for_tls(ctx) ? SOCKOPT_PASS : fail_sockopt(ENOENT_);
	case 38: /* TCP_AO_ADD_KEY and its kin: keys again */
	case 39:
	case 40:
	case 41:
		return SOCKOPT_UNKNOWN;
	}
	return ctx->optname > 0 && ctx->optname <= 46 ? SOCKOPT_PASS : SOCKOPT_UNKNOWN;
}

/* Whether a stack profile keeps the option. A value too short is the kernel's to refuse. */
static __noinline int is_held(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	int level = ctx->level, name = ctx->optname, least = sizeof(int);

	if (level == SOL_TCP_ && name == TCP_CONGESTION_)
		least = 1;
	if (!tag || ctx->optlen < least)
		return 0;
	return stack_holds(tag, level, name);
}

static __always_inline int set_verdict(struct bpf_sockopt *ctx, struct sock_tag *tag,
                                       const struct endpoint *ep)
{
	if (is_held(ctx, tag))
		return SOCKOPT_DONE;
	switch (ctx->level) {
	case SOL_SOCKET_:
		return set_socket_level(ctx, tag, ep);
	case SOL_IP_:
		return set_ip_level(ctx, tag, ep);
	case SOL_IPV6_:
		return set_ipv6_level(ctx, tag, ep);
	case SOL_TCP_:
		return set_tcp_level(ctx, tag);
	}
	return SOCKOPT_PASS; /* kTLS; a TCP socket knows no others */
}

SEC("cgroup/setsockopt")
int setsockopt(struct bpf_sockopt *ctx)
{
	struct sock_tag *tag;
	struct endpoint *ep;

	if (!ctx->sk)
		return 1;
	if (tag_for_agent(ctx)) {
		ctx->optlen = -1;
		return 1;
	}
	tag = bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, 0);
	if (tag && ctx->level == SOL_HEDDLE)
		return ask_to_count(ctx, tag);
	if (!protects(PROTECT_SOCKET_OPTIONS))
		return 1;
	if (!tag)
		goto pass;
	ep = tagged_endpoint(tag);
	switch (set_verdict(ctx, tag, ep)) {
	case SOCKOPT_DENY:
		return refuse(REASON_REFUSE_SOCKOPT, EPERM_);
	case SOCKOPT_FAIL:
		return 0;
	case SOCKOPT_DONE:
		ctx->optlen = -1;
		return 1;
	case SOCKOPT_UNKNOWN:
		ctx->optname = UNKNOWN_OPTION;
	}
	/* Of a longer value only a page is shown here, and no option has need of more. Read by the
	 * kernel once more, it could be another. */
	if (ctx->optlen > OPTVAL_PAGE)
		ctx->optlen = OPTVAL_PAGE;
	return 1;
pass:
	/* 0 lets the kernel read the value itself. */
	if (ctx->optlen > OPTVAL_PAGE)
		ctx->optlen = 0;
	return 1;
}

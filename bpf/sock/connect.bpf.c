/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* connect(): chooses the path and rewrites the destination for it.
 *
 *   own loopback           -> the endpoint's alias, or its overlay address if only a wildcard
 *                             listens
 *   own loopback, address, -> the mirror address (include/mirror.h), through the own veth
 *   plain listener
 *   this node, intercepted -> unchanged, from the overlay address, over lo
 *   this node, plain       -> unchanged, from the overlay address, through the peer's veth
 *   another node           -> that node's underlay address and one of its direct ports; sockops
 *                             adds the option. Where it cannot be direct: unchanged, over the
 *                             overlay
 *   the node itself        -> unchanged, from the overlay address
 *   outside                -> unchanged, from whatever address routing picks: the node's
 *   a service              -> one of its backends, which is one of the above (sock/service.h)
 *
 * IPv6 likewise. Underneath, direct connections and those over ::1 are IPv4 (v4-mapped), the others
 * IPv6. / */

#include "include/abi/path.h"
#include "include/address.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/kernel_types.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "include/reprobe.h"
#include "include/route.h"
#include "policy/decide.h"
#include "sock/connect_crossing.h"
#include "sock/connect_forbidden.h"
#include "sock/connect_loopback.h"
#include "sock/context.h"
#include "sock/firewall.h"
#include "sock/flow_events.h"
#include "sock/listener.h"
#include "sock/segments.h"
#include "sock/service.h"
#include "sock/socket_quota.h"
#include "sock/stack_settings.h"

/* Whether the socket's own address is of no use to reach an address of the family: connect_crossing
 * is the way. */
static __always_inline bool must_cross(struct bpf_sock_addr *ctx, bool ipv6)
{
	return ipv6 ? is_mapped_underneath(ctx) : is_wildcard_bound(ctx);
}

/* Who listens at dst on this node: one that is reached over lo, or (steered) one on [::], which is
 * bound to the IPv4 address. Then the SYN of an IPv6 connection is routed to the peer's veth, where
 * it is steered; sockops moves the connection to lo. */
struct same_node {
	bool local;
	bool steered;
};

static __always_inline struct same_node find_same_node(struct bpf_sock_addr *ctx, bool ipv6, __be32 own,
                                                       __be32 dst, const struct endpoint *peer,
                                                       struct listener *at)
{
	struct same_node found = {};
	__be16 port = ctx->user_port;

	if (peer)
		found.local = listens(ctx, ipv6, own, dst, port, peer->id, at);
	if (peer && ipv6 && !found.local)
		found.steered = listens(ctx, false, own, dst, port, peer->id, at) && at->flags & TAG_ANY6;
	/* A socket may connect to itself: both ends send a SYN. */
	if (!ipv6 && sk_of(ctx)->src_ip4 == dst && bpf_htons((__u16)sk_of(ctx)->src_port) == port)
		found.local = true;
	return found;
}

/* Whether the socket is bound to an IPv6 address underneath: it can go to no IPv4 one, as all
 * crossing addresses are. */
static __always_inline bool is_bound6_underneath(struct bpf_sock_addr *ctx, bool sk6)
{
	return sk6 && sk_of(ctx)->src_ip4 == LOOPBACK4_IPV6;
}

/* Whether a connect to dst need not go by the nodes' firewalls. reason: why not direct. */
static __always_inline bool past_firewall(struct bpf_sock_addr *ctx, bool sk6, const struct endpoint *ep,
                                          const struct address *dst, __u8 reason)
{
	return (!reason || is_bound6_underneath(ctx, sk6)) &&
	       passed_firewall(ep, dst, (__be16)ctx->user_port);
}

/* To dst by way of the nodes' firewalls. */
static __always_inline int connect_by_firewall(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                               const struct endpoint *ep, const struct address *dst,
                                               __u8 reason)
{
	if (is_bound6_underneath(ctx, sk6))
		return refuse(REASON_REFUSE_FIREWALL, EADDRNOTAVAIL_);
	return connect_crossing(ctx, sk6, tag, ep, dst, PATH_OVERLAY,
	                        reason ? reason : REASON_FALLBACK_FIREWALL);
}

/* to is overlay address dst of this node, or its IPv6 form. */
static __always_inline int connect_same_node(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                             struct sock_tag *tag, const struct endpoint *ep,
                                             const struct address *to)
{
	__be32 dst = to->word[3], own = ep->addr4.word[3];
	struct endpoint *peer = endpoint_at(dst);
	struct listener at = {.loopback = !ipv6 && tag->ifindex == LOOPBACK_IFINDEX};
	struct same_node found = find_same_node(ctx, ipv6, own, dst, peer, &at);
	bool listener = found.local || found.steered;
	__u8 reason;

	/* Its own address cannot be reached through its own veth (the container's stack would drop
	 * the packet as martian), and over lo the node has no RST for an address that is not local
	 * to it. */
	if (!listener && dst == own && own_stack_listens(ctx, ep, ipv6, dst))
		return connect_own_stack(ctx, sk6, tag, ep, ipv6, dst, ipv6 && is_mapped_underneath(ctx));
	if (!listener && at.loopback)
		return connect_dropped(ctx, sk6, ipv6, tag, ep, to, REASON_REFUSE_DEVICE);
	if (!listener && dst == own)
		return connect_refused(ctx, sk6, ipv6, tag);
	if (must_cross(ctx, ipv6))
		return connect_crossing(ctx, sk6, tag, ep, to, PATH_OVERLAY, REASON_FALLBACK_CROSSED);
	reason = listener ? REASON_NONE : REASON_FALLBACK_LOCAL_PLAIN;
	if (config_firewall_ns && dst != own && !(ep->flags & ENDPOINT_ADOPTED) &&
	    !past_firewall(ctx, sk6, ep, to, reason))
		return connect_by_firewall(ctx, sk6, tag, ep, to, reason);
	set_mark(ctx, tag, !found.local);
	bind_source(ctx, sk6, ipv6, own);
	if (!ipv6 && is_alias(sk_of(ctx)->src_ip4))
		tag->flags |= TAG_NAMES;
	if (listener && peer)
		segments_for_limit(ctx, ep->id, peer->id);
	if (listener)
		return take(tag, PATH_LOCAL, REASON_CONNECT_LOCAL, 0);
	return take(tag, PATH_OVERLAY, 0, reason);
}

/* Whether the SYN may have to carry a cookie and data: MSG_FASTOPEN or TCP_FASTOPEN_CONNECT. */
static __always_inline bool wants_fastopen(struct bpf_sock_addr *ctx, const struct sock_tag *tag)
{
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk_of(ctx));

	return tag->options & OPTION_FASTOPEN || (tp && tp->fastopen_req);
}

/* Why a path on which probes are not answered is not used, flags being the route's. */
static __noinline __u32 not_proven(__u32 flags, __be32 underlay)
{
	if (flags & ROUTE_STRIPPED)
		return REASON_FALLBACK_STRIPPED;
	if (flags & ROUTE_BLOCKED)
		return REASON_FALLBACK_BLOCKED;
	ask_reprobe(underlay);
	return REASON_FALLBACK_UNPROVEN;
}

/* Why a connect to another node cannot be direct; REASON_NONE if it can. */
static __always_inline __u8 not_direct(struct bpf_sock_addr *ctx, const struct sock_tag *tag,
                                       const struct route *to)
{
	/* Nothing listens at port 0, and no option names it. */
	if (to->flags & ROUTE_PLAIN || !ctx->user_port)
		return REASON_FALLBACK_PEER_PLAIN;
	if (!(to->flags & ROUTE_DIRECT))
		return REASON_FALLBACK_NODE_OVERLAY_ONLY;
	if (sk_of(ctx)->src_ip4)
		return tag->flags & TAG_BOUND ? REASON_FALLBACK_BOUND : REASON_FALLBACK_RECONNECT;
	if (wants_fastopen(ctx, tag))
		return REASON_FALLBACK_FASTOPEN;
	if (to->flags & ROUTE_NOT_PROVEN)
		return not_proven(to->flags, to->underlay.word[3]);
	return REASON_NONE;
}

static __always_inline int connect_direct(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                          struct sock_tag *tag, const struct endpoint *ep,
                                          const struct route *to, const struct address *dst)
{
	__u32 ports = (__u32)to->port_last - to->port_first + 1;
	__u16 port = to->port_first + bpf_get_prandom_u32() % ports;

	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_overlay(&tag->local, ipv6, ep->addr4.word[3]);
	tag->remote = *dst;
	tag->remote_port = ctx->user_port;
	/* Other nodes know this one by it, whatever others the node has. */
	bind_source(ctx, sk6, false, config_underlay);
	set_destination(ctx, sk6, to->underlay.word[3], bpf_htons(port));
	return take(tag, PATH_DIRECT, REASON_CONNECT_DIRECT, 0);
}

static __always_inline int connect_other_node(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                              struct sock_tag *tag, const struct endpoint *ep,
                                              const struct route *to, const struct address *dst)
{
	__u8 reason = not_direct(ctx, tag, to);

	if (reason && must_cross(ctx, ipv6))
		return connect_crossing(ctx, sk6, tag, ep, dst, PATH_OVERLAY, REASON_FALLBACK_CROSSED);
	if (meets_firewall(ep, to) && !past_firewall(ctx, sk6, ep, dst, reason))
		return connect_by_firewall(ctx, sk6, tag, ep, dst, reason);
	set_mark(ctx, tag, false);
	if (!reason)
		return connect_direct(ctx, sk6, ipv6, tag, ep, to, dst);
	bind_source(ctx, sk6, ipv6, ep->addr4.word[3]);
	return take(tag, PATH_OVERLAY, 0, reason);
}

/* To the node itself. */
static __always_inline int connect_node(struct bpf_sock_addr *ctx, bool sk6, bool ipv6, struct sock_tag *tag,
                                        const struct endpoint *ep, const struct address *dst)
{
	if (must_cross(ctx, ipv6))
		return connect_crossing(ctx, sk6, tag, ep, dst, PATH_NODE, REASON_FALLBACK_CROSSED);
	set_mark(ctx, tag, false);
	bind_source(ctx, sk6, ipv6, ep->addr4.word[3]);
	return take(tag, PATH_NODE, REASON_CONNECT_NODE, 0);
}

static __always_inline int connect_outside(struct bpf_sock_addr *ctx, bool ipv6, struct sock_tag *tag,
                                           const struct endpoint *ep, const struct address *dst)
{
	if (ipv6 && is_mapped_underneath(ctx))
		return connect_crossing(ctx, true, tag, ep, dst, PATH_OUTSIDE, REASON_FALLBACK_CROSSED);
	set_mark(ctx, tag, false);
	if (!sk_of(ctx)->src_ip4) {
		tag->flags |= TAG_LOCAL;
		set_overlay(&tag->local, ipv6, ep->addr4.word[3]);
	}
	return take(tag, PATH_OUTSIDE, REASON_CONNECT_OUTSIDE, 0);
}

/* To dst, no loopback address: asks policy, and goes where dst is. */
static __always_inline int connect_beyond(struct bpf_sock_addr *ctx, bool sk6, bool ipv6,
                                          struct sock_tag *tag, const struct endpoint *ep,
                                          const struct address *dst)
{
	struct route *to = NULL;
	__u32 verdict;

	verdict = has_policy() ? forbidden(ep, dst, bpf_ntohs((__u16)ctx->user_port)) : VERDICT_ALLOW;
	if (verdict)
		report_denied(ctx, tag, dst,
		              verdict == VERDICT_REJECT ? REASON_REFUSE_POLICY_REJECTED
		                                        : REASON_REFUSE_POLICY_DROPPED);
	if (verdict == VERDICT_REJECT) {
		count(REASON_REFUSE_POLICY_REJECTED);
		return connect_refused(ctx, sk6, ipv6, tag);
	}
	if (verdict)
		return connect_dropped(ctx, sk6, ipv6, tag, ep, dst, REASON_REFUSE_POLICY_DROPPED);
	if (!ipv6 || is_overlay6(dst))
		to = route_to(dst->word[3]);
	if (ipv6 && !to && protects(PROTECT_NODE_ADDRESS) && is_node_address6(dst))
		return connect_node(ctx, sk6, ipv6, tag, ep, dst);
	if (to && to->flags & ROUTE_SELF)
		return connect_same_node(ctx, sk6, ipv6, tag, ep, dst);
	if (to && to->flags & ROUTE_NODE_ADDR && !protects(PROTECT_NODE_ADDRESS))
		to = NULL;
	if (to && to->flags & ROUTE_NODE_ADDR)
		return connect_node(ctx, sk6, ipv6, tag, ep, dst);
	if (to)
		return connect_other_node(ctx, sk6, ipv6, tag, ep, to, dst);
	if (!ipv6 && is_mirror(dst->word[3]))
		return refuse_connect(EHOSTUNREACH_);
	return connect_outside(ctx, ipv6, tag, ep, dst);
}

static __always_inline int connect_ipv4(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                        const struct endpoint *ep, __be32 dst, bool wild)
{
	struct address to;

	/* By eth0, 0.0.0.0 is the own address. */
	if (!dst && tag->ifindex == ep->container_ifindex && tag->ifindex)
		dst = ep->addr4.word[3];
	set_mapped(&to, dst);
	switch (way_of_device(tag, ep, !dst || is_loopback4(dst))) {
	case DEVICE_UNKNOWN:
		return refuse(REASON_REFUSE_DEVICE, ENODEV_);
	case DEVICE_NO_ROUTE: /* every address is taken to be on lo, and the own one is */
		if (dst == ep->addr4.word[3])
			break;
		/* fallthrough */
	case DEVICE_SILENT:
		return connect_dropped(ctx, sk6, false, tag, ep, &to, REASON_REFUSE_DEVICE);
	}
	if (sk6 && sk_of(ctx)->src_ip4 == LOOPBACK4_IPV6) /* as the kernel says of an IPv6 source for IPv4 */
		return refuse_connect(EINVAL_);
	if (dst == 0 || is_loopback4(dst))
		return is_wildcard_bound(ctx) ? refuse(REASON_REFUSE_BIND_FOREIGN, EADDRNOTAVAIL_)
		                              : connect_loopback(ctx, sk6, tag, ep, dst, wild);
	/* A loopback address is no source beyond the container: a peer would take it for its
	 * own. */
	if (is_alias(sk_of(ctx)->src_ip4) && dst != ep->addr4.word[3])
		return refuse_connect(EINVAL_);
	return connect_beyond(ctx, sk6, false, tag, ep, &to);
}

static __always_inline int connect_ipv6(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                        const struct endpoint *ep, const struct address *dst)
{
	if (is_alias(sk_of(ctx)->src_ip4))
		return refuse_connect(EINVAL_);
	/* A link-local address is of the container's devices, which the node does not have. */
	if (!has_overlay6() || is_link_local6(dst))
		return refuse(REASON_REFUSE_IPV6_UNREACHABLE, ENETUNREACH_);
	return connect_beyond(ctx, true, true, tag, ep, dst);
}

/* What the hooks lead to, in functions that are not static, so that the verifier looks at each
 * once, and not once for all that is known where it is called. One for each family of sockets: see
 * get_user_address. */
__noinline int socket4_connects(struct bpf_sock_addr *ctx, struct sock_tag *tag, const struct endpoint *ep,
                                __be32 dst, bool wild)
{
	return tag && ep ? connect_ipv4(ctx, false, tag, ep, dst, wild) : 0;
}

__noinline int socket6_connects_ipv4(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                     const struct endpoint *ep, __be32 dst, bool wild)
{
	return tag && ep ? connect_ipv4(ctx, true, tag, ep, dst, wild) : 0;
}

__noinline int socket6_connects_ipv6(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                     const struct endpoint *ep, const struct address *dst)
{
	return tag && ep && dst ? connect_ipv6(ctx, tag, ep, dst) : 0;
}

__noinline int socket6_connects_loopback(struct bpf_sock_addr *ctx, struct sock_tag *tag,
                                         const struct endpoint *ep, bool wild)
{
	return tag && ep ? connect_loopback6(ctx, tag, ep, wild) : 0;
}

/* The tag of the caller's socket, cleared of what an earlier connect left. wild: it is bound to a
 * wildcard. */
static __always_inline struct sock_tag *connecting(struct bpf_sock_addr *ctx, bool sk6, bool *wild)
{
	struct sock_tag *tag;

	/* The kernel refuses other families. */
	if (ctx->protocol != IPPROTO_TCP_ || !sk_of(ctx) || ctx->user_family != (sk6 ? AF_INET6 : AF_INET))
		return NULL;
	tag = bpf_sk_storage_get(&tag_by_sock, sk_of(ctx), 0, 0);
	if (!tag || tag->flags & TAG_PROBE) /* a probe goes where the agent sends it */
		return NULL;
	if (!sk_of(ctx)->src_ip4 && !sk_of(ctx)->src_port)
		tag->flags &= ~TAG_BOUND; /* a bind that failed */
	else if (!(tag->flags & TAG_BOUND))
		unbind_source(ctx, sk6);
	*wild = tag->flags & TAG_BOUND && tag->flags & TAG_WILD;
	tag->flags &= ~(TAG_REMOTE | TAG_NAMES | TAG_ACCEPTED | TAG_SERVICE);
	tag->path = PATH_NONE;
	if (!is_alias(sk_of(ctx)->src_ip4))
		tag->flags &= ~TAG_LOCAL;
	return tag;
}

/* Whether the socket may connect at all, wherever to, and is at an address of its container's; or
 * refuses connect(). */
static __always_inline bool may_connect(struct bpf_sock_addr *ctx, bool sk6, struct sock_tag *tag,
                                        const struct endpoint *ep)
{
	if (!ep)
		return refuse(REASON_REFUSE_UNKNOWN_ENDPOINT, ENETDOWN_);
	if (!count_reused(tag))
		return refuse(REASON_REFUSE_SOCKET_QUOTA, ENFILE_);
	if (stack_refuses(tag))
		return refuse(REASON_REFUSE_STACK, ENETDOWN_);
	if (!restore_source(ctx, sk6, ep))
		return refuse(REASON_REFUSE_BIND_FOREIGN, EADDRNOTAVAIL_);
	return true;
}

/* The socket goes where tag->path says: from here on its profile's settings are what it has. */
static __noinline int connecting_stack(struct bpf_sock_addr *ctx)
{
	struct stack_settings *s;
	struct sock_tag *tag;

	if (!stacks_in_force || ctx->protocol != IPPROTO_TCP_ || !sk_of(ctx))
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, sk_of(ctx), 0, 0);
	if (!tag || tag->flags & TAG_PROBE)
		return 1;
	s = stack_of(tag);
	if (has_stack(tag, s))
		follow_stack(ctx, tag, s, ~(STACK_WINDOW | STACK_ECN));
	return 1;
}

static __always_inline int decide_connect4(struct bpf_sock_addr *ctx)
{
	bool wild = false;
	struct sock_tag *tag = connecting(ctx, false, &wild);
	struct address at = {};
	struct endpoint *ep;

	if (!tag)
		return 1;
	ep = tagged_endpoint(tag);
	if (!may_connect(ctx, false, tag, ep) || !ep)
		return 0;
	get_user_address(ctx, false, &at);
	switch (to_backend(ctx, tag, &at)) {
	case SERVICE_EMPTY:
		count(REASON_REFUSE_NO_BACKEND);
		report_denied(ctx, tag, &at, REASON_REFUSE_NO_BACKEND);
		return connect_refused(ctx, false, false, tag);
	case SERVICE_LOST:
		return refuse(REASON_REFUSE_NO_STORAGE, ENOBUFS_);
	case SERVICE_TAKEN:
		barrier();
		set_user_address(ctx, false, &at);
		barrier();
	}
	return socket4_connects(ctx, tag, ep, at.word[3], wild);
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return decide_connect4(ctx) ? connecting_stack(ctx) : 0;
}

static __always_inline int decide_connect6(struct bpf_sock_addr *ctx)
{
	bool wild = false;
	struct sock_tag *tag = connecting(ctx, true, &wild);
	struct address at = {};
	struct endpoint *ep;
	bool loopback;

	if (!tag)
		return 1;
	ep = tagged_endpoint(tag);
	if (!may_connect(ctx, true, tag, ep) || !ep)
		return 0;
	get_user_address(ctx, true, &at);
	if (!is_mapped(&at) && is_bound_mapped(tag)) {
		if (!is_unspecified6(&at))
			return refuse(REASON_REFUSE_IPV6_UNREACHABLE,
			              is_loopback6(&at) || has_overlay6() ? EAFNOSUPPORT_ : ENETUNREACH_);
		return socket6_connects_ipv4(ctx, tag, ep, LOOPBACK4, wild);
	}
	loopback = is_unspecified6(&at) || is_loopback6(&at);
	switch (is_mapped(&at) ? DEVICE_LEADS : way_of_device(tag, ep, loopback)) {
	case DEVICE_UNKNOWN:
	case DEVICE_NO_ROUTE:
		return refuse(REASON_REFUSE_DEVICE, ENETUNREACH_);
	case DEVICE_SILENT:
		return connect_dropped(ctx, true, true, tag, ep, &at, REASON_REFUSE_DEVICE);
	}
	if (loopback)
		return socket6_connects_loopback(ctx, tag, ep, wild);
	switch (to_backend(ctx, tag, &at)) {
	case SERVICE_EMPTY:
		count(REASON_REFUSE_NO_BACKEND);
		report_denied(ctx, tag, &at, REASON_REFUSE_NO_BACKEND);
		return connect_refused(ctx, true, !is_mapped(&at), tag);
	case SERVICE_LOST:
		return refuse(REASON_REFUSE_NO_STORAGE, ENOBUFS_);
	case SERVICE_TAKEN:
		barrier();
		set_user_address(ctx, true, &at);
		barrier();
	}
	if (!is_mapped(&at))
		return socket6_connects_ipv6(ctx, tag, ep, &at);
	if (tag->flags & TAG_V6ONLY || (tag->flags & TAG_BOUND && tag->flags & TAG_BOUND6))
		return refuse(REASON_REFUSE_IPV6_UNREACHABLE, ENETUNREACH_);
	return socket6_connects_ipv4(ctx, tag, ep, at.word[3], wild);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return decide_connect6(ctx) ? connecting_stack(ctx) : 0;
}

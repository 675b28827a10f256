/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A connection that a listener of a container's accepts: gives its socket the names that the
 * program sees, counts it, and ends what must not be. */
#ifndef HEDDLE_SOCK_ACCEPT_H
#define HEDDLE_SOCK_ACCEPT_H

#include "include/abi/path.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "include/route.h"
#include "policy/decide.h"
#include "sock/account.h"
#include "sock/congestion.h"
#include "sock/context.h"
#include "sock/flow_events.h"
#include "sock/reserved_ports.h"
#include "sock/socket_quota.h"
#include "sock/stack_settings.h"
#include "sock/sockops_context.h"

/* Whether this accepted connection is a direct one: only steering leads packets from there to a
 * listener. */
static __always_inline bool is_direct(struct bpf_sock_ops *ops)
{
	struct flow_key key = remote_first(ops);

	return key.daddr == config_underlay && in_direct_ports(key.dport);
}

/* What the SYN of this accepted direct connection asked for, as steering remembers it. The kernel
 * could save the SYN; but what it saves, with the underlay's addresses, getsockopt(TCP_SAVED_SYN)
 * writes into the program's memory before any hook can refuse it. */
static __always_inline bool accepted_flow(struct bpf_sock_ops *ops, struct flow *flow)
{
	struct flow_key key = remote_first(ops);
	struct flow *remembered = bpf_map_lookup_elem(&flow_by_wire, &key);

	if (!remembered || remembered->kind != FLOW_PLAIN)
		return false;
	*flow = *remembered;
	bpf_map_delete_elem(&flow_by_wire, &key);
	return true;
}

/* Ends a connection that must not be. The socket is tied to a device that no packet of it comes or
 * goes by: to what the peer sends, the kernel answers with a RST. The program is told by ETIMEDOUT,
 * after two seconds or when it sends. */
static __noinline void cut_accepted(struct bpf_sock_ops *ops, struct sock_tag *tag, __u32 reason)
{
	__u32 ifindex = config_divert_ifindex;
	int one = 1;

	if (!tag->reason) /* nothing else has cut it */
		report_flow(ops, tag, FLOW_EVENT_DENIED, reason, 0);
	tag->reason = reason;
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_mapped(&tag->local, 0);
	set_mapped(&tag->remote, 0);
	tag->path = PATH_NONE;
	bpf_setsockopt(ops, SOL_SOCKET_, 62 /* SO_BINDTOIFINDEX */, &ifindex, sizeof(ifindex));
	bpf_setsockopt(ops, SOL_TCP_, 4 /* TCP_KEEPIDLE */, &one, sizeof(one));
	bpf_setsockopt(ops, SOL_TCP_, 5 /* TCP_KEEPINTVL */, &one, sizeof(one));
	bpf_setsockopt(ops, SOL_TCP_, 6 /* TCP_KEEPCNT */, &one, sizeof(one));
	bpf_setsockopt(ops, SOL_TCP_, 18 /* TCP_USER_TIMEOUT, in ms */, &one, sizeof(one));
	bpf_setsockopt(ops, SOL_SOCKET_, 9 /* SO_KEEPALIVE */, &one, sizeof(one));
	count(reason);
}

static __always_inline void accept_direct(struct sock_tag *tag, const struct flow *flow)
{
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_overlay(&tag->local, flow->ipv6, flow->dst);
	tag->local_port = flow->dst_port;
	set_overlay(&tag->remote, flow->ipv6, flow->src);
	tag->path = PATH_DIRECT;
	count(REASON_ACCEPT_DIRECT);
}

/* What was remembered of this accepted connection's SYN: by from_endpoint, if the peer is a process
 * in its container's own namespace (FLOW_PLAIN); by connect, if both ends are one container's
 * (FLOW_NAMES). */
static __always_inline bool remembered_flow(struct bpf_sock_ops *ops, struct flow *flow)
{
	struct flow_key key = remote_first(ops);
	struct flow *found = bpf_map_lookup_elem(&flow_by_wire, &key);

	if (!found)
		return false;
	*flow = *found;
	bpf_map_delete_elem(&flow_by_wire, &key);
	return flow->kind != FLOW_CONTAINERS;
}

/* The container talks to itself: the flow's addresses are those its programs see. 0 is ::1. */
static __always_inline void accept_names(struct sock_tag *tag, const struct flow *flow)
{
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_name(&tag->local, flow->ipv6, flow->dst);
	set_name(&tag->remote, flow->ipv6, flow->src);
	tag->path = !flow->dst || is_loopback4(flow->dst) ? PATH_LOOPBACK : PATH_LOCAL;
}

/* Whether a connection from another container of the node is certainly a node socket's: its last
 * ACK came over lo, and what a container's own stack sends comes out of its veth. Nothing is
 * remembered of such a one, and what is not looked up in a table of two megabytes is not fetched
 * from memory. Of IPv6 it is not told. */
static __always_inline bool came_over_lo(struct bpf_sock_ops *ops, const struct tcp_sock *tcp)
{
	return tcp && !on_ipv6(ops) && ops->remote_ip4 != ops->local_ip4 &&
	       ((struct inet_sock *)tcp)->mc_index == LOOPBACK_IFINDEX;
}

/* A listener's packets are routed, because it cannot know whether a peer on its own node is a node
 * socket or not, and the program on the peer's veth tells them apart. Once it is known that
 * both ends are node sockets, lo is shorter. */
static __always_inline void accept_same_node(struct bpf_sock_ops *ops, struct sock_tag *tag,
                                             const struct tcp_sock *tcp)
{
	struct flow flow = {};

	tag->path = PATH_LOCAL;
	if (!came_over_lo(ops, tcp) && remembered_flow(ops, &flow)) {
		if (flow.kind == FLOW_PLAIN) {
			tag->path = PATH_OVERLAY;
			return;
		}
		accept_names(tag, &flow);
	}
	move_to_lo(ops, tag);
	replace_bbr(ops, tag);
}

/* From a process of the container's own stack. */
static __always_inline void accept_own_stack(struct sock_tag *tag, __be32 remote, __be32 local)
{
	struct endpoint *ep = tagged_endpoint(tag);
	struct flow flow = {};

	if (ep && pod_names(ep, remote, local, &flow))
		accept_names(tag, &flow);
}

/* Whether the peer of an IPv6 connection has an address of the node that is no overlay address. */
static __noinline bool is_from_node6(struct bpf_sock_ops *ops)
{
	struct address peer;

	peer.word[0] = ops->remote_ip6[0];
	peer.word[1] = ops->remote_ip6[1];
	peer.word[2] = ops->remote_ip6[2];
	peer.word[3] = ops->remote_ip6[3];
	return is_node_address6(&peer);
}

/* From a process of the node, or of a container whose connect the node's firewall led here: then it
 * has the node's address, and is named, and judged, by its own. */
static __always_inline void accept_from_node(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	struct flow flow = {};

	tag->path = PATH_NODE;
	if (!remembered_flow(ops, &flow) || flow.kind != FLOW_PLAIN)
		return;
	tag->flags |= TAG_REMOTE;
	set_overlay(&tag->remote, flow.ipv6, flow.src);
	tag->remote_port = (__be16)(ops->remote_port >> 16);
}

/* Not direct: the kernel's addresses are those the program expects, but for loopback. */
static __always_inline void accept_as_is(struct bpf_sock_ops *ops, struct sock_tag *tag,
                                         const struct tcp_sock *tcp)
{
	__be32 remote = remote_address(ops), local = local_address(ops);
	struct flow flow = {};
	struct route *from;

	count(REASON_ACCEPT_LOCAL);
	if (is_mirror(remote)) {
		accept_own_stack(tag, remote, local);
		return;
	}
	if (is_alias(remote) || is_alias(local)) {
		/* The own address stands for a wildcard. */
		flow.src = is_alias(remote) ? loopback_of(remote) : loopback_of(local);
		flow.dst = is_alias(local) ? loopback_of(local) : (is_alias6(remote) ? 0 : LOOPBACK4);
		remembered_flow(ops, &flow);
		accept_names(tag, &flow);
		replace_bbr(ops, tag);
		return;
	}
	from = remote ? route_to(remote) : NULL;
	if (!from && !(on_ipv6(ops) && is_from_node6(ops)))
		tag->path = PATH_OUTSIDE;
	else if (!from)
		accept_from_node(ops, tag);
	else if (from->flags & ROUTE_NODE_ADDR)
		accept_from_node(ops, tag);
	else if (from->flags & ROUTE_SELF)
		accept_same_node(ops, tag, tcp);
	else
		tag->path = PATH_OVERLAY;
}

/* The tables may have changed since the SYN, and the cut have passed while there was but a request.
 * From here on the cut sees the socket; what it would end must not come to be. */
static __noinline bool accept_forbidden(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	struct address remote;

	remote_of(ops, &remote);
	return protects(PROTECT_LATE) &&
	       decide_tagged(tag, &remote, bpf_ntohl(ops->remote_port) << 16 | (__u16)ops->local_port) !=
	               VERDICT_ALLOW;
}

/* Whether a program has the socket: a connection that is accepted is given to one only after this.
 * Then both ends sent a SYN, and the kernel calls the end that connected passive, too. */
static __always_inline bool opened_by_both(const struct tcp_sock *tcp)
{
	return tcp && ((struct sock *)tcp)->sk_socket;
}

/* Whether an accepted connection, no direct one, was made to an address that is not the
 * container's: one of the node, in the moment before listening() tied a listener that is bound to
 * none to a device. */
static __always_inline bool accepted_elsewhere(struct bpf_sock_ops *ops, const struct endpoint *ep)
{
	__be32 local = local_address(ops);

	return ep && local != ep->addr4.word[3] && !is_alias(local) && protects(PROTECT_BIND);
}

static __always_inline void established_passive(struct bpf_sock_ops *ops, struct sock_tag *tag,
                                                const struct tcp_sock *tcp)
{
	/* Looked up once for all that follows. */
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_id, &tag->endpoint_id);
	bool allowed, direct = is_direct(ops);
	struct flow flow = {};

	account_accepted(tag);
	account_follow(ops);
	/* The tag is a copy of the listener's. One on a wildcard leaves its address free, if it is
	 * disconnected. */
	if (tag->flags & TAG_WILD)
		tag->flags &= ~TAG_BOUND;
	tag->flags &= ~(TAGS_OF_NAMES | TAG_NAMES);
	tag->flags |= TAG_ACCEPTED;
	tag->local_port = 0;
	tag->remote_port = 0;
	tag->claim = tag->claim_wish = PORTBIND_NONE;
	tag->options &= ~OPTION_MPTCP; /* not one of a peer that lacks it */
	tag->reason = REASON_NONE;
	tag->flags &= ~TAG_COUNTED;
	allowed = count_socket(ep, tag);
	port_accepted(ops);
	if (!direct && accepted_elsewhere(ops, unless_another(ep, tag)))
		cut_accepted(ops, tag, REASON_CUT_UNKNOWN_PEER);
	else if (!direct)
		accept_as_is(ops, tag, tcp);
	else if (accepted_flow(ops, &flow))
		accept_direct(tag, &flow);
	else if (protects(PROTECT_UNKNOWN_PEER))
		cut_accepted(ops, tag, REASON_CUT_UNKNOWN_PEER);
	if (has_policy() && accept_forbidden(ops, tag))
		cut_accepted(ops, tag, REASON_REFUSE_POLICY_LATE);
	if (stack_refuses(tag))
		cut_accepted(ops, tag, REASON_CUT_STACK);
	if (!allowed)
		cut_accepted(ops, tag, REASON_CUT_SOCKET_QUOTA);
}

#endif

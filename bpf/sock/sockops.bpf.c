/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What happens to a tagged socket after its hooks: it connects, writes the option into its SYN,
 * listens, is accepted (sock/accept.h), ends. */

#include "include/abi/path.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/flow_table.h"
#include "include/headers.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "include/reprobe.h"
#include "include/syn_option.h"
#include "policy/decide.h"
#include "sock/accept.h"
#include "sock/account.h"
#include "sock/congestion.h"
#include "sock/context.h"
#include "sock/firewall.h"
#include "sock/flow_events.h"
#include "sock/portbind.h"
#include "sock/reserved_ports.h"
#include "sock/socket_quota.h"
#include "sock/sockops_context.h"
#include "sock/stack_settings.h"

/* What the agent's probe asks: of a direct path, or of the firewalls (tc/firewall.h). */
static __always_inline __u16 probe_version(const struct sock_tag *tag)
{
	return tag->reason == REASON_FALLBACK_FIREWALL ? OPTION_FIREWALL : OPTION_PROBE;
}

static __always_inline void write_option(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	struct syn_option o;

	if (!tag || tag->path != PATH_DIRECT)
		return;
	o = make_option(is_overlay6(&tag->remote), tag->local.word[3], tag->remote.word[3], tag->remote_port);
	if (tag->flags & TAG_PROBE)
		o.version_network = bpf_htons(probe_version(tag) << 12 | config_network_id);
	else if (ops->total_retrans) /* the first SYN got no answer */
		ask_reprobe(ops->remote_ip4);
	bpf_store_hdr_opt(ops, &o, sizeof(o), 0);
}

/* A connection within the container whose addresses on lo stand for several: tells the accepting
 * side which ones the programs see. 0 is ::1. */
static __always_inline void remember_names(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_id, &tag->endpoint_id);
	struct flow_key remote = remote_first(ops), k = {};
	struct flow flow = {};

	if (!ep)
		return;
	k.saddr = remote.daddr;
	k.daddr = remote.saddr;
	k.sport = remote.dport;
	k.dport = remote.sport;
	k.ipv6 = remote.ipv6;
	flow.src = k.saddr;
	if (tag->flags & TAG_LOCAL)
		flow.src = is_loopback6(&tag->local) ? 0 : tag->local.word[3];
	flow.dst = k.daddr;
	if (tag->flags & TAG_REMOTE)
		flow.dst = is_loopback6(&tag->remote) ? 0 : tag->remote.word[3];
	flow.dst_port = k.dport;
	flow.ipv6 = k.ipv6;
	flow.kind = FLOW_NAMES;
	remember_tuple(&k, &flow, tuple_owner(ep->addr4.word[3]));
}

/* A connection to a crossing address: what stands behind it, for the time when there is no tag. */
static __always_inline void remember_crossing(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	struct flow_key remote = remote_first(ops), k = {};

	k.saddr = remote.daddr;
	k.daddr = remote.saddr;
	k.sport = remote.dport;
	k.dport = remote.sport;
	bpf_map_update_elem(&crossed_by_wire, &k, &tag->remote, BPF_ANY);
}

/* The tables may have changed since connect() was decided, and the cut have passed before the
 * socket was there to be seen. From here on the cut sees it; what is forbidden now must not leave:
 * no SYN, no connection. */
static __always_inline bool now_forbidden(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	__u32 mark = config_drop_mark;
	struct address remote;

	remote_of(ops, &remote);
	if (!protects(PROTECT_LATE) ||
	    decide_tagged(tag, &remote, bpf_ntohl(ops->remote_port) << 16) == VERDICT_ALLOW)
		return false;
	if (bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		return false; /* the cut will find it */
	tag->flags = (tag->flags & ~TAGS_OF_MARK) | TAG_DROPPED;
	tag->path = PATH_NONE;
	count(REASON_REFUSE_POLICY_LATE);
	report_flow(ops, tag, FLOW_EVENT_DENIED, REASON_REFUSE_POLICY_LATE, 0);
	return true;
}

/* The endpoint may have been forgotten since connect() looked it up, and cut_leaving have passed
 * before the socket was there to be seen: no SYN of it leaves, and one retransmission is all that
 * connect() waits for. */
static __always_inline bool is_forgotten(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	__u32 mark = config_drop_mark;
	int once = 1;

	if (tag->flags & TAG_PROBE || tagged_endpoint(tag) || !protects(PROTECT_MIGRATED))
		return false;
	if (bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		return false;
	bpf_setsockopt(ops, SOL_TCP_, 7 /* TCP_SYNCNT */, &once, sizeof(once));
	tag->flags = (tag->flags & ~TAGS_OF_MARK) | TAG_DROPPED;
	tag->path = PATH_NONE;
	count(REASON_REFUSE_UNKNOWN_ENDPOINT);
	report_flow(ops, tag, FLOW_EVENT_DENIED, REASON_REFUSE_UNKNOWN_ENDPOINT, 0);
	return true;
}

/* Whether a connection leads over lo: but for those to a mirror address, which go to the
 * container's own stack. */
static __always_inline bool over_lo(const struct sock_tag *tag)
{
	return tag->path == PATH_LOCAL || tag->path == PATH_LOOPBACK;
}

static __always_inline void connecting_cb(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	if (!over_lo(tag))
		restore_bbr(ops, tag);
	if (is_forgotten(ops, tag) || (has_policy() && now_forbidden(ops, tag)))
		return;
	if (tag->path == PATH_DIRECT)
		bpf_sock_ops_cb_flags_set(ops,
		                          ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	else if (tag->flags & TAG_NAMES)
		remember_names(ops, tag);
	else if (is_crossing(remote_address(ops)))
		remember_crossing(ops, tag);
}

static __always_inline void established_active(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	passes_firewall(ops, tag);
	if (!over_lo(tag))
		return;
	/* Its SYN had to be steered to a listener on [::] or ::1. */
	if (tag->flags & TAG_ROUTED)
		move_to_lo(ops, tag);
	if (!is_mirror(remote_address(ops)))
		replace_bbr(ops, tag);
}

/* Whether a socket that begins to listen without bind() is at an address of the node: at all of
 * them, after a bind() that failed, or at the one that a direct connection had, which failed or
 * which the program undid (AF_UNSPEC). */
static __always_inline bool listens_at_node(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	__be32 at = ops->local_ip4;
	struct endpoint *ep;

	if (!at)
		return true;
	if (at == LOOPBACK4_IPV6 || is_alias(at) || !protects(PROTECT_BIND))
		return false;
	ep = tagged_endpoint(tag);
	return !ep || at != ep->addr4.word[3];
}

/* listen() without bind(): the agent has placed the socket at its container's address, and there
 * the kernel has chosen a port. It listens as if it were bound to a wildcard, but what comes after
 * is not bound. False: it is elsewhere, or is IPV6_V6ONLY, which IPv4 would reach there. */
static __always_inline bool listens_unbound(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	bool v6 = ops->family == AF_INET6;
	struct portbinds *c;
	struct tcp_sock *tcp;

	if (listens_at_node(ops, tag) || tag->flags & TAG_V6ONLY)
		return false;
	if (is_alias(ops->local_ip4))
		return true; /* left by a connect to loopback */
	tag->flags |= TAG_WILD | (v6 ? TAG_ANY6 : 0);
	release_portbind(tag); /* of a port where it listened before */
	tcp = ops->sk ? bpf_skc_to_tcp_sock(ops->sk) : NULL;
	request_portbind(tag, v6 ? PORTBIND_ANY : PORTBIND_ANY4, true);
	c = make_portbind(tag, ops->local_port, tcp ? ((struct sock *)tcp)->sk_uid.val : 0);
	if (c)
		c->uid = tag->claim_uid;
	return true;
}

/* What is accepted starts with its listener's settings. */
static __noinline int listening_stack(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	struct stack_settings *s;

	if (!tag)
		return 0;
	s = stack_of(tag);
	if (has_stack(tag, s))
		follow_stack(ops, tag, s, ~(STACK_WINDOW | STACK_ECN));
	return 0;
}

/* The first window can be set when the connection is there, and before it has sent. */
static __always_inline void set_window(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	struct stack_settings *s = stack_of(tag);

	if (s && s->set & STACK_WINDOW)
		set_int(ops, SOL_TCP_, TCP_BPF_IW_, s->window);
}

/* The settings of the endpoint that a SYN is for: a request has no socket of its own to ask. */
static __noinline struct stack_settings *stack_of_request(struct bpf_sock_ops *ops)
{
	struct flow_key key = remote_first(ops);
	struct address at = {};
	struct endpoint *ep;
	struct flow *flow;

	set_mapped(&at, key.daddr);
	if (is_direct(ops)) {
		flow = bpf_map_lookup_elem(&flow_by_wire, &key);
		if (!flow)
			return NULL;
		set_mapped(&at, flow->dst);
	} else if (ops->family == AF_INET6 && !key.daddr) {
		at.word[0] = ops->local_ip6[0];
		at.word[1] = ops->local_ip6[1];
		at.word[2] = ops->local_ip6[2];
		at.word[3] = ops->local_ip6[3];
	}
	ep = bpf_map_lookup_elem(&endpoint_by_addr, &at);
	return ep ? bpf_map_lookup_elem(&stack_by_endpoint, &ep->id) : NULL;
}

/* The kernel asks whether ECN is to be asked for, or to be accepted. What a program tells it to
 * ask for, it asks for with an ECN-capable SYN, as DCTCP does: only a listener that is told to
 * accept that does. */
static __always_inline void asks_for_ecn(struct bpf_sock_ops *ops)
{
	struct stack_settings *s;
	struct sock_tag *tag;

	if (!stacks_in_force)
		return;
	if (ops->sk) {
		tag = tag_of(ops);
		s = tag ? stack_of(tag) : NULL;
	} else {
		s = stack_of_request(ops);
	}
	if (s && s->set & STACK_ECN)
		ops->reply = 1;
}

static __always_inline void listening(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	__u32 mark = config_overlay_mark;
	bool reached;

	if (!tag)
		return;
	restore_bbr(ops, tag);
	listening_stack(ops, tag);
	/* a mark of its connections that are established (uncount_unaccepted) */
	tag->flags &= ~TAG_ACCEPTED;
	/* listen() cannot be refused here: above the limit what it accepts ends
	 * (established_passive). */
	if (!(tag->flags & TAG_COUNTED))
		count_socket(bpf_map_lookup_elem(&endpoint_by_id, &tag->endpoint_id), tag);
	port_listens(ops, tag);
	tag->path = PATH_LISTEN;
	reached = tag->flags & TAG_BOUND ? !listens_at_node(ops, tag) : listens_unbound(ops, tag);
	set_portbind_flag(tag, PORTBIND_LISTENS, true);
	/* Tied to the divert device, nothing outside can reach it. */
	if (!reached) {
		__u32 ifindex = config_divert_ifindex;

		bpf_setsockopt(ops, SOL_SOCKET_, 62 /* SO_BINDTOIFINDEX */, &ifindex, sizeof(ifindex));
		count(REASON_REFUSE_LISTEN_UNBOUND);
	}
	/* Only the container itself reaches its loopback, and over lo. */
	if (is_alias(ops->local_ip4)) {
		if (tag->flags & TAG_DROPPED)
			move_to_lo(ops, tag);
		return;
	}
	if (!bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		tag->flags = (tag->flags & ~TAGS_OF_MARK) | TAG_ROUTED;
}

/* BPF_SOCK_OPS_STATE_CB, of the two states that mean something here: a connection ends, or both
 * ends send a SYN. */
static __always_inline void state_changes(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tcp;

	if (!tag || !sk)
		return;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (tcp) {
		account_state(ops, tag, tcp);
		uncount_unaccepted(ops, tag, tcp);
		flow_ends(ops, tag);
	}
	port_state(ops, tag);
}

static __always_inline void connects(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);

	if (!tag)
		return;
	if (!(tag->flags & TAG_PROBE))
		account_follow(ops);
	port_connects(ops);
	connecting_cb(ops, tag);
}

static __always_inline void connected(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);

	if (tag) {
		account_opened(tag);
		established_active(ops, tag);
		set_window(ops, tag);
		flow_opens(ops, tag);
	}
	/* Only the SYN and its retransmissions carry the option. */
	if (ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG)
		bpf_sock_ops_cb_flags_set(ops,
		                          ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
}

static __always_inline void accepted(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tcp;

	if (!tag || tag->flags & TAG_PROBE || !sk)
		return;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (opened_by_both(tcp))
		account_opened(tag);
	else
		established_passive(ops, tag, tcp);
	set_window(ops, tag);
	if (!(tag->flags & TAG_ACCEPTED && tag->reason)) /* cut_accepted has reported it */
		flow_opens(ops, tag);
}

/* Runs some ten times a connection, mostly for what is not asked for (the kernel's questions for
 * timeouts, windows and ECN) or needs nothing: such a run must end soon. */
SEC("sockops")
int tcp_events(struct bpf_sock_ops *ops)
{
	switch (ops->op) {
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] == BPF_TCP_CLOSE || ops->args[1] == BPF_TCP_SYN_RECV)
			state_changes(ops);
		break;
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		connects(ops);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		listening(ops);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		if (ops->skb_tcp_flags & TCP_FLAG_SYN_)
			bpf_reserve_hdr_opt(ops, sizeof(struct syn_option), 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		if (ops->skb_tcp_flags & TCP_FLAG_SYN_)
			write_option(ops);
		break;
	case BPF_SOCK_OPS_NEEDS_ECN:
		asks_for_ecn(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		connected(ops);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		accepted(ops);
		break;
	}
	return 1;
}

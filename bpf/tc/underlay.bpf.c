/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the underlay device: SYNs of direct connections, the overlay, and hosts outside. */

#include "include/config.h"
#include "include/endpoint.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/once.h"
#include "include/route.h"
#include "policy/decide.h"
#include "policy/filter.h"
#include "tc/antispoof.h"
#include "tc/divert.h"
#include "tc/native.h"
#include "tc/packet.h"
#include "tc/probe.h"
#include "tc/redirect.h"
#include "tc/relay.h"
#include "tc/steer.h"
#include "tc/tunnel.h"
#include "tc/wire.h"

/* What the underlay device brings for an overlay address, if it is for one: of a host outside. With
 * policy not only SYNs: the last ACK of a handshake may come when the rules are others, with data
 * that nobody is to read. */
static __noinline int from_outside(struct __sk_buff *skb, const struct packet *p)
{
	struct endpoint *ep;
	bool taken = false;
	int action;

	if (!p)
		return TC_ACT_SHOT;
	ep = endpoint_at(p->ip.daddr);
	if (!ep || is_mirror(p->ip.saddr))
		return TC_ACT_OK;
	action = filter_tcp(skb, p, 0, 0, 0);
	return action == FILTER_PASS ? towards(skb, p, ep, 0, &taken) : action;
}

/* What comes after a SYN that is remembered. Not in from_underlay itself, whose way of a SYN needs
 * all of the stack. */
static __noinline int steer_later(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k,
                                  struct flow *flow)
{
	struct endpoint *ep;
	struct flow_key back;
	__u32 state = 0;

	if (!p || !k || !flow)
		return TC_ACT_OK;
	/* Policy may have changed since the SYN. A RST of the sender, whose connection was cut,
	 * ends the other end. */
	if (has_policy() && !(p->tcp.flags & TCP_FLAG_RST_) && decide_flow(flow)) {
		if (flow->kind == FLOW_RELAY && !has_ended(flow))
			relay_ends(k, flow, REASON_CUT_POLICY, 0);
		return stop(skb, VERDICT_REJECT);
	}
	/* Its container was made anew, or is gone: the node says that it knows no such connection. */
	if (flow->kind == FLOW_RELAY && !relay_leads(flow)) {
		back = relay_key(flow, flow->relay_port);
		bpf_map_delete_elem(&wire_by_relay, &back);
		bpf_map_delete_elem(&flow_by_wire, k);
		return TC_ACT_OK;
	}
	if (flow->kind == FLOW_RELAY) {
		note_established(flow, k, p);
		note_end(flow, k, p, ENDED_BY_SENDER);
		restore_back(k, flow);
		return relay_forward(skb, p, flow);
	}
	if (has_socket(skb, k, &state))
		return TC_ACT_OK;
	/* The ACK of a SYN cookie: only the listener can make a connection of it. */
	ep = endpoint_at(flow->dst);
	if (ep)
		assign_listener(skb, flow, ep->id);
	return TC_ACT_OK;
}

/* Whether some socket of the node matches packet p for endpoint owner: then from_overlay sees to
 * it. */
static __noinline bool matches_socket(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = p ? find_socket(skb, p, owner) : NULL;

	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Whether packet p, without a tunnel, needs nothing of from_overlay on its way to endpoint ep but
 * policy. */
static __always_inline bool goes_straight(struct __sk_buff *skb, const struct packet *p, int kind,
                                          const struct endpoint *ep)
{
	if (kind != PACKET_TCP)
		return true;
	/* What begins a connection may be a probe of the firewalls, or the answer to one. */
	if (p->tcp.flags & TCP_FLAG_SYN_)
		return false;
	if (!(ep->flags & ENDPOINT_INTERCEPTED))
		return true;
	return !(ep->flags & ENDPOINT_STACK) && !may_cross(ep->id) && !matches_socket(skb, p, ep->id);
}

/* A packet that came without a tunnel, for endpoint ep, or nobody known (NULL): into its container
 * at once if nothing else of the node is about it, or as one that the overlay's device brings, as
 * decapsulate has it. */
static __noinline int enter_native(struct __sk_buff *skb, const struct packet *p, int kind,
                                   const struct endpoint *ep)
{
	__u8 vtep[6];
	int i, action;

	if (!p)
		return TC_ACT_SHOT;
	if (ep && goes_straight(skb, p, kind, ep)) {
		action = kind == PACKET_TCP ? filter_tcp(skb, p, 0, 0, 0) : filter_other(skb, p, 0, 0, 0);
		if (action == FILTER_PASS)
			action = enter(skb, p, ep);
		if (action != TC_ACT_OK)
			return action;
		skb->tc_index = INDEX_JUDGED;
	}
	for (i = 0; i < 6; i++)
		vtep[i] = config_vtep[i];
	if (bpf_skb_store_bytes(skb, 0, vtep, sizeof(vtep), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_overlay_ifindex, BPF_F_INGRESS);
}

/* A packet of the overlay that refuse_overlay let pass and called plain. */
static __always_inline int arrive(struct __sk_buff *skb)
{
	if (decapsulate(skb))
		return bpf_redirect(config_overlay_ifindex, BPF_F_INGRESS);
	count(REASON_TUNNEL_DEVICE);
	return TC_ACT_OK;
}

static __always_inline int from_underlay_verdict(struct __sk_buff *skb)
{
	struct endpoint *ep = NULL;
	struct packet p;
	struct flow_key k;
	struct flow *flow;
	bool plain = false, known = false;
	__be32 sender;
	int kind, verdict;
	__u32 reason;

	if (has_index(skb, INDEX_JUDGED) || has_index(skb, INDEX_QUEUED))
		skb->tc_index = 0;
	if (is_translated() && skb->ifindex == config_outer_ifindex) {
		kind = from_wire(skb);
		if (kind != NOT_OF_NODES)
			return kind;
	}
	kind = read_packet(skb, &p);
	/* nftables sees to other devices; here nothing of it is to be remembered. */
	if (config_underlay_inner && skb->ifindex != config_underlay_ifindex && kind != PACKET_OTHER &&
	    p.ip.daddr == config_underlay)
		return drop(REASON_DROP_PLAIN);
	if (kind != PACKET_OTHER && p.ip.daddr != config_underlay) {
		sender = native_sender(skb, &p, &ep, &known);
		if (sender) {
			verdict = arrive_native(skb, &p, sender, known);
			return verdict == TC_ACT_UNSPEC ? enter_native(skb, &p, kind, ep) : verdict;
		}
	}
	if (kind != PACKET_TCP) {
		reason = refuse_overlay(skb, &plain);
		if (!reason && plain)
			return arrive(skb);
		/* What is for the node's own address is most of it, and no container's. */
		if (!reason && kind == PACKET_IP && p.ip.daddr != config_underlay)
			reason = refuse_outsider(&p);
		return reason ? drop(reason) : TC_ACT_OK;
	}
	if (p.ip.daddr != config_underlay) {
		/* Also where it is for another node's: this one would send it on by the overlay. */
		reason = refuse_outsider(&p);
		if (reason)
			return drop(reason);
		return is_syn(&p) || has_policy() ? from_outside(skb, &p) : TC_ACT_OK;
	}
	if (!in_direct_ports(p.tcp.dest))
		return TC_ACT_OK;
	k = packet_tuple(&p);
	if (is_syn(&p)) {
		kind = steer_syn(skb, &p, &k);
		return kind == SYN_IS_PROBE ? steer_probe(skb, &p, &k) : kind;
	}
	/* Established connections have no entry: this lookup is all they pay. */
	flow = bpf_map_lookup_elem(&flow_by_wire, &k);
	return flow ? steer_later(skb, &p, &k, flow) : TC_ACT_OK;
}

/* Where the underlay's device has no Ethernet header, what comes by it gets an empty one: all that
 * looks at packets expects it, and the kernel skips it again. */
static __always_inline int add_header(struct __sk_buff *skb)
{
	if (!config_underlay_raw || skb->ifindex != config_underlay_ifindex)
		return 0;
	return bpf_skb_change_head(skb, ETH_HLEN, 0);
}

/* Also on the device of the outer addresses, if the node has an inner one: hosts outside come by
 * that, and what is translated. */
SEC("tc")
int from_underlay(struct __sk_buff *skb)
{
	if (add_header(skb))
		return TC_ACT_SHOT;
	return or_next_filter(from_underlay_verdict(skb));
}

/* Egress of the device by which inner addresses are reached on an IPv6 underlay. */
SEC("tc")
int to_wire(struct __sk_buff *skb)
{
	return is_translated() ? to_wire_verdict(skb) : drop(REASON_DROP_UNTRANSLATED);
}

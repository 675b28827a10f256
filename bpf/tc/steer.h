/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the underlay device: hands the SYN of a direct connection to the listener its option
 * names. All later packets find their socket by the kernel's own 4-tuple lookup. */
#ifndef HEDDLE_TC_STEER_H
#define HEDDLE_TC_STEER_H

#include "include/address.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/flow_table.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/route.h"
#include "include/syn_option.h"
#include "policy/decide.h"
#include "tc/packet.h"
#include "tc/relay.h"
#include "tc/tcp_option.h"
#include "tc/time_wait.h"

/* Why the sender may not speak for o->src; REASON_NONE if it may. */
static __always_inline __u32 reject_sender(__be32 underlay, const struct syn_option *o)
{
	struct address key;
	struct route *from;

	set_mapped(&key, underlay);
	if (!bpf_map_lookup_elem(&node_by_underlay, &key))
		return REASON_DROP_UNKNOWN_NODE;
	from = route_to(o->src);
	if (!from || from->underlay.word[3] != underlay)
		return REASON_DROP_SOURCE_NOT_OF_NODE;
	return REASON_NONE;
}

/* Whether the kernel already has a socket for exactly this 4-tuple, and may go on alone. A
 * socket in TIME_WAIT does not count: it has no listener to hand a new SYN to. */
static __always_inline bool has_socket(struct __sk_buff *skb, const struct flow_key *k, __u32 *state)
{
	struct bpf_sock *sk = lookup(skb, k->saddr, k->sport, k->daddr, k->dport);
	bool live = false;

	if (!sk)
		return false;
	*state = sk->state;
	live = sk->state != BPF_TCP_LISTEN && sk->state != BPF_TCP_TIME_WAIT;
	bpf_sk_release(sk);
	return live;
}

/* Fills in what the connection that SYN option o asks for is to be remembered by. */
static __always_inline void set_flow(struct flow *flow, const struct syn_option *o)
{
	flow->src = o->src;
	flow->dst = o->dst;
	flow->dst_port = o->dst_port;
	flow->ipv6 = option_is_ipv6(o);
}

/* What assign_listener did. */
enum assign_outcome {
	ASSIGN_NONE, /* no such listener */
	ASSIGN_DONE,
	ASSIGN_REFUSED,  /* by the kernel: see config_relay_groups */
	ASSIGN_REFUSED4, /* the same, and the listener is at the IPv4 address for either family */
};

/* Assigns the packet to the listener dst:dst_port of endpoint owner. */
static __always_inline int assign_listener(struct __sk_buff *skb, const struct flow *flow, __u32 owner)
{
	struct bpf_sock *sk = find_listener(skb, flow->ipv6, flow->src, flow->dst, flow->dst_port, owner);
	int outcome = ASSIGN_DONE;

	if (!sk)
		return ASSIGN_NONE;
	if (bpf_sk_assign(skb, sk, 0))
		outcome = config_relay_groups && takes_ipv6(sk, owner) ? ASSIGN_REFUSED4 : ASSIGN_REFUSED;
	bpf_sk_release(sk);
	return outcome;
}

/* Gives the verdict, or SYN_IS_PROBE: for steer_probe, which the caller calls because the stack is
 * full here. */
#define SYN_IS_PROBE 0x100

static __noinline int steer_syn(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	struct syn_option o = {};
	struct endpoint *ep;
	struct flow flow = {};
	__u32 reason, verdict, ifindex, state = 0;
	int found;

	found = find_option(skb, p, &o);
	if (found == 0)
		return TC_ACT_OK; /* not for Heddle: the kernel answers with a RST */
	if (found < 0)
		return drop(REASON_DROP_OPTION_MALFORMED);
	reason = reject_option(&o);
	if (!reason && protects(PROTECT_SYN_SENDER))
		reason = reject_sender(k->saddr, &o);
	if (reason)
		return drop(reason);
	if (option_is_probe(&o))
		return SYN_IS_PROBE;
	set_flow(&flow, &o);
	verdict = has_policy() ? decide_flow(&flow) : VERDICT_ALLOW;
	if (verdict) {
		report_stopped(&flow, k->sport, verdict);
		return stop(skb, verdict);
	}
	if (has_socket(skb, k, &state)) { /* retransmitted */
		/* It will be needed yet. If it was forgotten meanwhile, this SYN says it again. */
		if (state == BPF_TCP_NEW_SYN_RECV && !bpf_map_lookup_elem(&flow_by_wire, k))
			remember_tuple(k, &flow, tuple_owner(flow.src));
		return TC_ACT_OK;
	}
	if (state == BPF_TCP_TIME_WAIT) {
		if (end_time_wait(skb, p, BPF_F_INGRESS) > 0)
			count(REASON_TIME_WAIT_ENDED);
		/* a RST by now; or an old duplicate, which the kernel answers with an ACK */
		return TC_ACT_OK;
	}
	if (skb->mark == SYN_RETURNED) {
		barrier();
		skb->mark = 0;
	}
	ep = endpoint_at(o.dst);
	if (!ep) {
		count(REASON_DROP_NO_ENDPOINT);
		return TC_ACT_OK; /* RST: the sender sees a refusal at once */
	}
	ifindex = ep->ifindex;
	found = assign_listener(skb, &flow, ep->id);
	if (found == ASSIGN_DONE) {
		/* A busy map refuses now and then. Who connects is not known without it: better the
		 * sender tries again. */
		if (!remember_tuple(k, &flow, tuple_owner(flow.src)))
			return drop(REASON_DROP_NOT_REMEMBERED);
		return TC_ACT_OK;
	}
	if (config_relay_groups && found != ASSIGN_NONE) {
		ifindex = config_divert_ifindex;
		if (found == ASSIGN_REFUSED4)
			flow.ipv6 = 0; /* where the kernel's own lookup finds it */
	}
	return relay_open(skb, p, k, &flow, ifindex);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Events of connections that are relayed to a listener which is not intercepted: they have no
 * socket of the node to tell of them. What they carry is told by their other end. */
#ifndef HEDDLE_RELAY_EVENTS_H
#define HEDDLE_RELAY_EVENTS_H

#include "include/abi/flow.h"
#include "include/abi/path.h"
#include "include/address.h"
#include "include/endpoint.h"
#include "include/event_share.h"

/* Sets such a cookie apart from the kernel's, which count up, and from those of stack modules. */
#define RELAY_COOKIE (1ULL << 62)

static __always_inline __u64 digest_tuple(const struct flow_key *k)
{
	__u64 h = ((__u64)k->saddr << 32 | k->daddr) * 0x9e3779b97f4a7c15ULL;

	h ^= h >> 32;
	h = (h ^ ((__u64)k->sport << 32 | (__u32)k->dport << 16 | k->ipv6)) * 0xff51afd7ed558ccdULL;
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	return h ^ h >> 33;
}

/* Whether both ends of a relayed connection said that it ends. */
static __always_inline bool has_ended(const struct flow *flow)
{
	return (flow->ended & ENDED) == ENDED;
}

/* Notes more in flow.ended, and gives what was there before: both ends may say something at once,
 * on two processors. */
static __always_inline __u16 add_ended(struct flow *flow, __u16 more)
{
	_Static_assert(__builtin_offsetof(struct flow, ended) ==
	                       __builtin_offsetof(struct flow, relay_port) + 2,
	               "the upper half, little endian, of a word that has its alignment");

	return __sync_fetch_and_or((__u32 *)(void *)&flow->relay_port, (__u32)more << 16) >> 16;
}

/* The endpoint of a relayed connection; NULL: it is gone. */
static __always_inline struct endpoint *relayed_to(const struct flow *flow)
{
	__u32 ifindex = flow->ifindex;

	return bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
}

static __always_inline void submit_relay(struct flow_event *e, const struct flow_key *key,
                                         const struct flow *flow, __u32 reason, __u32 error)
{
	e->protocol = IPPROTO_TCP_;
	set_overlay(&e->local, flow->ipv6, flow->dst);
	set_overlay(&e->remote, flow->ipv6, flow->src);
	e->local_port = flow->dst_port;
	e->remote_port = key->sport;
	e->cookie = digest_tuple(key) >> 2 | RELAY_COOKIE;
	e->path = PATH_DIRECT;
	e->reason = reason;
	e->accepted = 1;
	e->bytes_sent = e->bytes_received = 0;
	e->retransmits = e->rtt = 0;
	e->error = error;
	e->opened = 0;
	submit_event(e);
}

/* Reports what happens to the relayed connection that is key on the underlay. Not static, so that
 * the verifier looks at it once. */
__noinline int report_relay(const struct flow_key *key, const struct flow *flow, __u32 kind, __u32 reason,
                            __u32 error)
{
	struct flow_event *e;
	struct endpoint *ep;

	if (!key || !flow)
		return 0;
	ep = relayed_to(flow);
	if (!ep)
		return 0;
	e = reserve_event(ep->id, kind);
	if (e)
		submit_relay(e, key, flow, reason, error);
	return 0;
}

/* Reports that one is pushed out of memory. Its caller's stack is full: no shares are counted, so
 * that none is told of when the ring is. */
static __always_inline void report_forgotten(const struct flow_key *key, const struct flow *flow)
{
	struct endpoint *ep;
	struct flow_event *e;

	if (!(flow->ended & RELAY_TOLD))
		return;
	ep = relayed_to(flow);
	if (!ep)
		return;
	e = has_room() ? new_event(ep->id, FLOW_EVENT_ENDED) : NULL;
	if (e)
		submit_relay(e, key, flow, REASON_CUT_RELAY_FORGOTTEN, 0);
	else
		count(REASON_LOST_FLOW_EVENT);
}

/* The end of a connection whose beginning was told of, once. */
static __always_inline void relay_ends(const struct flow_key *key, struct flow *flow, __u32 reason,
                                       __u32 error)
{
	if (flow->ended & RELAY_TOLD)
		report_relay(key, flow, FLOW_EVENT_ENDED, reason, error);
	flow->ended = ENDED;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Events of packets: of flows that are no intercepted socket's, and of what policy does not let
 * through. A sender has a few a second, so that they are a sample; a packet of a flow that is known
 * makes none. */
#ifndef HEDDLE_POLICY_PACKET_EVENTS_H
#define HEDDLE_POLICY_PACKET_EVENTS_H

#include "include/abi/path.h"
#include "include/address.h"
#include "include/clock.h"
#include "include/count.h"
#include "include/event_share.h"
#include "policy/flow_set.h"

/* Reports what becomes of the packet of f. out: it comes out of a container of this node. reason:
 * 0, or why it is not let through. Not static, so that the verifier looks at it once. */
__noinline int report_packet(const struct flow_id *f, __u32 reason, bool out)
{
	struct flow_event *e;
	bool ports;

	if (!f)
		return 0;
	if (!has_share(SHARER_ADDRESS, owner_of(f), now_units(), PACKET_EVENTS)) {
		count(REASON_LOST_PACKET_EVENT);
		return 0;
	}
	e = bpf_ringbuf_reserve(&flow_events, sizeof(*e), 0);
	if (!e) {
		count(REASON_LOST_FLOW_EVENT);
		return 0;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time = bpf_ktime_get_ns();
	e->kind = reason ? FLOW_EVENT_PACKET_DENIED : FLOW_EVENT_PACKET_PASSED;
	e->reason = reason;
	e->path = PATH_NONE;
	e->protocol = f->protocol;
	e->accepted = !out;
	ports = f->protocol == IPPROTO_TCP_ || f->protocol == IPPROTO_UDP_;
	e->local = out ? f->from : f->to;
	e->remote = out ? f->to : f->from;
	if (ports) {
		e->local_port = out ? f->sport : f->dport;
		e->remote_port = out ? f->dport : f->sport;
	}
	submit_event(e);
	return 0;
}

#endif

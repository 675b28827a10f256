/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Who may have how much of the ring of events: a flood of one container's must not push out what is
 * to be told of others. */
#ifndef HEDDLE_EVENT_SHARE_H
#define HEDDLE_EVENT_SHARE_H

#include "include/abi/flow_event.h"
#include "include/count.h"
#include "include/maps.h"
#include "include/protection.h"

/* Waking the agent costs more than all the rest. So it looks by itself ten times a second, and is
 * woken only when so many bytes wait. */
#define FLOW_EVENTS_WAKE (FLOW_EVENTS_BYTES / 4)

/* When the ring is half full, an endpoint gets so many more until the agent has read a quarter of
 * it: an agent that gets no processor time has room for 40 endpoints that do all they can. */
#define FLOW_EVENTS_SCARCE (FLOW_EVENTS_BYTES / 2)
#define SCARCE_EVENTS      256

/* Of packets each sender has so many in a unit of 2^30 nanoseconds. */
#define PACKET_EVENTS 32

/* Whether a sharer may have one more of at most so many in a window. */
static __always_inline bool has_share(__u32 sharer, __u32 number, __u64 window, __u64 most)
{
	__u64 key = (__u64)sharer << 32 | number;
	struct event_share first = {.window = window, .count = 1};
	struct event_share *s;

	if (!protects(PROTECT_FLOW_SHARE))
		return true;
	s = bpf_map_lookup_elem(&event_shares, &key);
	if (!s) {
		bpf_map_update_elem(&event_shares, &key, &first, BPF_ANY);
		return true;
	}
	if (s->window != window) {
		s->count = 0;
		s->window = window;
	}
	if (s->count >= most)
		return false;
	__sync_fetch_and_add(&s->count, 1);
	return true;
}

/* Whether the ring is not half full. */
static __always_inline bool has_room(void)
{
	return bpf_ringbuf_query(&flow_events, BPF_RB_AVAIL_DATA) < FLOW_EVENTS_SCARCE;
}

/* A record for an event of an endpoint's connection; NULL: the ring is full. */
static __always_inline struct flow_event *new_event(__u32 endpoint_id, __u32 kind)
{
	struct flow_event *e = bpf_ringbuf_reserve(&flow_events, sizeof(*e), 0);

	if (!e)
		return NULL;
	e->time = bpf_ktime_get_ns();
	e->endpoint_id = endpoint_id;
	e->kind = kind;
	e->pad = 0;
	return e;
}

/* Whether an endpoint has a share left of a ring that is half full. Not static, so that it is not
 * in the way of what mostly runs. */
__noinline int has_scarce(__u32 endpoint_id)
{
	__u64 window = bpf_ringbuf_query(&flow_events, BPF_RB_CONS_POS) / (FLOW_EVENTS_BYTES / 4);

	return has_share(SHARER_ENDPOINT, endpoint_id, window, SCARCE_EVENTS);
}

/* The same as new_event, or NULL if the endpoint has had its share; either is counted. */
static __always_inline struct flow_event *reserve_event(__u32 endpoint_id, __u32 kind)
{
	struct flow_event *e = NULL;

	if (has_room() || has_scarce(endpoint_id))
		e = new_event(endpoint_id, kind);
	if (!e)
		count(REASON_LOST_FLOW_EVENT);
	return e;
}

/* submit_event sends a record, and wakes the agent if many wait. */
static __always_inline void submit_event(struct flow_event *e)
{
	bool wake = bpf_ringbuf_query(&flow_events, BPF_RB_AVAIL_DATA) >= FLOW_EVENTS_WAKE;

	bpf_ringbuf_submit(e, wake ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
}

#endif

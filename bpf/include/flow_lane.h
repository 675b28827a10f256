/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Events by a processor's own lane: no lock, and no processor waits for memory of another's. The
 * ring costs more (docs/decisions/0087-flows-by-a-ring-that-wakes-nobody.md). */
#ifndef HEDDLE_FLOW_LANE_H
#define HEDDLE_FLOW_LANE_H

#include "include/abi/flow_event.h"
#include "include/config.h"
#include "include/maps.h"

/* Programs that interrupt each other between looking whether there is room and taking a slot: far
 * fewer than this. */
#define LANE_NESTED 16

/* When so many wait, the agent is woken. */
#define LANE_WAKE (FLOW_LANE_SLOTS / 2)

/* Wakes the agent: by a record that is none. */
static __always_inline void wake_agent(void)
{
	__u64 nothing = 0;

	bpf_ringbuf_output(&flow_events, &nothing, sizeof(nothing), BPF_RB_FORCE_WAKEUP);
}

/* Takes a slot of this processor's lane; NULL: it is full. turn is for publish_slot. */
static __always_inline struct flow_slot *take_slot(__u64 *turn)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct flow_lane *lane = bpf_map_lookup_elem(&flow_lanes, &cpu);
	__u64 tail, at;

	if (!lane)
		return NULL;
	tail = *(volatile __u64 *)&lane->tail;
	if (*(volatile __u64 *)&lane->head - tail >= FLOW_LANE_SLOTS - LANE_NESTED)
		return NULL;
	at = __sync_fetch_and_add(&lane->head, 1);
	if (at - tail == LANE_WAKE)
		wake_agent();
	*turn = at + 1;
	return &lane->slots[at & (FLOW_LANE_SLOTS - 1)];
}

/* Lets the agent see what is in a slot. An atomic exchange would wait until the slot's memory is
 * there: only where stores are not ordered without. */
static __always_inline void publish_slot(struct flow_slot *slot, __u64 turn)
{
	if (config_ordered_stores) {
		asm volatile("" ::: "memory");
		*(volatile __u64 *)&slot->turn = turn;
	} else {
		__sync_lock_test_and_set(&slot->turn, turn);
	}
}

#endif

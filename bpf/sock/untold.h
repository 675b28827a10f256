/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Openings that are not told at once. Most connections end soon: what is remembered of their
 * opening is told with their end, by one event and not by two. Those that live are told of by a
 * pass of the agent's (iter/unlocked.bpf.c). */
#ifndef HEDDLE_SOCK_UNTOLD_H
#define HEDDLE_SOCK_UNTOLD_H

#include "include/abi/portbind.h"
#include "include/abi/tag.h"
#include "include/kernel.h"

/* Until when an opening may be left to a pass, as bpf_ktime_get_ns() has it. The agent puts it off
 * as long as it makes them: where there is none, openings are told at once. */
volatile __u64 passes_until = 0;

/* Whether a pass would find something. Set by programs, cleared by the agent before it looks. */
volatile __u32 untold = 0;

/* How long an opening waits for the end to be told with. */
#define UNTOLD_FOR (500 * 1000 * 1000ULL)

/* A time in a tag is in units of 1,024 ns: 48 bits last for nine years. */
#define UNTOLD_SHIFT 10

/* Remembers when a connection opened; false: it is to be told at once, as is one that is not as
 * usual, and one whose tag has a bind's port. */
static __always_inline bool remember_opening(struct sock_tag *tag)
{
	__u64 now = bpf_ktime_get_ns(), at = now >> UNTOLD_SHIFT;

	if (now >= passes_until || tag->reason || tag->claim != PORTBIND_NONE ||
	    tag->claim_wish != PORTBIND_NONE)
		return false;
	tag->claim_port = at >> 32;
	/* Never 0, which is taken. In order, as a pass looks at the flag first. */
	__sync_lock_test_and_set(&tag->claim_uid, (__u32)at | 1);
	tag->flags |= TAG_UNTOLD;
	if (!untold) /* so that processors share the line */
		untold = 1;
	return true;
}

/* Whether a connection opened so long ago that a pass is to tell of it. */
static __always_inline bool is_due(const struct sock_tag *tag)
{
	__u64 at = ((__u64)tag->claim_port << 32 | tag->claim_uid) << UNTOLD_SHIFT;

	return at + UNTOLD_FOR <= bpf_ktime_get_ns();
}

/* When a connection opened, if that is to be told yet, else 0. Of an end and a pass at the same
 * moment one gets it. */
static __always_inline __u64 take_opening(struct sock_tag *tag)
{
	__u64 high = (__u64)tag->claim_port << 32;
	__u32 low = __sync_lock_test_and_set(&tag->claim_uid, 0);

	return low ? (high | low) << UNTOLD_SHIFT : 0;
}

#endif

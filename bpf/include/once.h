/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What hardly any node ever does is not looked for in each packet before it was done once. */
#ifndef HEDDLE_ONCE_H
#define HEDDLE_ONCE_H

#include "include/headers.h"

/* Not 0 once translated_pairs, crossed_by_wire and wire_by_relay may have an entry. */
volatile __u32 pairs_translated = 0;
volatile __u32 sockets_crossed = 0;
volatile __u32 relays_opened = 0;

/* Not 0 once the above are right for programs before these, too, which may have run until a moment
 * ago. Written by the agent. */
volatile __u32 earlier_known = 0;

static __always_inline void happened(volatile __u32 *what)
{
	if (!*what)
		*what = 1;
}

static __always_inline bool may_have_happened(volatile __u32 *what)
{
	return *what || !earlier_known;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Counting of reasons. */
#ifndef HEDDLE_COUNT_H
#define HEDDLE_COUNT_H

#include "include/abi/reason.h"
#include "include/maps.h"

static __always_inline void count(__u32 reason)
{
	__u64 *n = bpf_map_lookup_elem(&count_by_reason, &reason);

	if (n)
		*n += 1; /* per CPU; preemption within one update loses a count at worst */
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The clock of what is remembered. */
#ifndef HEDDLE_CLOCK_H
#define HEDDLE_CLOCK_H

#include "include/kernel.h"

/* Time since boot, in units of 2^30 nanoseconds: 1.07 seconds. */
static __always_inline __u32 now_units(void)
{
	return (__u32)(bpf_ktime_get_coarse_ns() >> 30);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Whether there are limits, and those of an endpoint. */
#ifndef HEDDLE_LIMITS_H
#define HEDDLE_LIMITS_H

#include "include/abi/limit.h"
#include "include/maps.h"

/* Not 0 while some endpoint has a limit. Written by the agent. */
volatile __u32 limits_in_force = 0;

/* The shaping device, 0 while it is not known. Set by the agent. */
volatile __u32 limit_device = 0;

static __always_inline struct limit *limit_of(__u32 endpoint_id)
{
	return bpf_map_lookup_elem(&limit_by_endpoint, &endpoint_id);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Tells the agent that the direct path to a node may not work (docs/protocols/syn-option.md,
 * "Probes"). Off the direct path: it is called only where something went wrong, or nothing is
 * known. */
#ifndef HEDDLE_REPROBE_H
#define HEDDLE_REPROBE_H

#include "include/maps.h"

#define REPROBE_PAUSE_NS 250000000ULL

/* At most four times a second for each node, whatever containers do. */
static __noinline int ask_reprobe(__be32 underlay)
{
	__u64 now = bpf_ktime_get_ns(), *last;

	last = bpf_map_lookup_elem(&suspected_by_node, &underlay);
	if (last && now - *last < REPROBE_PAUSE_NS)
		return 0;
	if (bpf_map_update_elem(&suspected_by_node, &underlay, &now, BPF_ANY))
		return 0;
	bpf_ringbuf_output(&suspects, &underlay, sizeof(underlay), 0);
	return 0;
}

#endif

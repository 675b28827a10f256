/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What hardly any node, or container, ever does is not looked for in each packet before it was done
 * once. In maps, and not in variables: of those each agent's programs have their own, and for a
 * while programs of two agents run beside each other. */
#ifndef HEDDLE_ONCE_H
#define HEDDLE_ONCE_H

#include "include/abi/packets.h"
#include "include/address.h"
#include "include/maps.h"

static __always_inline bool has_happened(__u32 what)
{
	__u32 *done = bpf_map_lookup_elem(&happened_once, &what);

	return !done || *(volatile __u32 *)done;
}

static __always_inline bool may_have_happened(__u32 what)
{
	return has_happened(what) || !has_happened(ONCE_KNOWN);
}

static __always_inline void happened(__u32 what)
{
	__u32 *done = bpf_map_lookup_elem(&happened_once, &what);

	if (done && !*(volatile __u32 *)done)
		*(volatile __u32 *)done = 1;
}

/* Whether endpoint id may have a connection to a crossing address (tc/crossing.h). */
static __always_inline bool may_cross(__u32 id)
{
	__u32 *done;

	id &= ALIAS_ID_MASK;
	done = bpf_map_lookup_elem(&crossed_by_id, &id);
	return !done || *(volatile __u32 *)done || !has_happened(ONCE_KNOWN);
}

static __always_inline void crosses_once(__u32 id)
{
	__u32 *done;

	id &= ALIAS_ID_MASK;
	done = bpf_map_lookup_elem(&crossed_by_id, &id);
	if (done && !*(volatile __u32 *)done)
		*(volatile __u32 *)done = 1;
}

#endif

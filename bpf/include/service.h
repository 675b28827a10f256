/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Services as the maps have them. */
#ifndef HEDDLE_SERVICE_H
#define HEDDLE_SERVICE_H

#include "include/abi/service.h"
#include "include/maps.h"

static __always_inline struct backend *backend_at(__u32 service_id, __u32 slot)
{
	struct backend_key key = {.service_id = service_id, .slot = slot};

	return bpf_map_lookup_elem(&backend_by_slot, &key);
}

/* For how many seconds a client keeps its backend. */
static __always_inline __u32 affinity_of(const struct service *service)
{
	return service->affinity_s & SERVICE_AFFINITY;
}

#endif

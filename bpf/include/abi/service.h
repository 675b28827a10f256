/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Services and their backends. */
#ifndef HEDDLE_ABI_SERVICE_H
#define HEDDLE_ABI_SERVICE_H

#include <linux/types.h>
#include "include/abi/address.h"

/* An address and a port that stand for backends. Names and layouts are those of versions before:
 * agents of which one follows the other share the maps. */
struct service_key {
	struct address addr;
	__be16 port;
	__u16 pad; /* the protocol: 0 is TCP, and 17 UDP */
};

struct service {
	__u32 id;       /* names its backends */
	__u32 backends; /* slots 0 to backends - 1; 0: connects are refused */
	/* for how long after its last connect a client keeps its backend, SERVICE_AFFINITY of it; 0:
	 * each connect picks anew. The rest are flags: service_flags */
	__u32 affinity_s;
};

enum service_flags {
	SERVICE_AFFINITY = 0x7fffffff,
	SERVICE_OVERLAY = 0x80000000, /* no backend is beyond the overlay's pool */
};

struct backend_key {
	__u32 service_id;
	__u32 slot;
};

/* Of the service's family. */
struct backend {
	struct address addr;
	__be16 port;
	__u16 pad;
};

/* One of the backends that a service has now. */
struct member_key {
	__u32 service_id;
	struct backend backend;
};

struct affinity_key {
	__u32 service_id;
	__u32 endpoint_id; /* of the client */
};

struct affinity {
	struct backend backend;
	__u32 last_s; /* when the client last connected, on the clock that starts at boot */
};

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Requests that were posted and are not known to be complete. The router completes them as flushed
 * when their queue pair fails; when the router itself has ended, cq.c does it by these notes. */

#include "verbs/internal.h"

int outstanding_init(struct outstanding *o, uint32_t limit)
{
	o->limit = limit;
	for (o->size = 1; o->size < limit;)
		o->size *= 2;
	o->notes = calloc(o->size, sizeof(*o->notes));
	return o->notes ? 0 : ENOMEM;
}

bool outstanding_take(struct outstanding *o, uint64_t *wr_id)
{
	uint32_t tail = atomic_load_explicit(&o->tail, memory_order_relaxed);

	if (tail == atomic_load_explicit(&o->head, memory_order_acquire))
		return false;
	*wr_id = o->notes[tail & (o->size - 1)].wr_id;
	atomic_store_explicit(&o->tail, tail + 1, memory_order_release);
	return true;
}

/* A success is the next signalled request's, and tells that those before it are done. A failure may
 * be an unsignalled one's, too. */
void outstanding_complete(struct outstanding *o, const struct verbs_completion *completion)
{
	uint32_t head = atomic_load_explicit(&o->head, memory_order_acquire);
	uint32_t tail = atomic_load_explicit(&o->tail, memory_order_relaxed);

	while (tail != head) {
		struct request_note note = o->notes[tail++ & (o->size - 1)];

		if (note.signaled ||
		    (completion->status != IBV_WC_SUCCESS && note.wr_id == completion->wr_id))
			break;
	}
	atomic_store_explicit(&o->tail, tail, memory_order_release);
}

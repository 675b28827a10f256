/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Resizing of completion queues: the router goes on in a larger ring, and what the smaller one has
 * is kept here. */

#include "verbs/internal.h"

bool cq_take_kept(struct cq *cq, struct verbs_completion *completion)
{
	while (cq->kept_next < cq->kept_count) {
		*completion = cq->kept[cq->kept_next++];
		struct qp *qp = table_find(&cq->qps, completion->qp_num);
		if (!qp)
			continue;
		outstanding_complete(cq_is_receive(completion) ? &qp->receives : &qp->sends, completion);
		return true;
	}
	return false;
}

void cq_forget_kept(struct cq *cq, uint32_t qp)
{
	for (uint32_t i = cq->kept_next; i < cq->kept_count; i++)
		if (cq->kept[i].qp_num == qp)
			cq->kept[i].qp_num = 0;
}

/* Keeps what the ring has, into which the router writes no more. */
static void keep(struct cq *cq, struct verbs_completion *all)
{
	uint32_t count = 0;

	while (cq->kept_next < cq->kept_count)
		all[count++] = cq->kept[cq->kept_next++];
	while (count < (uint32_t)cq->base.cqe * 2 && ring_peek(&cq->ring, &all[count], 1)) {
		struct qp *qp = cq_owner(cq, &all[count], cq->ring.end.own);
		ring_pop(&cq->ring, 1);
		count += qp != NULL;
	}
	/* Indices are of the new ring from now on. */
	for (uint32_t i = 0; i < cq->qps.size; i++) {
		struct qp *qp = cq->qps.entries[i].object;
		if (cq->qps.entries[i].key == 0)
			continue;
		if (cq_of(qp->base.qp_base.send_cq) == cq)
			qp->send_stale.set = false;
		if (cq_of(qp->base.qp_base.recv_cq) == cq)
			qp->receive_stale.set = false;
	}
	free(cq->kept);
	cq->kept = all;
	cq->kept_next = 0;
	cq->kept_count = count;
}

/* Has the wish for an event that a thread may have written meanwhile in the new memory. */
static void move_wish(struct cq *cq, struct verbs_cq_arm *to)
{
	struct verbs_cq_arm *from = atomic_exchange(&cq->arm, to);
	uint32_t wish, none = VERBS_ARM_NONE;

	atomic_thread_fence(memory_order_seq_cst);
	wish = atomic_load((_Atomic uint32_t *)&from->armed);
	if (wish != VERBS_ARM_NONE)
		atomic_compare_exchange_strong((_Atomic uint32_t *)&to->armed, &none, wish);
}

/* A mapping of addresses only; NULL with errno. */
static void *map_nothing(uint64_t length)
{
	void *base = (void *)syscall(SYS_mmap, NULL, length, PROT_NONE,
	                             MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);

	return base == MAP_FAILED ? NULL : base;
}

/* Takes addresses for a ring of as many entries before the router is asked for it, as it goes on
 * there at once: a program that may not have them keeps the queue as it is. They are a mapping of
 * their own, which the ring's takes the place of. The kernel wants room for one more meanwhile. */
static int reserve(struct memory *m, uint32_t cqe)
{
	struct memory more = {.length = VERBS_CQ_RING};
	int error;
	uint32_t capacity = 1;

	while (capacity < cqe)
		capacity *= 2;
	m->length = VERBS_CQ_RING + ring_size(capacity);
	m->base = map_nothing(m->length);
	if (!m->base)
		return errno;
	more.base = map_nothing(more.length);
	error = more.base ? 0 : errno;
	memory_unmap(&more);
	return error;
}

/* Maps a ring where there is room for it. */
static int map_reserved(struct memory *m, int fd, uint64_t length)
{
	int error = 0;

	if (length != m->length)
		error = EPROTO;
	else if (!ring_map_at(m->base, fd, length))
		error = errno;
	if (error == EAGAIN) {
		/* The kernel counts locked memory as if what is replaced stayed, before it touches that. */
		memory_unmap(m);
		return memory_map(m, fd, length);
	}
	/* It may have failed when what was there had gone: another thread may have memory there. */
	if (error && error != EPROTO)
		m->base = NULL;
	close_fd(fd);
	return error;
}

static int grow(struct context *c, struct cq *cq, uint32_t cqe)
{
	struct verbs_resize_cq_request request = {.cq = cq->base.handle, .cqe = cqe};
	struct verbs_create_cq_reply reply;
	struct memory memory = {0};
	struct ring_consumer ring = {0};
	struct verbs_completion *all = calloc((size_t)cq->base.cqe * 2, sizeof(*all));
	int fd = -1;
	int error = all ? reserve(&memory, cqe) : ENOMEM;

	if (!error)
		error = control_request(c, VERBS_RESIZE_CQ, &request, sizeof(request), &reply, sizeof(reply),
		                        &fd, 1);
	if (error) {
		memory_unmap(&memory);
		free(all);
		return error;
	}
	error = map_reserved(&memory, fd, reply.memory_size);
	if (!error &&
	    (reply.capacity <= (uint32_t)cq->base.cqe ||
	     !ring_consumer_attach(&ring, memory.base, memory.length, VERBS_CQ_RING, reply.capacity)))
		error = EPROTO;
	if (error) {
		/* The router goes on where nobody looks: the device is lost. */
		control_give_up(c);
		memory_unmap(&memory);
		free(all);
		return error;
	}
	keep(cq, all);
	move_wish(cq, (struct verbs_cq_arm *)((uint8_t *)memory.base + VERBS_CQ_ARM));
	cq->former[cq->former_count++] = cq->memory;
	cq->memory = memory;
	cq->ring = ring;
	cq->base.cqe = (int)reply.capacity;
	return 0;
}

VERSION_1_1(ibv_resize_cq);
PUBLIC int ibv_resize_cq(struct ibv_cq *base, int cqe)
{
	struct cq *cq = cq_of(base);
	struct context *c = context_of(base->context);
	int error = 0;

	if (cqe < 1 || (uint32_t)cqe > c->hello.max_cqe)
		return EINVAL;
	lock_take(&cq->lock);
	/* What it holds need not become less. */
	if (cqe > base->cqe)
		error = cq->former_count < RESIZES_MAX ? grow(c, cq, (uint32_t)cqe) : EINVAL;
	lock_release(&cq->lock);
	return error;
}

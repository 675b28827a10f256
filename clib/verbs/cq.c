/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Completion queues: rings that the router fills and that polls read. */

#include "verbs/internal.h"

/* So many polls that find nothing are followed by a look whether the router is there. */
#define POLLS_BEFORE_LOOK  4096
/* So many are followed by a look whether others should run. */
#define POLLS_BEFORE_YIELD 64

#define SUPPORTED_WC_FLAGS                                                                                   \
	(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |                                       \
	 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static int make_cq(struct context *c, struct cq *cq, uint32_t cqe, struct channel *channel)
{
	struct verbs_create_cq_request request = {.user = (uintptr_t)cq, .cqe = cqe};
	struct verbs_create_cq_reply reply;
	int fd = -1;
	int error;

	if (channel)
		request.channel = channel->handle;
	error = control_request(c, VERBS_CREATE_CQ, &request, sizeof(request), &reply, sizeof(reply), &fd, 1);
	if (error)
		return error;
	error = memory_map(&cq->memory, fd, reply.memory_size);
	if (!error && !ring_consumer_attach(&cq->ring, cq->memory.base, cq->memory.length, VERBS_CQ_RING,
	                                    reply.capacity))
		error = EPROTO;
	if (!error) {
		lock_take(&c->objects_lock);
		error = table_insert(&c->cqs, reply.cq, cq);
		if (!error && channel)
			channel->base.refcnt++;
		lock_release(&c->objects_lock);
	}
	if (error) {
		memory_unmap(&cq->memory);
		control_destroy(c, VERBS_DESTROY_CQ, reply.cq);
		return error;
	}
	atomic_store(&cq->arm, (struct verbs_cq_arm *)((uint8_t *)cq->memory.base + VERBS_CQ_ARM));
	cq->base.handle = reply.cq;
	cq->base.cqe = (int)reply.capacity;
	return 0;
}

struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct context *c = context_of(context);
	struct cq *cq;
	int error = 0;

	if (attr->wc_flags & ~(uint64_t)SUPPORTED_WC_FLAGS ||
	    attr->comp_mask & ~(uint32_t)IBV_CQ_INIT_ATTR_MASK_FLAGS)
		error = EOPNOTSUPP;
	else if (attr->cqe == 0 || attr->cqe > c->hello.max_cqe ||
	         attr->comp_vector >= (uint32_t)context->num_comp_vectors)
		error = EINVAL;
	cq = error ? NULL : calloc(1, sizeof(*cq));
	if (!cq) {
		errno = error ? error : ENOMEM;
		return NULL;
	}
	error = make_cq(c, cq, attr->cqe, (struct channel *)attr->channel);
	if (error) {
		free(cq);
		errno = error;
		return NULL;
	}
	cq->base.context = context;
	cq->base.channel = attr->channel;
	cq->base.cq_context = attr->cq_context;
	cq_set_extended_ops(&cq->base, attr->wc_flags);
	return &cq->base;
}

VERSION_1_1(ibv_create_cq);
PUBLIC struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                    struct ibv_comp_channel *channel, int comp_vector)
{
	struct ibv_cq_init_attr_ex attr = {
	        .cqe = cqe > 0 ? (uint32_t)cqe : 0,
	        .cq_context = cq_context,
	        .channel = channel,
	        .comp_vector = (uint32_t)comp_vector,
	};

	return (struct ibv_cq *)create_cq_ex(context, &attr);
}

VERSION_1_1(ibv_destroy_cq);
PUBLIC int ibv_destroy_cq(struct ibv_cq *base)
{
	struct cq *cq = cq_of(base);
	struct context *c = context_of(base->context);
	int error = control_destroy(c, VERBS_DESTROY_CQ, base->handle);

	if (error)
		return error;
	lock_take(&c->objects_lock);
	table_remove(&c->cqs, base->handle);
	if (base->channel)
		base->channel->refcnt--;
	lock_release(&c->objects_lock);
	wait_for_acks(&base->comp_events_completed, &cq->events);
	wait_for_acks(&base->async_events_completed, &cq->async_events);
	memory_unmap(&cq->memory);
	while (cq->former_count > 0)
		memory_unmap(&cq->former[--cq->former_count]);
	free(cq->kept);
	table_free(&cq->qps);
	free(cq);
	return 0;
}

int req_notify_cq(struct ibv_cq *base, int solicited_only)
{
	struct cq *cq = cq_of(base);
	struct verbs_cq_arm *arm;

	do {
		uint32_t none = VERBS_ARM_NONE;
		arm = atomic_load(&cq->arm);
		_Atomic uint32_t *armed = (_Atomic uint32_t *)&arm->armed;
		if (solicited_only)
			atomic_compare_exchange_strong_explicit(armed, &none, VERBS_ARM_SOLICITED,
			                                        memory_order_relaxed, memory_order_relaxed);
		else
			atomic_store_explicit(armed, VERBS_ARM_NEXT, memory_order_relaxed);
		atomic_thread_fence(memory_order_seq_cst);
		/* A queue that was resized meanwhile has its wish elsewhere. */
	} while (arm != atomic_load(&cq->arm));
	return 0;
}

int cq_attach_qp(struct cq *cq, struct qp *qp)
{
	int error = 0;

	lock_take(&cq->lock);
	if (!table_find(&cq->qps, qp->base.qp_base.qp_num))
		error = table_insert(&cq->qps, qp->base.qp_base.qp_num, qp);
	lock_release(&cq->lock);
	return error;
}

void cq_detach_qp(struct cq *cq, struct qp *qp)
{
	lock_take(&cq->lock);
	table_remove(&cq->qps, qp->base.qp_base.qp_num);
	lock_release(&cq->lock);
}

void cq_forget_qp(struct cq *cq, struct qp *qp)
{
	lock_take(&cq->lock);
	struct stale now = {.set = true, .until = atomic_load(ring_produced(&cq->ring.end))};
	if (cq_of(qp->base.qp_base.send_cq) == cq) {
		qp->send_stale = now;
		outstanding_clear(&qp->sends);
	}
	if (cq_of(qp->base.qp_base.recv_cq) == cq) {
		qp->receive_stale = now;
		outstanding_clear(&qp->receives);
	}
	cq_forget_kept(cq, qp->base.qp_base.qp_num);
	lock_release(&cq->lock);
}

struct qp *cq_owner(struct cq *cq, const struct verbs_completion *completion, uint32_t index)
{
	struct qp *qp = table_find(&cq->qps, completion->qp_num);
	struct stale *stale;

	if (!qp)
		return NULL;
	stale = cq_is_receive(completion) ? &qp->receive_stale : &qp->send_stale;
	if (stale->set && (int32_t)(index - stale->until) >= 0)
		stale->set = false;
	return stale->set ? NULL : qp;
}

/* Of the requests that nobody completes any more, makes up the next completion. */
static bool flush_outstanding(struct cq *cq, struct verbs_completion *completion)
{
	*completion = (struct verbs_completion){.status = IBV_WC_WR_FLUSH_ERR};
	for (uint32_t i = 0; i < cq->qps.size; i++) {
		struct table_entry *entry = &cq->qps.entries[i];
		struct qp *qp = entry->object;

		if (entry->key == 0)
			continue;
		completion->qp_num = entry->key;
		atomic_store_explicit((_Atomic uint32_t *)&qp->base.qp_base.state, IBV_QPS_ERR,
		                      memory_order_relaxed);
		if (cq_of(qp->base.qp_base.send_cq) == cq && outstanding_take(&qp->sends, &completion->wr_id))
			return true;
		completion->opcode = IBV_WC_RECV;
		if (cq_of(qp->base.qp_base.recv_cq) == cq &&
		    outstanding_take(&qp->receives, &completion->wr_id))
			return true;
		completion->opcode = 0;
	}
	return false;
}

/* A poll has found nothing. Says whether nothing more comes, and now and then lets others run:
 * where a node has few processors, those that poll would keep the router from them. */
static bool is_cq_dead(struct cq *cq)
{
	struct context *c = context_of(cq->base.context);

	if (cq->ring.end.broken && !is_gone(c))
		control_give_up(c);
	if (is_gone(c))
		return true;
	cq->empty_polls++;
	if (cq->empty_polls % POLLS_BEFORE_YIELD == 0)
		cq->waits = nap_yield(c);
	return cq->empty_polls % POLLS_BEFORE_LOOK == 0 && control_is_gone(c);
}

bool cq_next(struct cq *cq, struct verbs_completion *completion)
{
	if (cq->kept_next < cq->kept_count && cq_take_kept(cq, completion))
		return true;
	while (ring_peek(&cq->ring, completion, 1)) {
		uint32_t index = cq->ring.end.own;
		struct qp *qp = cq_owner(cq, completion, index);

		ring_pop(&cq->ring, 1);
		if (!qp)
			continue;
		outstanding_complete(cq_is_receive(completion) ? &qp->receives : &qp->sends, completion);
		cq->empty_polls = 0;
		nap_found(context_of(cq->base.context));
		return true;
	}
	return is_cq_dead(cq) && flush_outstanding(cq, completion);
}

int poll_cq(struct ibv_cq *base, int count, struct ibv_wc *wc)
{
	struct cq *cq = cq_of(base);
	struct verbs_completion from;
	bool waits;
	int found = 0;

	lock_take(&cq->lock);
	for (; found < count && cq_next(cq, &from); found++)
		wc[found] = (struct ibv_wc){
		        .wr_id = from.wr_id,
		        .status = from.status,
		        .opcode = from.opcode,
		        .vendor_err = from.vendor_err,
		        .byte_len = from.byte_len,
		        .imm_data = from.imm,
		        .qp_num = from.qp_num,
		        .src_qp = from.src_qp,
		        .wc_flags = from.flags,
		        .pkey_index = from.pkey_index,
		        .slid = from.slid,
		        .sl = from.sl,
		        .dlid_path_bits = from.dlid_path_bits,
		};
	waits = cq_take_wait(cq);
	lock_release(&cq->lock);
	if (waits && found == 0)
		nap_wait(cq);
	return found;
}

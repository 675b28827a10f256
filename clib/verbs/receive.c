/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Receive requests, of queue pairs and of shared receive queues. */

#include "verbs/internal.h"

#define SGE_IN_FIRST 3
#define SGE_IN_NEXT  4

/* Writes a request behind `staged` slots that are not shown yet. Returns its slots; 0: there is no
 * room. */
static uint32_t stage_receive(struct ring_producer *ring, uint32_t staged, const struct ibv_recv_wr *wr)
{
	uint32_t count = (uint32_t)wr->num_sge;
	uint32_t slots =
	        count <= SGE_IN_FIRST ? 1 : 1 + (count - SGE_IN_FIRST + SGE_IN_NEXT - 1) / SGE_IN_NEXT;
	uint32_t done = count < SGE_IN_FIRST ? count : SGE_IN_FIRST;
	struct verbs_receive first = {
	        .wr_id = wr->wr_id, .slots = (uint8_t)slots, .sge_count = (uint8_t)count};

	if (ring_room(ring, staged + slots) < staged + slots)
		return 0;
	memcpy(first.sge, wr->sg_list, done * sizeof(first.sge[0]));
	memcpy(ring_free_slot(ring, staged), &first, sizeof(first));
	for (uint32_t i = 1; i < slots; i++) {
		uint32_t here = count - done < SGE_IN_NEXT ? count - done : SGE_IN_NEXT;

		memcpy(ring_free_slot(ring, staged + i), wr->sg_list + done, here * sizeof(*wr->sg_list));
		done += here;
	}
	return slots;
}

static bool is_count_good(const struct ibv_recv_wr *wr, uint32_t max_sge)
{
	return wr->num_sge >= 0 && (uint32_t)wr->num_sge <= max_sge && wr->num_sge <= VERBS_SGE_MAX;
}

int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *qp = qp_of(base);
	struct context *c = context_of(base->context);
	uint32_t slots = 0, requests = 0;
	int error = 0;

	if (base->state == IBV_QPS_RESET || base->srq || is_gone(c)) {
		*bad = wr;
		return is_gone(c) ? EIO : EINVAL;
	}
	lock_take(&qp->receive_lock);
	for (; wr; wr = wr->next) {
		uint32_t more = 0;

		if (!is_count_good(wr, qp->cap.max_recv_sge))
			error = EINVAL;
		else if (outstanding_count(&qp->receives) + requests < qp->receives.limit)
			more = stage_receive(&qp->receive_ring, slots, wr);
		if (!more)
			break;
		outstanding_note(&qp->receives, requests++, wr->wr_id, true);
		slots += more;
	}
	outstanding_add(&qp->receives, requests);
	ring_push(&qp->receive_ring, slots);
	lock_release(&qp->receive_lock);
	ring_router(c);
	if (!wr)
		return 0;
	*bad = wr;
	return error ? error : ENOMEM;
}

int post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *srq = srq_of(base);
	struct context *c = context_of(base->context);
	uint32_t slots = 0;
	int error = 0;

	if (is_gone(c)) {
		*bad = wr;
		return EIO;
	}
	lock_take(&srq->lock);
	for (; wr; wr = wr->next) {
		uint32_t more = 0;

		if (!is_count_good(wr, srq->max_sge))
			error = EINVAL;
		else
			more = stage_receive(&srq->ring, slots, wr);
		if (!more)
			break;
		slots += more;
	}
	ring_push(&srq->ring, slots);
	lock_release(&srq->lock);
	ring_router(c);
	if (!wr)
		return 0;
	*bad = wr;
	return error ? error : ENOMEM;
}

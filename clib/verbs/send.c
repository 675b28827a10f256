/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Send requests: written to the queue pair's ring, without a request to the router.
 * docs/protocols/verbs-rings.md says what a slot is. */

#include "verbs/internal.h"

_Static_assert(VERBS_SEND_FENCE == IBV_SEND_FENCE && VERBS_SEND_SIGNALED == IBV_SEND_SIGNALED &&
                       VERBS_SEND_SOLICITED == IBV_SEND_SOLICITED && VERBS_SEND_INLINE == IBV_SEND_INLINE,
               "flags are those of libibverbs");
#define SEND_FLAGS (VERBS_SEND_FENCE | VERBS_SEND_SIGNALED | VERBS_SEND_SOLICITED | VERBS_SEND_INLINE)

static uint32_t slots_of(uint32_t payload)
{
	uint32_t in_first = VERBS_SLOT_SIZE - VERBS_SEND_PAYLOAD;

	return payload <= in_first ? 1 : 1 + (payload - in_first + VERBS_SLOT_SIZE - 1) / VERBS_SLOT_SIZE;
}

int stage_send(struct qp *qp, struct verbs_send *send, const void *payload, uint32_t length)
{
	uint32_t slots = slots_of(length), first = VERBS_SLOT_SIZE - VERBS_SEND_PAYLOAD;
	const uint8_t *from = payload;

	if (outstanding_count(&qp->sends) + qp->staged_requests >= qp->sends.limit ||
	    ring_room(&qp->send_ring, qp->staged_slots + slots) < qp->staged_slots + slots)
		return ENOMEM;
	send->slots = (uint8_t)slots;
	if (first > length)
		first = length;
	memcpy(send->payload, from, first);
	memcpy(ring_free_slot(&qp->send_ring, qp->staged_slots), send, sizeof(*send));
	for (uint32_t i = 1, at = first; i < slots; i++, at += VERBS_SLOT_SIZE)
		memcpy(ring_free_slot(&qp->send_ring, qp->staged_slots + i), from + at,
		       length - at < VERBS_SLOT_SIZE ? length - at : VERBS_SLOT_SIZE);
	outstanding_note(&qp->sends, qp->staged_requests, send->wr_id,
	                 qp->sq_sig_all || send->flags & VERBS_SEND_SIGNALED);
	qp->staged_slots += slots;
	qp->staged_requests++;
	return 0;
}

void drop_staged(struct qp *qp)
{
	qp->staged_slots = 0;
	qp->staged_requests = 0;
}

void show_staged(struct qp *qp)
{
	outstanding_add(&qp->sends, qp->staged_requests);
	ring_push(&qp->send_ring, qp->staged_slots);
	drop_staged(qp);
}

/* Whether a queue pair of this type has the operation. */
static bool has_opcode(enum ibv_qp_type type, enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return true;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return type != IBV_QPT_UD;
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return type == IBV_QPT_RC;
	default:
		return false;
	}
}

static void set_target(struct verbs_send *send, const struct ibv_send_wr *wr, enum ibv_qp_type type)
{
	switch (wr->opcode) {
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		send->imm = wr->imm_data;
		break;
	default:
		break;
	}
	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
		send->remote_address = wr->wr.rdma.remote_addr;
		send->rkey = wr->wr.rdma.rkey;
		return;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		send->swap = wr->wr.atomic.swap;
		/* fall through */
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		send->remote_address = wr->wr.atomic.remote_addr;
		send->rkey = wr->wr.atomic.rkey;
		send->compare_add = wr->wr.atomic.compare_add;
		return;
	default:
		if (type != IBV_QPT_UD)
			return;
		send->rkey = wr->wr.ud.remote_qpn;
		send->compare_add = wr->wr.ud.ah->handle;
		send->swap = wr->wr.ud.remote_qkey;
	}
}

static int stage_inline(struct qp *qp, struct verbs_send *send, const struct ibv_send_wr *wr)
{
	uint8_t data[VERBS_SEND_PAYLOAD_MAX];
	uint32_t length = 0;

	if (wr->opcode == IBV_WR_RDMA_READ || wr->opcode >= IBV_WR_ATOMIC_CMP_AND_SWP)
		return EINVAL;
	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];

		if (sge->length > qp->cap.max_inline_data - length || sge->length > sizeof(data) - length)
			return EINVAL;
		memcpy(data + length, (const void *)(uintptr_t)sge->addr, sge->length);
		length += sge->length;
	}
	send->inline_length = length;
	return stage_send(qp, send, data, length);
}

_Static_assert(sizeof(struct verbs_sge) == sizeof(struct ibv_sge) &&
                       offsetof(struct verbs_sge, length) == offsetof(struct ibv_sge, length) &&
                       offsetof(struct verbs_sge, lkey) == offsetof(struct ibv_sge, lkey),
               "entries are those of libibverbs");

static int stage_wr(struct qp *qp, const struct ibv_send_wr *wr)
{
	enum ibv_qp_type type = qp->base.qp_base.qp_type;
	struct verbs_send send = {
	        .wr_id = wr->wr_id, .opcode = (uint8_t)wr->opcode, .flags = wr->send_flags & SEND_FLAGS};

	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge || wr->num_sge > VERBS_SGE_MAX ||
	    !has_opcode(type, wr->opcode) || wr->send_flags & ~(unsigned int)SEND_FLAGS)
		return EINVAL;
	set_target(&send, wr, type);
	if (send.flags & VERBS_SEND_INLINE)
		return stage_inline(qp, &send, wr);
	send.sge_count = (uint8_t)wr->num_sge;
	return stage_send(qp, &send, wr->sg_list, (uint32_t)wr->num_sge * sizeof(struct verbs_sge));
}

int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *qp = qp_of(base);
	struct context *c = context_of(base->context);
	int error = 0;

	if (base->state < IBV_QPS_RTS || is_gone(c)) {
		*bad = wr;
		return is_gone(c) ? EIO : EINVAL;
	}
	lock_take(&qp->send_lock);
	for (; wr && !error; wr = error ? wr : wr->next)
		error = stage_wr(qp, wr);
	show_staged(qp);
	lock_release(&qp->send_lock);
	ring_router(c);
	if (error)
		*bad = wr;
	return error;
}

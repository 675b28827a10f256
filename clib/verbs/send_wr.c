/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The interface of ibv_wr_start() to ibv_wr_complete(): a request is made by a call for what it
 * does and others for where its bytes are. The send queue's lock is held meanwhile. */

#include "verbs/internal.h"

/* Stages the request that was being made. */
static void finish_request(struct qp *qp)
{
	if (!qp->building)
		return;
	qp->building = false;
	if (!qp->build_error)
		qp->build_error = stage_send(qp, &qp->build, qp->build_payload, qp->build_length);
}

static struct verbs_send *begin_request(struct ibv_qp_ex *base, enum ibv_wr_opcode opcode)
{
	struct qp *qp = qp_of_ex(base);

	finish_request(qp);
	qp->building = true;
	qp->build_length = 0;
	qp->build = (struct verbs_send){
	        .wr_id = base->wr_id,
	        .opcode = (uint8_t)opcode,
	        .flags = base->wr_flags & (VERBS_SEND_FENCE | VERBS_SEND_SIGNALED | VERBS_SEND_SOLICITED),
	};
	return &qp->build;
}

static void wr_start(struct ibv_qp_ex *base)
{
	struct qp *qp = qp_of_ex(base);

	lock_take(&qp->send_lock);
	qp->building = false;
	qp->build_error = 0;
	if (is_gone(context_of(base->qp_base.context)))
		qp->build_error = EIO;
	else if (base->qp_base.state < IBV_QPS_RTS)
		qp->build_error = EINVAL;
}

static int wr_complete(struct ibv_qp_ex *base)
{
	struct qp *qp = qp_of_ex(base);
	int error;

	finish_request(qp);
	error = qp->build_error;
	if (error)
		drop_staged(qp);
	else
		show_staged(qp);
	lock_release(&qp->send_lock);
	ring_router(context_of(base->qp_base.context));
	return error;
}

static void wr_abort(struct ibv_qp_ex *base)
{
	struct qp *qp = qp_of_ex(base);

	drop_staged(qp);
	lock_release(&qp->send_lock);
}

static void wr_send(struct ibv_qp_ex *base)
{
	begin_request(base, IBV_WR_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *base, __be32 imm)
{
	begin_request(base, IBV_WR_SEND_WITH_IMM)->imm = imm;
}

static struct verbs_send *begin_remote(struct ibv_qp_ex *base, enum ibv_wr_opcode opcode, uint32_t rkey,
                                       uint64_t address)
{
	struct verbs_send *send = begin_request(base, opcode);

	send->rkey = rkey;
	send->remote_address = address;
	return send;
}

static void wr_rdma_write(struct ibv_qp_ex *base, uint32_t rkey, uint64_t address)
{
	begin_remote(base, IBV_WR_RDMA_WRITE, rkey, address);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *base, uint32_t rkey, uint64_t address, __be32 imm)
{
	begin_remote(base, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address)->imm = imm;
}

static void wr_rdma_read(struct ibv_qp_ex *base, uint32_t rkey, uint64_t address)
{
	begin_remote(base, IBV_WR_RDMA_READ, rkey, address);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *base, uint32_t rkey, uint64_t address, uint64_t compare,
                              uint64_t swap)
{
	struct verbs_send *send = begin_remote(base, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, address);

	send->compare_add = compare;
	send->swap = swap;
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *base, uint32_t rkey, uint64_t address, uint64_t add)
{
	begin_remote(base, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, address)->compare_add = add;
}

static void wr_set_ud_addr(struct ibv_qp_ex *base, struct ibv_ah *ah, uint32_t number, uint32_t key)
{
	struct verbs_send *send = &qp_of_ex(base)->build;

	send->rkey = number;
	send->compare_add = ah->handle;
	send->swap = key;
}

static void wr_set_sge_list(struct ibv_qp_ex *base, size_t count, const struct ibv_sge *list)
{
	struct qp *qp = qp_of_ex(base);

	if (count > qp->cap.max_send_sge || count > VERBS_SGE_MAX) {
		qp->build_error = EINVAL;
		return;
	}
	qp->build.sge_count = (uint8_t)count;
	qp->build_length = (uint32_t)(count * sizeof(*list));
	memcpy(qp->build_payload, list, qp->build_length);
}

static void wr_set_sge(struct ibv_qp_ex *base, uint32_t lkey, uint64_t address, uint32_t length)
{
	struct ibv_sge sge = {.addr = address, .length = length, .lkey = lkey};

	wr_set_sge_list(base, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *base, size_t count, const struct ibv_data_buf *list)
{
	struct qp *qp = qp_of_ex(base);
	uint32_t length = 0;

	for (size_t i = 0; i < count; i++) {
		if (list[i].length > qp->cap.max_inline_data - length ||
		    list[i].length > sizeof(qp->build_payload) - length) {
			qp->build_error = EINVAL;
			return;
		}
		memcpy(qp->build_payload + length, list[i].addr, list[i].length);
		length += (uint32_t)list[i].length;
	}
	qp->build.flags |= VERBS_SEND_INLINE;
	qp->build.inline_length = length;
	qp->build_length = length;
}

static void wr_set_inline_data(struct ibv_qp_ex *base, void *address, size_t length)
{
	struct ibv_data_buf data = {.addr = address, .length = length};

	wr_set_inline_data_list(base, 1, &data);
}

void qp_set_wr_api(struct qp *qp)
{
	struct ibv_qp_ex *base = &qp->base;

	qp->has_wr_api = true;
	base->wr_start = wr_start;
	base->wr_complete = wr_complete;
	base->wr_abort = wr_abort;
	base->wr_send = wr_send;
	base->wr_send_imm = wr_send_imm;
	base->wr_rdma_write = wr_rdma_write;
	base->wr_rdma_write_imm = wr_rdma_write_imm;
	base->wr_rdma_read = wr_rdma_read;
	base->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	base->wr_atomic_fetch_add = wr_atomic_fetch_add;
	base->wr_set_ud_addr = wr_set_ud_addr;
	base->wr_set_sge = wr_set_sge;
	base->wr_set_sge_list = wr_set_sge_list;
	base->wr_set_inline_data = wr_set_inline_data;
	base->wr_set_inline_data_list = wr_set_inline_data_list;
}

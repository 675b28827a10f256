/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The extended interface of completion queues: one completion at a time, whose fields are read by
 * functions. */

#include <time.h>

#include "verbs/internal.h"

static struct cq *cq_of_ex(struct ibv_cq_ex *cq)
{
	return (struct cq *)cq;
}

/* The CQ's lock is held from a start_poll that found something to end_poll. */

static int next_poll(struct ibv_cq_ex *base)
{
	struct cq *cq = cq_of_ex(base);

	if (!cq_next(cq, &cq->current))
		return ENOENT;
	base->status = cq->current.status;
	base->wr_id = cq->current.wr_id;
	return 0;
}

static int start_poll(struct ibv_cq_ex *base, struct ibv_poll_cq_attr *attr)
{
	struct cq *cq = cq_of_ex(base);
	bool waits;
	int error;

	if (attr->comp_mask)
		return EINVAL;
	lock_take(&cq->lock);
	error = next_poll(base);
	if (!error)
		return 0;
	waits = cq_take_wait(cq);
	lock_release(&cq->lock);
	if (waits)
		nap_wait(cq);
	return error;
}

static void end_poll(struct ibv_cq_ex *base)
{
	lock_release(&cq_of_ex(base)->lock);
}

#define READER(type, name, field)                                                                            \
	static type name(struct ibv_cq_ex *base)                                                             \
	{                                                                                                    \
		return cq_of_ex(base)->current.field;                                                        \
	}

READER(enum ibv_wc_opcode, read_opcode, opcode)
READER(uint32_t, read_vendor_err, vendor_err)
READER(uint32_t, read_byte_len, byte_len)
READER(__be32, read_imm_data, imm)
READER(uint32_t, read_qp_num, qp_num)
READER(uint32_t, read_src_qp, src_qp)
READER(unsigned int, read_wc_flags, flags)
READER(uint32_t, read_slid, slid)
READER(uint8_t, read_sl, sl)
READER(uint8_t, read_dlid_path_bits, dlid_path_bits)
READER(uint64_t, read_completion_ts, timestamp)

static uint64_t read_wallclock(struct ibv_cq_ex *base)
{
	struct timespec wall = {0}, steady = {0};

	syscall(SYS_clock_gettime, CLOCK_REALTIME, &wall);
	syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
	return cq_of_ex(base)->current.timestamp + (uint64_t)(wall.tv_sec - steady.tv_sec) * 1000000000u +
	       (uint64_t)(wall.tv_nsec - steady.tv_nsec);
}

void cq_set_extended_ops(struct ibv_cq_ex *cq, uint64_t wc_flags)
{
	cq->start_poll = start_poll;
	cq->next_poll = next_poll;
	cq->end_poll = end_poll;
	cq->read_opcode = read_opcode;
	cq->read_vendor_err = read_vendor_err;
	cq->read_wc_flags = read_wc_flags;
	cq->read_byte_len = read_byte_len;
	cq->read_imm_data = read_imm_data;
	cq->read_qp_num = read_qp_num;
	cq->read_src_qp = read_src_qp;
	cq->read_slid = read_slid;
	cq->read_sl = read_sl;
	cq->read_dlid_path_bits = read_dlid_path_bits;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		cq->read_completion_ts = read_completion_ts;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		cq->read_completion_wallclock_ns = read_wallclock;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Queue pairs: RC, UC and UD. The router has their state; the library keeps the one it was told
 * last, for programs that look. */

#include "verbs/internal.h"

#define SUPPORTED_INIT_MASK                                                                                  \
	(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS)
#define SUPPORTED_SEND_OPS                                                                                   \
	(IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |              \
	 IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |       \
	 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

static void free_qp(struct qp *qp)
{
	memory_unmap(&qp->memory);
	free(qp->sends.notes);
	free(qp->receives.notes);
	free(qp);
}

static int attach_rings(struct qp *qp, int fd, const struct verbs_create_qp_reply *reply)
{
	int error = memory_map(&qp->memory, fd, reply->memory_size);

	if (error)
		return error;
	if (!ring_producer_attach(&qp->send_ring, qp->memory.base, qp->memory.length, VERBS_QP_SEND_RING,
	                          reply->send_capacity))
		return EPROTO;
	if (reply->receive_capacity &&
	    !ring_producer_attach(&qp->receive_ring, qp->memory.base, qp->memory.length,
	                          reply->receive_offset, reply->receive_capacity))
		return EPROTO;
	error = outstanding_init(&qp->sends, reply->max_send_wr);
	return error ? error
	             : outstanding_init(&qp->receives, reply->receive_capacity ? reply->max_recv_wr : 0);
}

/* Makes the queue pair findable for polls and events. */
static int publish_qp(struct context *c, struct qp *qp)
{
	struct ibv_qp *base = &qp->base.qp_base;
	int error;

	lock_take(&c->objects_lock);
	error = table_insert(&c->qps, base->qp_num, qp);
	lock_release(&c->objects_lock);
	if (!error)
		error = cq_attach_qp(cq_of(base->send_cq), qp);
	if (!error)
		error = cq_attach_qp(cq_of(base->recv_cq), qp);
	return error;
}

static void hide_qp(struct context *c, struct qp *qp)
{
	cq_detach_qp(cq_of(qp->base.qp_base.send_cq), qp);
	cq_detach_qp(cq_of(qp->base.qp_base.recv_cq), qp);
	lock_take(&c->objects_lock);
	table_remove(&c->qps, qp->base.qp_base.qp_num);
	lock_release(&c->objects_lock);
}

static int make_qp(struct qp *qp, const struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *base = &qp->base.qp_base;
	struct context *c = context_of(base->context);
	struct verbs_create_qp_request request = {
	        .user = (uintptr_t)qp,
	        .pd = base->pd->handle,
	        .send_cq = attr->send_cq->handle,
	        .recv_cq = attr->recv_cq->handle,
	        .srq = attr->srq ? attr->srq->handle : 0,
	        .type = attr->qp_type,
	        .sq_sig_all = attr->sq_sig_all != 0,
	        .max_send_wr = attr->cap.max_send_wr,
	        .max_recv_wr = attr->srq ? 0 : attr->cap.max_recv_wr,
	        .max_send_sge = attr->cap.max_send_sge,
	        .max_recv_sge = attr->srq ? 0 : attr->cap.max_recv_sge,
	        .max_inline = attr->cap.max_inline_data,
	};
	struct verbs_create_qp_reply reply;
	int fd = -1;
	int error =
	        control_request(c, VERBS_CREATE_QP, &request, sizeof(request), &reply, sizeof(reply), &fd, 1);

	if (error)
		return error;
	base->handle = base->qp_num = reply.qp;
	qp->cap = (struct ibv_qp_cap){
	        .max_send_wr = reply.max_send_wr,
	        .max_recv_wr = reply.max_recv_wr,
	        .max_send_sge = reply.max_send_sge,
	        .max_recv_sge = reply.max_recv_sge,
	        .max_inline_data = reply.max_inline,
	};
	error = attach_rings(qp, fd, &reply);
	if (!error)
		error = publish_qp(c, qp);
	if (error) {
		hide_qp(c, qp);
		control_destroy(c, VERBS_DESTROY_QP, reply.qp);
	}
	return error;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr, bool with_wr_api)
{
	const struct verbs_hello_reply *h = &context_of(pd->context)->hello;
	const struct ibv_qp_cap *cap = &attr->cap;
	struct qp *qp = NULL;
	int error = ENOMEM;

	if (attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UC && attr->qp_type != IBV_QPT_UD)
		error = EOPNOTSUPP;
	else if (!attr->send_cq || !attr->recv_cq || cap->max_send_wr > h->max_send_wr ||
	         cap->max_send_sge > h->max_sge || cap->max_inline_data > h->max_inline ||
	         (!attr->srq && (cap->max_recv_wr > h->max_recv_wr || cap->max_recv_sge > h->max_sge)))
		error = EINVAL;
	else
		qp = calloc(1, sizeof(*qp));
	if (!qp) {
		errno = error;
		return NULL;
	}
	struct ibv_qp *base = &qp->base.qp_base;

	base->context = pd->context;
	base->qp_context = attr->qp_context;
	base->pd = pd;
	base->send_cq = attr->send_cq;
	base->recv_cq = attr->recv_cq;
	base->srq = attr->srq;
	base->qp_type = attr->qp_type;
	base->state = IBV_QPS_RESET;
	qp->sq_sig_all = attr->sq_sig_all;
	if (with_wr_api)
		qp_set_wr_api(qp);
	error = make_qp(qp, attr);
	if (error) {
		free_qp(qp);
		errno = error;
		return NULL;
	}
	attr->cap = qp->cap;
	return base;
}

VERSION_1_1(ibv_create_qp);
PUBLIC struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return create_qp(pd, attr, false);
}

struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	uint32_t mask = attr->comp_mask;
	bool with_wr_api = mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;

	(void)context;
	if (mask & ~(uint32_t)SUPPORTED_INIT_MASK ||
	    (mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags) ||
	    (with_wr_api && attr->send_ops_flags & ~(uint64_t)SUPPORTED_SEND_OPS)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (!(mask & IBV_QP_INIT_ATTR_PD)) {
		errno = EINVAL;
		return NULL;
	}
	/* The extended struct begins like the plain one. */
	return create_qp(attr->pd, (struct ibv_qp_init_attr *)attr, with_wr_api);
}

PUBLIC struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return qp_of(qp)->has_wr_api ? &qp_of(qp)->base : NULL;
}

static void attr_to_wire(struct verbs_qp_attr *to, const struct ibv_qp_attr *from, int mask)
{
	/* Programs set only the fields that the mask names: the others may be anything. */
	*to = (struct verbs_qp_attr){0};
#define COPY(bit, field, member)                                                                             \
	if (mask & (bit))                                                                                    \
	to->field = from->member
	COPY(IBV_QP_STATE, qp_state, qp_state);
	COPY(IBV_QP_CUR_STATE, cur_qp_state, cur_qp_state);
	COPY(IBV_QP_PATH_MTU, path_mtu, path_mtu);
	COPY(IBV_QP_PATH_MIG_STATE, path_mig_state, path_mig_state);
	COPY(IBV_QP_QKEY, qkey, qkey);
	COPY(IBV_QP_RQ_PSN, rq_psn, rq_psn);
	COPY(IBV_QP_SQ_PSN, sq_psn, sq_psn);
	COPY(IBV_QP_DEST_QPN, dest_qp_num, dest_qp_num);
	COPY(IBV_QP_ACCESS_FLAGS, access, qp_access_flags);
	COPY(IBV_QP_RATE_LIMIT, rate_limit, rate_limit);
	COPY(IBV_QP_PKEY_INDEX, pkey_index, pkey_index);
	COPY(IBV_QP_ALT_PATH, alt_pkey_index, alt_pkey_index);
	COPY(IBV_QP_ALT_PATH, alt_port, alt_port_num);
	COPY(IBV_QP_ALT_PATH, alt_timeout, alt_timeout);
	COPY(IBV_QP_EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify, en_sqd_async_notify);
	COPY(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic, max_rd_atomic);
	COPY(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic, max_dest_rd_atomic);
	COPY(IBV_QP_MIN_RNR_TIMER, min_rnr_timer, min_rnr_timer);
	COPY(IBV_QP_PORT, port, port_num);
	COPY(IBV_QP_TIMEOUT, timeout, timeout);
	COPY(IBV_QP_RETRY_CNT, retry_cnt, retry_cnt);
	COPY(IBV_QP_RNR_RETRY, rnr_retry, rnr_retry);
#undef COPY
	if (mask & IBV_QP_AV)
		address_to_wire(&to->address, &from->ah_attr);
	if (mask & IBV_QP_ALT_PATH)
		address_to_wire(&to->alt_address, &from->alt_ah_attr);
}

VERSION_1_1(ibv_modify_qp);
PUBLIC int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct qp *qp = qp_of(base);
	struct verbs_modify_qp_request request = {.qp = base->qp_num, .mask = (uint32_t)mask};
	struct verbs_modify_qp_reply reply;
	int error;

	attr_to_wire(&request.attr, attr, mask);
	error = control_request(context_of(base->context), VERBS_MODIFY_QP, &request, sizeof(request), &reply,
	                        sizeof(reply), NULL, 0);
	if (error)
		return error;
	base->state = reply.qp_state;
	if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET) {
		cq_forget_qp(cq_of(base->send_cq), qp);
		if (base->recv_cq != base->send_cq)
			cq_forget_qp(cq_of(base->recv_cq), qp);
	}
	return 0;
}

static void attr_from_wire(struct ibv_qp_attr *to, const struct verbs_qp_attr *from)
{
	*to = (struct ibv_qp_attr){
	        .qp_state = from->qp_state,
	        .cur_qp_state = from->cur_qp_state,
	        .path_mtu = from->path_mtu,
	        .path_mig_state = from->path_mig_state,
	        .qkey = from->qkey,
	        .rq_psn = from->rq_psn,
	        .sq_psn = from->sq_psn,
	        .dest_qp_num = from->dest_qp_num,
	        .qp_access_flags = from->access,
	        .pkey_index = from->pkey_index,
	        .alt_pkey_index = from->alt_pkey_index,
	        .en_sqd_async_notify = from->en_sqd_async_notify,
	        .sq_draining = from->sq_draining,
	        .max_rd_atomic = from->max_rd_atomic,
	        .max_dest_rd_atomic = from->max_dest_rd_atomic,
	        .min_rnr_timer = from->min_rnr_timer,
	        .port_num = from->port,
	        .timeout = from->timeout,
	        .retry_cnt = from->retry_cnt,
	        .rnr_retry = from->rnr_retry,
	        .alt_port_num = from->alt_port,
	        .alt_timeout = from->alt_timeout,
	        .rate_limit = from->rate_limit,
	};
	address_from_wire(&to->ah_attr, &from->address);
	address_from_wire(&to->alt_ah_attr, &from->alt_address);
}

VERSION_1_1(ibv_query_qp);
PUBLIC int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask,
                        struct ibv_qp_init_attr *init)
{
	struct qp *qp = qp_of(base);
	struct verbs_object_request request = {.object = base->qp_num};
	struct verbs_query_qp_reply reply;
	int error;

	(void)mask; /* all of it is as cheap as some */
	error = control_request(context_of(base->context), VERBS_QUERY_QP, &request, sizeof(request), &reply,
	                        sizeof(reply), NULL, 0);
	if (error)
		return error;
	attr_from_wire(attr, &reply.attr);
	attr->cap = qp->cap;
	base->state = attr->qp_state;
	*init = (struct ibv_qp_init_attr){
	        .qp_context = base->qp_context,
	        .send_cq = base->send_cq,
	        .recv_cq = base->recv_cq,
	        .srq = base->srq,
	        .cap = qp->cap,
	        .qp_type = base->qp_type,
	        .sq_sig_all = qp->sq_sig_all,
	};
	return 0;
}

VERSION_1_1(ibv_destroy_qp);
PUBLIC int ibv_destroy_qp(struct ibv_qp *base)
{
	struct qp *qp = qp_of(base);
	struct context *c = context_of(base->context);
	int error = control_destroy(c, VERBS_DESTROY_QP, base->qp_num);

	if (error)
		return error;
	hide_qp(c, qp);
	wait_for_acks(&base->events_completed, &qp->async_events);
	free_qp(qp);
	return 0;
}

static int change_membership(struct ibv_qp *qp, const union ibv_gid *gid, enum verbs_command command)
{
	struct verbs_mcast_request request = {.qp = qp->qp_num};
	struct verbs_reply reply;

	memcpy(request.gid, gid->raw, sizeof(request.gid));
	return control_request(context_of(qp->context), command, &request, sizeof(request), &reply,
	                       sizeof(reply), NULL, 0);
}

VERSION_1_1(ibv_attach_mcast);
PUBLIC int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	return change_membership(qp, gid, VERBS_ATTACH_MCAST);
}

VERSION_1_1(ibv_detach_mcast);
PUBLIC int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	return change_membership(qp, gid, VERBS_DETACH_MCAST);
}

/* The router copies from the first byte to the last, but nobody promises in which order memcpy()
 * does. */
PUBLIC int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp, (void)op, (void)flags;
	return 0;
}

/* Enhancements that the two ends of a connection agree upon: there are none. */

PUBLIC int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	*ece = (struct ibv_ece){0};
	return 0;
}

PUBLIC int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

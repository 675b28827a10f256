/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Shared receive queues. */

#include "verbs/internal.h"

static int make_srq(struct srq *srq, struct ibv_srq_init_attr *attr)
{
	struct context *c = context_of(srq->base.context);
	struct verbs_create_srq_request request = {
	        .user = (uintptr_t)srq,
	        .pd = srq->base.pd->handle,
	        .max_wr = attr->attr.max_wr,
	        .max_sge = attr->attr.max_sge,
	};
	struct verbs_create_srq_reply reply;
	int fd = -1;
	int error = control_request(c, VERBS_CREATE_SRQ, &request, sizeof(request), &reply, sizeof(reply),
	                            &fd, 1);

	if (error)
		return error;
	error = memory_map(&srq->memory, fd, reply.memory_size);
	if (!error && !ring_producer_attach(&srq->ring, srq->memory.base, srq->memory.length,
	                                    VERBS_SRQ_RECEIVE_RING, reply.capacity))
		error = EPROTO;
	if (!error) {
		lock_take(&c->objects_lock);
		error = table_insert(&c->srqs, reply.srq, srq);
		lock_release(&c->objects_lock);
	}
	if (error) {
		control_destroy(c, VERBS_DESTROY_SRQ, reply.srq);
		return error;
	}
	srq->base.handle = reply.srq;
	srq->max_sge = reply.max_sge;
	attr->attr.max_wr = reply.max_wr;
	attr->attr.max_sge = reply.max_sge;
	return 0;
}

VERSION_1_1(ibv_create_srq);
PUBLIC struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	const struct verbs_hello_reply *h = &context_of(pd->context)->hello;
	struct srq *srq;
	int error;

	if (attr->attr.max_wr == 0 || attr->attr.max_wr > h->max_srq_wr ||
	    attr->attr.max_sge > h->max_srq_sge) {
		errno = EINVAL;
		return NULL;
	}
	srq = calloc(1, sizeof(*srq));
	if (!srq) {
		errno = ENOMEM;
		return NULL;
	}
	srq->base.context = pd->context;
	srq->base.srq_context = attr->srq_context;
	srq->base.pd = pd;
	error = make_srq(srq, attr);
	if (error) {
		memory_unmap(&srq->memory);
		free(srq);
		errno = error;
		return NULL;
	}
	return &srq->base;
}

VERSION_1_1(ibv_modify_srq);
PUBLIC int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	struct verbs_modify_srq_request request = {
	        .srq = srq->handle,
	        .mask = (uint32_t)mask,
	        .max_wr = mask & IBV_SRQ_MAX_WR ? attr->max_wr : 0,
	        .limit = mask & IBV_SRQ_LIMIT ? attr->srq_limit : 0,
	};
	struct verbs_reply reply;

	return control_request(context_of(srq->context), VERBS_MODIFY_SRQ, &request, sizeof(request), &reply,
	                       sizeof(reply), NULL, 0);
}

VERSION_1_1(ibv_query_srq);
PUBLIC int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	struct verbs_object_request request = {.object = srq->handle};
	struct verbs_query_srq_reply reply;
	int error = control_request(context_of(srq->context), VERBS_QUERY_SRQ, &request, sizeof(request),
	                            &reply, sizeof(reply), NULL, 0);

	if (!error)
		*attr = (struct ibv_srq_attr){
		        .max_wr = reply.max_wr, .max_sge = reply.max_sge, .srq_limit = reply.limit};
	return error;
}

VERSION_1_1(ibv_destroy_srq);
PUBLIC int ibv_destroy_srq(struct ibv_srq *base)
{
	struct srq *srq = srq_of(base);
	struct context *c = context_of(base->context);
	int error = control_destroy(c, VERBS_DESTROY_SRQ, base->handle);

	if (error)
		return error;
	lock_take(&c->objects_lock);
	table_remove(&c->srqs, base->handle);
	lock_release(&c->objects_lock);
	wait_for_acks(&base->events_completed, &srq->async_events);
	memory_unmap(&srq->memory);
	free(srq);
	return 0;
}

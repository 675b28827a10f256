/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Completion channels and asynchronous events: sockets on which the router sends a message for
 * each. */

#include <fcntl.h>
#include <sys/socket.h>

#include "verbs/internal.h"

PUBLIC struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct verbs_plain_request request;
	struct verbs_object_reply reply;
	struct channel *channel = calloc(1, sizeof(*channel));
	int fd = -1, error = ENOMEM;

	if (channel)
		error = control_request(context_of(context), VERBS_CREATE_CHANNEL, &request, sizeof(request),
		                        &reply, sizeof(reply), &fd, 1);
	if (error) {
		free(channel);
		errno = error;
		return NULL;
	}
	channel->base = (struct ibv_comp_channel){.context = context, .fd = fd};
	channel->handle = reply.object;
	return &channel->base;
}

PUBLIC int ibv_destroy_comp_channel(struct ibv_comp_channel *base)
{
	struct channel *channel = (struct channel *)base;
	int error;

	if (base->refcnt)
		return EBUSY;
	error = control_destroy(context_of(base->context), VERBS_DESTROY_CHANNEL, channel->handle);
	if (error)
		return error;
	close_fd(base->fd);
	free(channel);
	return 0;
}

/* Receives what comes while the container's setting has the wait spin: as recv, EAGAIN if nothing
 * came. */
static long receive_spinning(struct context *c, struct spin *s, int fd, void *event, size_t length)
{
	int64_t time = spin_begin(c, s), until;
	long got;

	errno = EAGAIN;
	if (!time)
		return -1;
	got = recv(fd, event, length, MSG_DONTWAIT);
	/* A program that does not want to wait is told so at once. */
	if (got < 0 && errno == EAGAIN && syscall(SYS_fcntl, fd, F_GETFL) & O_NONBLOCK) {
		errno = EAGAIN;
		return -1;
	}
	until = now_ns() + time;
	while (got < 0 && errno == EAGAIN && now_ns() < until && !is_gone(c))
		got = recv(fd, event, length, MSG_DONTWAIT);
	spin_end(s, got >= 0);
	return got;
}

/* Receives one event, spinning first if `s` is one. Returns 1, 0 if the router has ended, or -1
 * with errno. */
static int receive_event(struct context *c, struct spin *s, int fd, void *event, size_t length)
{
	/* Nothing is waited for from a router that was given up. recv() of the C library, because a
	 * thread can be cancelled in it, as it can in the read() of the real library. */
	bool gone;
	long got = -1;

	errno = EAGAIN;
	if (s && !is_gone(c))
		got = receive_spinning(c, s, fd, event, length);
	gone = is_gone(c);
	if (got < 0 && errno == EAGAIN)
		got = recv(fd, event, length, gone ? MSG_DONTWAIT : 0);
	if (got == (long)length)
		return 1;
	if (got < 0 && errno != ECONNRESET && !(gone && errno == EAGAIN))
		return -1;
	if (!gone)
		control_give_up(c);
	return 0;
}

/* When the router has ended, each CQ of the channel has one more event: a poll finds what is
 * flushed. */
static struct cq *next_cq_to_flush(struct context *c, struct ibv_comp_channel *channel)
{
	for (uint32_t i = 0; i < c->cqs.size; i++) {
		struct cq *cq = c->cqs.entries[i].object;

		if (c->cqs.entries[i].key == 0 || cq->base.channel != channel || cq->end_reported)
			continue;
		cq->end_reported = true;
		return cq;
	}
	return NULL;
}

VERSION_1_1(ibv_get_cq_event);
PUBLIC int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **found, void **cq_context)
{
	struct context *c = context_of(channel->context);
	struct verbs_completion_event event;
	struct cq *cq;

	do {
		int got = receive_event(c, &((struct channel *)channel)->spin, channel->fd, &event,
		                        sizeof(event));

		if (got < 0)
			return -1;
		lock_take(&c->objects_lock);
		/* An event may have been sent before its CQ was destroyed. */
		cq = got ? table_find(&c->cqs, event.cq) : next_cq_to_flush(c, channel);
		if (cq)
			cq->events++;
		lock_release(&c->objects_lock);
		if (!cq && !got) {
			errno = EIO;
			return -1;
		}
	} while (!cq);
	*found = (struct ibv_cq *)&cq->base;
	*cq_context = cq->base.cq_context;
	return 0;
}

static void acknowledge(uint32_t *acknowledged, uint32_t count)
{
	atomic_fetch_add((_Atomic uint32_t *)acknowledged, count);
	futex_wake_all(acknowledged);
}

void wait_for_acks(uint32_t *acknowledged, const uint32_t *given)
{
	uint32_t now;

	while ((now = atomic_load((_Atomic uint32_t *)acknowledged)) != *given)
		futex_wait(acknowledged, now);
}

VERSION_1_1(ibv_ack_cq_events);
PUBLIC void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	acknowledge(&cq->comp_events_completed, count);
}

enum subject {
	SUBJECT_PORT,
	SUBJECT_QP,
	SUBJECT_CQ,
	SUBJECT_SRQ,
};

static enum subject subject_of(enum ibv_event_type type)
{
	switch (type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return SUBJECT_QP;
	case IBV_EVENT_CQ_ERR:
		return SUBJECT_CQ;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return SUBJECT_SRQ;
	default:
		return SUBJECT_PORT;
	}
}

/* Finds the object that the event is about and counts the event. False if it is gone. */
static bool fill_event(struct context *c, const struct verbs_async_event *from, struct ibv_async_event *to)
{
	struct cq *cq;
	struct qp *qp;
	struct srq *srq;

	to->event_type = from->event;
	switch (subject_of(to->event_type)) {
	case SUBJECT_QP:
		qp = table_find(&c->qps, from->object);
		if (!qp)
			return false;
		if (from->event == IBV_EVENT_QP_FATAL)
			atomic_store((_Atomic uint32_t *)&qp->base.qp_base.state, IBV_QPS_ERR);
		qp->async_events++;
		to->element.qp = &qp->base.qp_base;
		return true;
	case SUBJECT_CQ:
		cq = table_find(&c->cqs, from->object);
		if (!cq)
			return false;
		cq->async_events++;
		to->element.cq = (struct ibv_cq *)&cq->base;
		return true;
	case SUBJECT_SRQ:
		srq = table_find(&c->srqs, from->object);
		if (!srq)
			return false;
		srq->async_events++;
		to->element.srq = &srq->base;
		return true;
	case SUBJECT_PORT:
		to->element.port_num = 1;
	}
	return true;
}

VERSION_1_1(ibv_get_async_event);
PUBLIC int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct context *c = context_of(context);
	struct verbs_async_event from;
	bool found;

	do {
		int got = receive_event(c, NULL, context->async_fd, &from, sizeof(from));

		if (got < 0)
			return -1;
		if (!got)
			from = (struct verbs_async_event){.event = IBV_EVENT_DEVICE_FATAL};
		lock_take(&c->objects_lock);
		found = fill_event(c, &from, event);
		if (!got) {
			found = !c->end_reported;
			c->end_reported = true;
		}
		lock_release(&c->objects_lock);
		if (!found && !got) {
			errno = EIO;
			return -1;
		}
	} while (!found);
	return 0;
}

VERSION_1_1(ibv_ack_async_event);
PUBLIC void ibv_ack_async_event(struct ibv_async_event *event)
{
	switch (subject_of(event->event_type)) {
	case SUBJECT_QP:
		acknowledge(&event->element.qp->events_completed, 1);
		return;
	case SUBJECT_CQ:
		acknowledge(&event->element.cq->async_events_completed, 1);
		return;
	case SUBJECT_SRQ:
		acknowledge(&event->element.srq->events_completed, 1);
		return;
	case SUBJECT_PORT:
		return;
	}
}

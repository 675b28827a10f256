/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What Debian's programs do not try of the verbs API: api NAME. Ends with 0, or says what was not
 * as it should be. It is compiled against Debian's headers and library, and run with ours. */

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"

void is(int line, const char *what, long long have, long long want)
{
	if (have == want)
		return;
	printf("line %d: %s is %lld, want %lld (errno %d)\n", line, what, have, want, errno);
	exit(1);
}

void *must(const char *what, void *object)
{
	if (object)
		return object;
	printf("%s: errno %d\n", what, errno);
	exit(1);
}
struct ibv_context *context;
struct ibv_pd *pd;
struct ibv_comp_channel *channel;
struct ibv_cq_ex *cq;
struct ibv_mr *mr;
uint64_t buffer[4096];

void open_all(void)
{
	struct ibv_device **list = MUST(ibv_get_device_list(NULL));
	struct ibv_cq_init_attr_ex attr = {
	        .cqe = CQ_SIZE,
	        .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
	};

	context = MUST(ibv_open_device(MUST(list[0])));
	ibv_free_device_list(list);
	pd = MUST(ibv_alloc_pd(context));
	attr.channel = channel = MUST(ibv_create_comp_channel(context));
	cq = MUST(ibv_create_cq_ex(context, &attr));
	mr = MUST(ibv_reg_mr(pd, buffer, sizeof(buffer),
	                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
	                             IBV_ACCESS_REMOTE_ATOMIC));
}

struct ibv_qp *make_qp(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr_ex attr = {
	        .send_cq = ibv_cq_ex_to_cq(cq),
	        .recv_cq = ibv_cq_ex_to_cq(cq),
	        .cap = {.max_send_wr = DEPTH,
	                .max_recv_wr = DEPTH,
	                .max_send_sge = 8,
	                .max_recv_sge = 8,
	                .max_inline_data = 64},
	        .qp_type = type,
	        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
	        .pd = pd,
	        .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE,
	};

	return MUST(ibv_create_qp_ex(context, &attr));
}

void to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t remote)
{
	struct ibv_qp_attr attr = {
	        .qp_state = state,
	        .dest_qp_num = remote,
	        .qp_access_flags =
	                IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	        .port_num = 1,
	        .path_mtu = IBV_MTU_1024,
	        .max_dest_rd_atomic = 4,
	        .max_rd_atomic = 4,
	        .min_rnr_timer = 12,
	        .retry_cnt = 7,
	        .rnr_retry = 7,
	        .ah_attr = {.is_global = 1, .port_num = 1},
	};
	bool rc = qp->qp_type == IBV_QPT_RC;
	int mask = IBV_QP_STATE;

	IS(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid), 0);
	if (state == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | (rc ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY);
	if (state == IBV_QPS_RTR && rc)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	if (state == IBV_QPS_RTS)
		mask |= IBV_QP_SQ_PSN;
	if (state == IBV_QPS_RTS && rc)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	IS(ibv_modify_qp(qp, &attr, mask), 0);
	IS(qp->state, state);
}

void connect_to(struct ibv_qp *qp, uint32_t remote)
{
	to_state(qp, IBV_QPS_INIT, 0);
	to_state(qp, IBV_QPS_RTR, remote);
	to_state(qp, IBV_QPS_RTS, 0);
}

struct ibv_sge at(unsigned int word, unsigned int words)
{
	return (struct ibv_sge){.addr = (uintptr_t)&buffer[word], .length = words * 8, .lkey = mr->lkey};
}

int receive(struct ibv_qp *qp, uint64_t id, unsigned int word, int pieces)
{
	struct ibv_sge list[8];
	struct ibv_recv_wr wr = {.wr_id = id, .sg_list = list, .num_sge = pieces}, *bad = NULL;

	for (int i = 0; i < pieces && i < 8; i++)
		list[i] = at(word + i, 1);
	int error = ibv_post_recv(qp, &wr, &bad);
	IS(bad == (error ? &wr : NULL), 1);
	return error;
}

struct ibv_wc next(void)
{
	struct ibv_wc wc;
	int found;

	while ((found = ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc)) == 0)
		;
	IS(found, 1);
	return wc;
}

void close_all(struct ibv_qp *a, struct ibv_qp *b)
{
	IS(ibv_destroy_qp(a), 0);
	IS(b ? ibv_destroy_qp(b) : 0, 0);
	IS(ibv_destroy_comp_channel(channel), EBUSY);
	IS(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	IS(ibv_destroy_comp_channel(channel), 0);
	IS(ibv_dereg_mr(mr), 0);
	IS(ibv_dealloc_pd(pd), 0);
	IS(ibv_close_device(context), 0);
}

/* Both ways to post, each operation, and the extended way to poll. */
static void operations(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	struct ibv_qp_ex *x = MUST(ibv_qp_to_qp_ex(a));
	struct ibv_poll_cq_attr poll = {0};
	struct ibv_sge list[8];
	struct ibv_data_buf parts[] = {{&buffer[0], 24}, {&buffer[3], 40}};
	bool received = false, sent = false;

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(ibv_start_poll(cq, &poll), ENOENT);
	for (int i = 0; i < 8; i++)
		buffer[i] = 100 + i, list[i] = at(i, 1);
	/* Eight entries, which are three slots, into eight others. */
	IS(receive(b, 1, 100, 8), 0);
	ibv_wr_start(x);
	x->wr_id = 2, x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(x, 77);
	ibv_wr_set_sge_list(x, 8, list);
	IS(ibv_wr_complete(x), 0);
	while (!sent || !received) {
		while (ibv_start_poll(cq, &poll))
			;
		do {
			IS(cq->status, IBV_WC_SUCCESS);
			IS(ibv_wc_read_completion_ts(cq) > 0, 1);
			if (ibv_wc_read_opcode(cq) == IBV_WC_RECV) {
				IS(cq->wr_id, 1);
				IS(ibv_wc_read_imm_data(cq), 77);
				IS(ibv_wc_read_wc_flags(cq), IBV_WC_WITH_IMM);
				IS(ibv_wc_read_byte_len(cq), 64);
				IS(ibv_wc_read_qp_num(cq), b->qp_num);
				IS(ibv_wc_read_src_qp(cq), a->qp_num);
				received = true;
			} else {
				IS(cq->wr_id, 2);
				sent = true;
			}
		} while (ibv_next_poll(cq) == 0);
		ibv_end_poll(cq);
	}
	IS(memcmp(&buffer[0], &buffer[100], 64), 0);
	/* What is aborted never was. A batch: inline from two parts, then an atomic each, then a
	 * read. */
	ibv_wr_start(x);
	x->wr_id = 3;
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)&buffer[200]);
	ibv_wr_set_inline_data(x, "aborted", 8);
	ibv_wr_abort(x);
	buffer[300] = 5;
	ibv_wr_start(x);
	x->wr_id = 4, x->wr_flags = 0;
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)&buffer[210]);
	ibv_wr_set_inline_data_list(x, 2, parts);
	ibv_wr_atomic_fetch_add(x, mr->rkey, (uintptr_t)&buffer[300], 3);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)&buffer[301], 8);
	ibv_wr_atomic_cmp_swp(x, mr->rkey, (uintptr_t)&buffer[300], 8, 42);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)&buffer[302], 8);
	x->wr_id = 5, x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_read(x, mr->rkey, (uintptr_t)&buffer[300]);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)&buffer[303], 8);
	IS(ibv_wr_complete(x), 0);
	struct ibv_wc wc = next();
	IS(wc.wr_id, 5);
	IS(wc.opcode, IBV_WC_RDMA_READ);
	IS(buffer[200], 0);
	IS(memcmp(&buffer[0], &buffer[210], 64), 0);
	IS(buffer[301], 5);
	IS(buffer[302], 8);
	IS(buffer[303], 42);
	/* Too much inline data: nothing of the batch is posted. */
	ibv_wr_start(x);
	ibv_wr_send(x);
	ibv_wr_set_inline_data(x, buffer, 1024);
	IS(ibv_wr_complete(x), EINVAL);
	close_all(a, b);
}

/* What is refused, and with which errno. */
static void refusals(void)
{
	open_all();
	struct ibv_qp *qp = make_qp(IBV_QPT_UD), *full = make_qp(IBV_QPT_RC), *idle = make_qp(IBV_QPT_RC);
	struct ibv_sge list[9] = {at(0, 1)};
	struct ibv_send_wr second = {.wr_id = 2, .opcode = IBV_WR_RDMA_READ, .sg_list = list, .num_sge = 1};
	struct ibv_send_wr *bad;
	struct ibv_ah_attr to = {
	        .is_global = 1, .port_num = 1, .grh.dgid.raw = {[10] = 0xff, [11] = 0xff, [12] = 10}};
	struct ibv_ah *ah = MUST(ibv_create_ah(pd, &to));
	struct ibv_send_wr wr = {
	        .opcode = IBV_WR_SEND, .sg_list = list, .num_sge = 1, .wr.ud = {.ah = ah, .remote_qpn = 999}};
	struct ibv_cq_init_attr_ex strange = {.cqe = 1, .wc_flags = IBV_WC_EX_WITH_FLOW_TAG};
	struct ibv_qp_init_attr raw = {.send_cq = ibv_cq_ex_to_cq(cq),
	                               .recv_cq = ibv_cq_ex_to_cq(cq),
	                               .qp_type = IBV_QPT_RAW_PACKET};
	union ibv_gid gid;

	IS(ibv_post_send(qp, &wr, &bad), EINVAL); /* in RESET */
	IS(bad == &wr, 1);
	IS(receive(qp, 0, 0, 1), EINVAL);
	connect_to(qp, 0);
	IS(receive(qp, 0, 0, 9), EINVAL);
	for (int i = 0; i < DEPTH; i++)
		IS(receive(qp, i, 0, 1), 0);
	IS(receive(qp, DEPTH, 0, 1), ENOMEM);
	wr.next = &second;
	IS(ibv_post_send(qp, &wr, &bad), EINVAL); /* UD has no reads; the first one is posted */
	IS(bad == &second, 1);
	wr.next = NULL;
	wr.num_sge = 9;
	IS(ibv_post_send(qp, &wr, &bad), EINVAL);
	wr.num_sge = 1;
	/* The peer is not ready: no more than the queue holds. */
	connect_to(full, idle->qp_num);
	for (int i = 0; i < DEPTH; i++)
		IS(ibv_post_send(full, &wr, &bad), 0);
	IS(ibv_post_send(full, &wr, &bad), ENOMEM);
	IS(bad == &wr, 1);

	errno = 0;
	IS(ibv_create_cq_ex(context, &strange) == NULL && errno == EOPNOTSUPP, 1);
	IS(ibv_create_cq(context, 0, NULL, NULL, 0) == NULL && errno == EINVAL, 1);
	IS(ibv_create_cq(context, 1, NULL, NULL, 1) == NULL && errno == EINVAL, 1);
	IS(ibv_create_qp(pd, &raw) == NULL && errno == EOPNOTSUPP, 1);
	IS(ibv_reg_mr(pd, buffer, 0, IBV_ACCESS_LOCAL_WRITE) == NULL && errno == EINVAL, 1);
	IS(ibv_query_gid(context, 1, 1, &gid) == -1 && errno == EINVAL, 1);
	IS(ibv_query_gid(context, 2, 0, &gid) == -1 && errno == EINVAL, 1);
	errno = 0;
	IS(ibv_alloc_mw(pd, IBV_MW_TYPE_1) == NULL && errno == EOPNOTSUPP, 1);
	errno = 0;
	IS(ibv_import_device(0) == NULL && errno == EOPNOTSUPP, 1);
	IS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, list, 1), EOPNOTSUPP);
	IS(ibv_destroy_ah(ah), 0);
	IS(ibv_destroy_qp(idle), 0);
	close_all(qp, full);
}

int readable(int fd)
{
	struct pollfd wait = {.fd = fd, .events = POLLIN};

	return poll(&wait, 1, 0);
}

void send_one(struct ibv_qp *qp, unsigned int flags)
{
	struct ibv_sge sge = at(0, 1);
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1, .send_flags = flags},
	                   *bad;

	IS(ibv_post_send(qp, &wr, &bad), 0);
}

/* Completion events: those asked for and no others. */
static void events(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	struct ibv_cq *found;
	void *own;

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	for (int i = 0; i < 4; i++)
		IS(receive(b, i, 8, 1), 0);
	IS(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 1), 0);
	send_one(a, 0);
	IS(next().opcode, IBV_WC_RECV);
	IS(readable(channel->fd), 0);
	send_one(a, IBV_SEND_SOLICITED);
	IS(ibv_get_cq_event(channel, &found, &own), 0);
	IS(found == ibv_cq_ex_to_cq(cq), 1);
	IS(next().opcode, IBV_WC_RECV);
	/* Solicited only does not take the place of any. */
	IS(ibv_req_notify_cq(found, 0), 0);
	IS(ibv_req_notify_cq(found, 1), 0);
	send_one(a, 0);
	IS(ibv_get_cq_event(channel, &found, &own), 0);
	ibv_ack_cq_events(found, 2);
	IS(next().opcode, IBV_WC_RECV);
	/* Completions of the time before a reset are not given out. */
	IS(ibv_req_notify_cq(found, 0), 0);
	send_one(a, IBV_SEND_SIGNALED);
	IS(ibv_get_cq_event(channel, &found, &own), 0);
	ibv_ack_cq_events(found, 1);
	to_state(b, IBV_QPS_RESET, 0);
	to_state(a, IBV_QPS_RESET, 0);
	struct ibv_wc wc;
	IS(ibv_poll_cq(found, 1, &wc), 0);
	/* Afterwards they are, and what is in the queues when one goes to ERR is flushed. */
	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(receive(b, 20, 8, 1), 0);
	IS(receive(b, 21, 8, 1), 0);
	send_one(a, 0);
	IS(next().wr_id, 20);
	to_state(b, IBV_QPS_ERR, 0);
	wc = next();
	IS(wc.status, IBV_WC_WR_FLUSH_ERR);
	IS(wc.wr_id, 21);
	close_all(a, b);
}

static struct ibv_qp *a, *b;

/* Posts what nobody serves, as the peer is not ready, and waits until the test has done what it
 * wants. */
static void post_and_wait(void)
{
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND}, *bad;
	char go;

	open_all();
	a = make_qp(IBV_QPT_RC), b = make_qp(IBV_QPT_RC);
	connect_to(a, b->qp_num);
	for (int i = 0; i < 3; i++) {
		wr.wr_id = i;
		IS(ibv_post_send(a, &wr, &bad), 0);
	}
	IS(receive(a, 7, 0, 1), 0);
	IS(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0), 0);
	printf("posted\n");
	fflush(stdout);
	IS(read(0, &go, 1), 0);
}

/* All that was posted is flushed, once, and other calls answer EIO. */
static void see_flushed(void)
{
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND}, *bad;
	struct ibv_async_event event;
	struct ibv_port_attr port;
	struct ibv_wc wc;

	for (int i = 0; i < 4; i++) {
		wc = next();
		IS(wc.status, IBV_WC_WR_FLUSH_ERR);
		IS(wc.qp_num, a->qp_num);
		IS(wc.wr_id, i < 3 ? i : 7);
	}
	IS(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc), 0);
	IS(ibv_get_async_event(context, &event), 0);
	IS(event.event_type, IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
	IS(ibv_get_async_event(context, &event), -1);
	IS(errno, EIO);
	IS(ibv_post_send(a, &wr, &bad), EIO);
	IS(receive(a, 7, 0, 1), EIO);
	IS(ibv_query_port(context, 1, &port), 0);
	IS(port.state, IBV_PORT_DOWN);
	IS(ibv_alloc_pd(context) == NULL && errno == EIO, 1);
}

/* The router ends. */
static void end(void)
{
	struct ibv_cq *found;
	void *own;

	post_and_wait();
	IS(ibv_get_cq_event(channel, &found, &own), 0);
	ibv_ack_cq_events(found, 1);
	see_flushed();
	IS(ibv_get_cq_event(channel, &found, &own), -1);
	IS(errno, EIO);
	close_all(a, b);
	struct ibv_device **list = MUST(ibv_get_device_list(NULL));
	IS(list[0] == NULL, 1);
	ibv_free_device_list(list);
}

/* The router writes an index that cannot be. */
static void broken(void)
{
	post_and_wait();
	see_flushed();
	close_all(a, b);
}

/* Makes one of each, and says what came of it. */
static void make(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *p = c ? ibv_alloc_pd(c) : NULL;
	struct ibv_comp_channel *ch = c ? ibv_create_comp_channel(c) : NULL;
	struct ibv_cq *q = ch ? ibv_create_cq(c, 4, NULL, ch, 0) : NULL;
	struct ibv_qp_init_attr attr = {
	        .send_cq = q, .recv_cq = q, .cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp = p && q ? ibv_create_qp(p, &attr) : NULL;
	int error = errno;

	printf("%s: errno %d\n",
	       qp   ? "all"
	       : q  ? "CQ"
	       : ch ? "channel"
	       : p  ? "PD"
	       : c  ? "context"
	            : "nothing",
	       qp ? 0 : error);
	if (qp)
		IS(ibv_destroy_qp(qp), 0);
	if (q)
		IS(ibv_destroy_cq(q), 0);
	if (ch)
		IS(ibv_destroy_comp_channel(ch), 0);
	if (p)
		IS(ibv_dealloc_pd(p), 0);
	if (c)
		IS(ibv_close_device(c), 0);
}

#define MESSAGES 2000

/* Sends messages to itself and counts their completions, whichever thread polls them. */
static _Atomic unsigned int completed[THREADS];

static void *use_queue(void *argument)
{
	struct ibv_qp *qp = argument;
	bool owed = false; /* a receive request is there for one more message */
	unsigned int sent = 0;
	uint64_t id = (uint64_t)(uintptr_t)qp->qp_context;

	while (completed[id] < 2 * MESSAGES) {
		struct ibv_wc wc[4];
		struct ibv_sge sge = at(0, 1);
		struct ibv_send_wr wr = {.wr_id = id,
		                         .opcode = IBV_WR_SEND,
		                         .send_flags = IBV_SEND_SIGNALED,
		                         .sg_list = &sge,
		                         .num_sge = 1},
		                   *bad;
		if (!owed && sent < MESSAGES)
			owed = receive(qp, id, 100, 1) == 0;
		if (owed && ibv_post_send(qp, &wr, &bad) == 0) {
			owed = false;
			sent++;
		}
		int found = ibv_poll_cq(ibv_cq_ex_to_cq(cq), 4, wc);
		for (int i = 0; i < found; i++) {
			IS(wc[i].status, IBV_WC_SUCCESS);
			completed[wc[i].wr_id]++;
		}
	}
	return NULL;
}

/* Several threads, each with a queue pair, and one CQ. */
static void threads(void)
{
	struct ibv_qp *qps[THREADS];
	pthread_t running[THREADS];

	open_all();
	for (uintptr_t i = 0; i < THREADS; i++) {
		qps[i] = make_qp(IBV_QPT_RC);
		qps[i]->qp_context = (void *)i;
		connect_to(qps[i], qps[i]->qp_num);
	}
	for (int i = 0; i < THREADS; i++)
		IS(pthread_create(&running[i], NULL, use_queue, qps[i]), 0);
	for (int i = 0; i < THREADS; i++)
		IS(pthread_join(running[i], NULL), 0);
	for (int i = 0; i < THREADS; i++)
		IS(completed[i], 2 * MESSAGES);
	for (int i = 2; i < THREADS; i++)
		IS(ibv_destroy_qp(qps[i]), 0);
	close_all(qps[0], qps[1]);
}

int main(int count, char **words)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} parts[] = {
	        {"operations", operations}, {"refusals", refusals}, {"events", events},    {"end", end},
	        {"broken", broken},         {"threads", threads},   {"make", make},        {"resize", resize},
	        {"reregister", reregister}, {"groups", groups},     {"naps", naps},        {"shared", shared},
	        {"scarce", scarce},         {"spins", spins},       {"sleeping", sleeping}};

	for (size_t i = 0; count == 2 && i < sizeof(parts) / sizeof(parts[0]); i++) {
		if (strcmp(words[1], parts[i].name) == 0) {
			parts[i].run();
			return 0;
		}
	}
	return 2;
}

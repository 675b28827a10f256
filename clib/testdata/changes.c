/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Objects that change while they are used: completion queues, regions, groups of queue pairs;
 * shared receive queues; and what is scarce. */

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "api.h"

/* A queue that grows loses nothing, whatever it holds, and nobody's wish for an event. */
void resize(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC), *gone = make_qp(IBV_QPT_RC);
	struct ibv_cq *queue = ibv_cq_ex_to_cq(cq), *found;
	struct ibv_wc wc;
	void *own;

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(receive(b, 100, 8, 1), 0);
	send_one(a, IBV_SEND_SIGNALED);
	/* Flushed at once: a completion of a queue pair that is reset before it is looked at. */
	to_state(gone, IBV_QPS_ERR, 0);
	IS(receive(gone, 200, 8, 1), 0);
	IS(ibv_req_notify_cq(queue, 0), 0);
	for (int size = 2 * CQ_SIZE, round = 1; round <= 3; round++, size *= 4) {
		IS(ibv_resize_cq(queue, size - 1), 0);
		IS(queue->cqe >= size - 1, 1);
		IS(receive(b, 100 + round, 8, 1), 0);
		send_one(a, IBV_SEND_SIGNALED);
		IS(ibv_get_cq_event(channel, &found, &own), 0);
		ibv_ack_cq_events(found, 1);
		IS(ibv_req_notify_cq(queue, 0), 0);
		if (round == 1)
			to_state(gone, IBV_QPS_RESET, 0);
	}
	/* Those of each direction come in their order. */
	for (int sent = 0, received = 0; sent + received < 8;) {
		wc = next();
		IS(wc.status, IBV_WC_SUCCESS);
		if (wc.opcode == IBV_WC_RECV)
			IS(wc.wr_id, 100 + received++);
		else
			sent++;
	}
	IS(ibv_poll_cq(queue, 1, &wc), 0);
	IS(ibv_resize_cq(queue, 1), 0); /* it holds more, and need not hold less */
	IS(ibv_resize_cq(queue, 0), EINVAL);
	IS(ibv_resize_cq(queue, 1 << 30), EINVAL);
	IS(ibv_destroy_qp(gone), 0);
	close_all(a, b);
}

static enum ibv_wc_status write_to(struct ibv_qp *qp, void *to, uint32_t key)
{
	struct ibv_sge sge = at(0, 1);
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE,
	                         .sg_list = &sge,
	                         .num_sge = 1,
	                         .send_flags = IBV_SEND_SIGNALED,
	                         .wr.rdma = {.remote_addr = (uintptr_t)to, .rkey = key}},
	                   *bad;

	IS(ibv_post_send(qp, &wr, &bad), 0);
	return next().status;
}

/* A region that changes has other keys, and the rights and bytes of now. */
void reregister(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	static uint64_t other[64];
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_mr *region = MUST(ibv_reg_mr(pd, other, 8, rights));
	struct ibv_pd *second = MUST(ibv_alloc_pd(context));
	uint32_t before = region->rkey;

	buffer[0] = 77;
	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(write_to(a, other, region->rkey), IBV_WC_SUCCESS);
	IS(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, &other[32], 64, 0), 0);
	IS(region->addr == &other[32] && region->length == 64, 1);
	IS(write_to(a, &other[39], region->rkey), IBV_WC_SUCCESS);
	IS(other[0] == 77 && other[39] == 77, 1);

	errno = 0;
	IS(ibv_rereg_mr(region, 8, pd, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL, 1);
	IS(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION, pd, other, 0, 0), IBV_REREG_MR_ERR_INPUT);
	IS(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	IS(write_to(a, &other[32], region->rkey), IBV_WC_SUCCESS);
	/* It is the other domain's then, which is in use, and the first one's is not. */
	IS(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, second, NULL, 0, rights),
	   0);
	IS(region->pd == second && region->addr == &other[32], 1);
	IS(ibv_dealloc_pd(second), EBUSY);
	IS(write_to(a, &other[32], region->rkey), IBV_WC_REM_ACCESS_ERR);
	/* What was before does not come back. */
	IS(before != region->rkey, 1);
	errno = 0;
	IS(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)4096, 8, 0),
	   IBV_REREG_MR_ERR_CMD);
	IS(errno, EFAULT);
	IS(ibv_dereg_mr(region), 0);
	IS(ibv_dealloc_pd(second), 0);
	close_all(a, b);
}

/* A group has those that are in it, the sender too, and those with its key. */
void groups(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_UD), *b = make_qp(IBV_QPT_UD), *rc = make_qp(IBV_QPT_RC);
	struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh.dgid.raw = {0xff, 0x0e, [15] = 9}};
	const union ibv_gid *group = &to.grh.dgid, *host = &(union ibv_gid){.raw = {0xfe, 0x80}};
	struct ibv_ah *ah = MUST(ibv_create_ah(pd, &to));
	struct ibv_sge sge = at(0, 1);
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND,
	                         .sg_list = &sge,
	                         .num_sge = 1,
	                         .send_flags = IBV_SEND_SIGNALED,
	                         .wr.ud = {.ah = ah, .remote_qpn = 0xffffff, .remote_qkey = 7}},
	                   *bad;
	struct ibv_device_attr device;
	struct ibv_wc wc;

	IS(ibv_query_device(context, &device), 0);
	IS(device.max_mcast_grp > 0 && device.max_total_mcast_qp_attach > 0, 1);
	connect_to(a, 0);
	connect_to(b, 0);
	struct ibv_qp_attr key = {.qkey = 7};
	IS(ibv_modify_qp(a, &key, IBV_QP_QKEY) | ibv_modify_qp(b, &key, IBV_QP_QKEY), 0);
	IS(ibv_attach_mcast(a, group, 0), 0);
	IS(ibv_attach_mcast(b, group, 0), 0);
	IS(ibv_attach_mcast(b, group, 0), 0); /* once more is once */
	IS(ibv_attach_mcast(rc, group, 0), EINVAL);
	IS(ibv_attach_mcast(b, host, 0), EINVAL);
	IS(receive(a, 1, 8, 6) | receive(b, 2, 16, 6) | receive(b, 3, 24, 6), 0);
	buffer[0] = 99;
	IS(ibv_post_send(a, &wr, &bad), 0);
	for (int seen = 0; seen != (1 | 2 | 4);) {
		wc = next();
		IS(wc.status, IBV_WC_SUCCESS);
		seen |= wc.opcode == IBV_WC_SEND ? 4 : (int)wc.wr_id;
	}
	IS(buffer[8 + 5] == 99 && buffer[16 + 5] == 99, 1);
	IS(memcmp(&buffer[16 + 3], group, 16), 0); /* the header in front */
	IS(ibv_detach_mcast(b, group, 0), 0);
	IS(ibv_detach_mcast(b, group, 0), EINVAL);
	IS(receive(a, 5, 8, 6), 0);
	IS(ibv_post_send(a, &wr, &bad), 0);
	for (int i = 0; i < 2; i++) {
		wc = next();
		IS(wc.qp_num, a->qp_num);
	}
	IS(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc), 0);
	IS(ibv_destroy_ah(ah), 0);
	IS(ibv_destroy_qp(rc), 0);
	close_all(a, b);
}

/* How often this program has slept. */
static long sleeps(void)
{
	struct rusage usage;

	IS(getrusage(RUSAGE_THREAD, &usage), 0);
	return usage.ru_nvcsw;
}

/* A program that polls, and gets nothing, sleeps where there is one processor, in both interfaces,
 * and finds what comes. */
void naps(void)
{
	cpu_set_t one, all;
	int processor = sched_getcpu();

	CPU_ZERO(&one);
	CPU_SET(processor, &one);
	IS(sched_getaffinity(0, sizeof(all), &all), 0);
	IS(sched_setaffinity(0, sizeof(one), &one), 0);
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	struct ibv_poll_cq_attr extended = {0};
	struct ibv_wc wc;

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	for (int round = 0; round < 3; round++) {
		for (long before = sleeps(); sleeps() < before + 3;)
			IS(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc), 0);
		for (long before = sleeps(); sleeps() < before + 3;)
			IS(ibv_start_poll(cq, &extended), ENOENT);
		IS(receive(b, 100, 8, 1), 0);
		send_one(a, IBV_SEND_SIGNALED);
		IS(next().status | next().status, IBV_WC_SUCCESS);
	}
	close_all(a, b);
	IS(sched_setaffinity(0, sizeof(all), &all), 0);
}

/* Waits for events of messages that it sends itself; says how often it slept. */
static long sleeps_for_events(struct ibv_qp *a, struct ibv_qp *b, int messages)
{
	struct ibv_cq *found;
	long before;
	void *own;

	IS(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0), 0);
	before = sleeps();
	for (int i = 0; i < messages; i++) {
		IS(receive(b, 100, 8, 1), 0);
		send_one(a, IBV_SEND_SIGNALED);
		IS(ibv_get_cq_event(channel, &found, &own), 0);
		ibv_ack_cq_events(found, 1);
		IS(next().status | next().status, IBV_WC_SUCCESS);
		IS(ibv_req_notify_cq(found, 0), 0);
	}
	return sleeps() - before;
}

/* The setting of the container is a second here: a wait for what comes sooner does not sleep.
 * Polls of nothing keep their processor for that long, and then sleep; and after one that was in
 * vain the next ones sleep soon. */
void spins(void)
{
	struct timespec start, now;
	cpu_set_t one, all;
	struct ibv_wc wc;
	double took = 1;

	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(sleeps_for_events(a, b, 100) < 10, 1);
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	IS(sched_getaffinity(0, sizeof(all), &all), 0);
	IS(sched_setaffinity(0, sizeof(one), &one), 0);
	close_all(a, b);
	open_all();
	a = make_qp(IBV_QPT_RC), b = make_qp(IBV_QPT_RC);
	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	/* Short waits between them may use up what the first that was in vain has left. */
	for (int round = 0; round < 3 && took >= .5; round++) {
		clock_gettime(CLOCK_MONOTONIC, &start);
		for (long before = sleeps(); sleeps() < before + 3;)
			IS(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc), 0);
		clock_gettime(CLOCK_MONOTONIC, &now);
		took = now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) * 1e-9;
		IS(round > 0 || took >= 1, 1);
		IS(receive(b, 100, 8, 1), 0);
		send_one(a, IBV_SEND_SIGNALED);
		IS(next().status | next().status, IBV_WC_SUCCESS);
	}
	IS(took < .5, 1);
	/* Who does not want to wait does not. */
	struct ibv_cq *found;
	void *own;

	IS(fcntl(channel->fd, F_SETFL, O_NONBLOCK), 0);
	clock_gettime(CLOCK_MONOTONIC, &start);
	IS(ibv_get_cq_event(channel, &found, &own), -1);
	IS(errno, EAGAIN);
	clock_gettime(CLOCK_MONOTONIC, &now);
	IS((now.tv_sec - start.tv_sec) * 1000000000 + now.tv_nsec - start.tv_nsec < 500000000, 1);
	close_all(a, b);
	IS(sched_setaffinity(0, sizeof(all), &all), 0);
}

/* A queue pair, and the thread that waits for what is sent by it. */
struct waiting {
	struct ibv_qp *qp;
	pid_t thread;
	bool slept;
};

/* Sends once the thread sleeps, and gives up on that after ten seconds. */
static void *send_to_sleeper(void *arg)
{
	struct waiting *w = arg;
	struct timespec start, now;
	char path[64], line[256];

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", w->thread);
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		FILE *stat = MUST(fopen(path, "r"));

		w->slept = fgets(line, sizeof(line), stat) && strstr(line, ") S ");
		fclose(stat);
		sched_yield();
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (!w->slept && now.tv_sec < start.tv_sec + 10);
	send_one(w->qp, IBV_SEND_SIGNALED);
	return NULL;
}

/* Without a setting a wait for an event sleeps. */
void sleeping(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	struct waiting w = {.qp = a, .thread = gettid()};
	struct ibv_cq *found;
	pthread_t sender;
	void *own;

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0), 0);
	IS(receive(b, 100, 8, 1), 0);
	IS(pthread_create(&sender, NULL, send_to_sleeper, &w), 0);
	IS(ibv_get_cq_event(channel, &found, &own), 0);
	ibv_ack_cq_events(found, 1);
	IS(pthread_join(sender, NULL), 0);
	IS(w.slept, true);
	IS(next().status | next().status, IBV_WC_SUCCESS);
	close_all(a, b);
}

/* How much of the router's this program has mapped. */
static int mapped(void)
{
	char line[512];
	int count = 0;
	FILE *maps = MUST(fopen("/proc/self/maps", "r"));

	while (fgets(line, sizeof(line), maps))
		count += strstr(line, "memfd:verbs") || strstr(line, "/dev/zero");
	fclose(maps);
	return count;
}

/* A program that has no descriptors left, or no memory for a new queue or for a queue's new size,
 * is told so, and keeps its device and its completions. */
void scarce(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC), *b = make_qp(IBV_QPT_RC);
	struct ibv_cq *queue = ibv_cq_ex_to_cq(cq);
	struct ibv_qp_init_attr attr = {.send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC};
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = 1, .max_sge = 1}};
	struct rlimit before, none;

	IS(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = before;
	none.rlim_cur = 3;
	IS(setrlimit(RLIMIT_NOFILE, &none), 0);
	errno = 0;
	IS(ibv_create_comp_channel(context) == NULL && errno == EMFILE, 1);
	errno = 0;
	IS(ibv_create_cq(context, 1, NULL, NULL, 0) == NULL && errno == EMFILE, 1);
	errno = 0;
	IS(ibv_create_qp(pd, &attr) == NULL && errno == EMFILE, 1);
	errno = 0;
	IS(ibv_create_srq(pd, &srq) == NULL && errno == EMFILE, 1);
	IS(ibv_resize_cq(queue, 4 * CQ_SIZE), EMFILE);
	/* That needs none: its pages stay the program's. */
	IS(ibv_dereg_mr(MUST(ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE))), 0);
	IS(setrlimit(RLIMIT_NOFILE, &before), 0);

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	IS(receive(b, 1, 8, 1) | receive(b, 2, 8, 1) | receive(b, 3, 8, 1), 0);
	/* One completion is in the queue meanwhile, another one comes before it grows. */
	send_one(a, 0);
	int had = mapped(), size = queue->cqe;

	IS(getrlimit(RLIMIT_AS, &before), 0);
	none = before;
	none.rlim_cur = 0;
	IS(setrlimit(RLIMIT_AS, &none), 0);
	errno = 0;
	IS(ibv_create_cq(context, 1 << 14, NULL, NULL, 0) == NULL && errno == ENOMEM, 1);
	errno = 0;
	IS(ibv_create_qp(pd, &attr) == NULL && errno == ENOMEM, 1);
	errno = 0;
	IS(ibv_create_srq(pd, &srq) == NULL && errno == ENOMEM, 1);
	for (int i = 0; i < 30; i++)
		IS(ibv_resize_cq(queue, 2 * size), ENOMEM);
	IS(setrlimit(RLIMIT_AS, &before), 0);
	IS(queue->cqe == size && mapped() == had, 1);

	IS(ibv_destroy_cq(MUST(ibv_create_cq(context, 1 << 14, NULL, NULL, 0))), 0);
	send_one(a, 0);
	IS(ibv_resize_cq(queue, 2 * size), 0);
	IS(queue->cqe > size && mapped() == had + 1, 1);
	send_one(a, 0);
	for (int i = 1; i <= 3; i++) {
		struct ibv_wc wc = next();

		IS(wc.status == IBV_WC_SUCCESS && (int)wc.wr_id == i, 1);
	}
	close_all(a, b);
}

/* A shared receive queue takes requests with as many entries as it was granted, as many as there is
 * room for. */
void shared(void)
{
	open_all();
	struct ibv_qp *a = make_qp(IBV_QPT_RC);
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = DEPTH, .max_sge = 2}};
	struct ibv_srq *srq = MUST(ibv_create_srq(pd, &attr));
	struct ibv_sge list[3] = {at(0, 1), at(1, 1), at(2, 1)};
	struct ibv_recv_wr second = {.wr_id = 2, .sg_list = list, .num_sge = 3};
	struct ibv_recv_wr first = {.wr_id = 1, .next = &second, .sg_list = list, .num_sge = 2}, *bad;

	IS(attr.attr.max_sge, 2);
	IS(ibv_post_srq_recv(srq, &first, &bad), EINVAL); /* the first one is there */
	IS(bad == &second, 1);
	second.num_sge = -1;
	IS(ibv_post_srq_recv(srq, &second, &bad), EINVAL);
	IS(bad == &second, 1);
	first.next = NULL;
	for (int i = 1; i < DEPTH; i++)
		IS(ibv_post_srq_recv(srq, &first, &bad), 0);
	IS(ibv_post_srq_recv(srq, &first, &bad), ENOMEM);
	IS(bad == &first, 1);
	IS(ibv_destroy_srq(srq), 0);
	attr.attr.max_sge = 1 << 10;
	errno = 0;
	IS(ibv_create_srq(pd, &attr) == NULL && errno == EINVAL, 1);
	close_all(a, NULL);
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Buffers whose pages become memory that the router has mapped, and their own again: remap NAME.
 * Ends with 0, or says what was not as it should be. Run with our library. */

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define ALL                                                                                                  \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define IS(a, b) is(__LINE__, #a, (long long)(a), (long long)(b))

static void is(int line, const char *what, long long have, long long want)
{
	if (have == want)
		return;
	printf("line %d: %s is %lld, want %lld (errno %d)\n", line, what, have, want, errno);
	exit(1);
}

static void *must(const char *what, void *object)
{
	if (object && object != MAP_FAILED)
		return object;
	printf("%s: errno %d\n", what, errno);
	exit(1);
}
#define MUST(call) must(#call, call)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = MUST(ibv_get_device_list(NULL));
	struct ibv_context *c = MUST(ibv_open_device(MUST(list[0])));

	ibv_free_device_list(list);
	return c;
}

/* Two queue pairs, connected with each other. */
static void open_all(void)
{
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {16, 16, 4, 4, 0}};
	union ibv_gid gid;

	context = open_device();
	pd = MUST(ibv_alloc_pd(context));
	cq = MUST(ibv_create_cq(context, 64, NULL, NULL, 0));
	init.send_cq = init.recv_cq = cq;
	IS(ibv_query_gid(context, 1, 0, &gid), 0);
	for (int i = 0; i < 2; i++)
		qps[i] = MUST(ibv_create_qp(pd, &init));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
		                           .port_num = 1,
		                           .qp_access_flags = ALL,
		                           .path_mtu = IBV_MTU_4096,
		                           .dest_qp_num = qps[!i]->qp_num,
		                           .max_dest_rd_atomic = 1,
		                           .max_rd_atomic = 1,
		                           .timeout = 14,
		                           .retry_cnt = 7,
		                           .rnr_retry = 7,
		                           .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid}}};

		IS(ibv_modify_qp(qps[i], &attr,
		                 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
		   0);
		attr.qp_state = IBV_QPS_RTR;
		IS(ibv_modify_qp(qps[i], &attr,
		                 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		                         IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
		   0);
		attr.qp_state = IBV_QPS_RTS;
		IS(ibv_modify_qp(qps[i], &attr,
		                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
		   0);
	}
}

/* Has the router write bytes of one region to another. */
static void move(struct ibv_mr *from, const void *source, struct ibv_mr *to, void *target, uint32_t length)
{
	struct ibv_sge sge = {(uintptr_t)source, length, from->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge,
	                         .num_sge = 1,
	                         .opcode = IBV_WR_RDMA_WRITE,
	                         .send_flags = IBV_SEND_SIGNALED,
	                         .wr.rdma = {(uintptr_t)target, to->rkey}},
	                   *bad;
	struct ibv_wc wc;
	int got;

	IS(ibv_post_send(qps[0], &wr, &bad), 0);
	while ((got = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	IS(got, 1);
	IS(wc.status, IBV_WC_SUCCESS);
}

/* Whether an address is in a shared mapping; whether it is in one at all. */
static bool find_mapping(const void *at, bool *shared)
{
	FILE *maps = MUST(fopen("/proc/self/maps", "r"));
	unsigned long from, to;
	char line[512], permissions[5];
	bool found = false;

	while (!found && fgets(line, sizeof(line), maps)) {
		IS(sscanf(line, "%lx-%lx %4s", &from, &to, permissions), 3);
		found = (uintptr_t)at >= from && (uintptr_t)at < to;
	}
	fclose(maps);
	*shared = found && permissions[3] == 's';
	return found;
}

static bool is_shared(const void *at)
{
	bool shared;

	IS(find_mapping(at, &shared), true);
	return shared;
}

static void *anonymous(size_t length)
{
	return MUST(mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

static void fill(void *to, size_t length, uint8_t seed)
{
	for (size_t i = 0; i < length; i++)
		((uint8_t *)to)[i] = (uint8_t)(seed + i * 7 + i / 4096);
}

static bool has(const void *at, size_t length, uint8_t seed)
{
	for (size_t i = 0; i < length; i++)
		if (((const uint8_t *)at)[i] != (uint8_t)(seed + i * 7 + i / 4096))
			return false;
	return true;
}

/* Each thread counts in words of its own: a write that is lost is one that it finds missing. */
#define WORDS 32
static _Atomic bool stop;
static _Atomic uint64_t lost, written;

struct writer {
	uint64_t *words;
	size_t stride; /* in words */
	int pipe[2];   /* so that the kernel writes them, if there is one */
};

static void *write_words(void *arg)
{
	const struct writer *w = arg;
	uint64_t count[WORDS] = {0};

	while (!atomic_load_explicit(&stop, memory_order_relaxed))
		for (size_t i = 0; i < WORDS; i++) {
			volatile uint64_t *word = w->words + i * w->stride;

			if (*word != count[i])
				lost++;
			count[i] = *word + 1;
			if (w->pipe[0] < 0) {
				*word = count[i];
			} else {
				IS(write(w->pipe[1], &count[i], 8), 8);
				IS(read(w->pipe[0], (void *)word, 8), 8);
			}
			written++;
		}
	return NULL;
}

/* Threads write, and the kernel for them, while memory is registered and deregistered. */
static void writers(int rounds)
{
	size_t length = 17 * PAGE;
	uint64_t *buffer = anonymous(length);
	pthread_t threads[3];
	struct writer all[3];

	for (int i = 0; i < 3; i++) {
		all[i] = (struct writer){.words = buffer + i, .stride = 3 + PAGE / 16, .pipe = {-1, -1}};
		if (i == 2)
			IS(pipe(all[i].pipe), 0);
		IS(pthread_create(&threads[i], NULL, write_words, &all[i]), 0);
	}
	for (int i = 0; i < rounds; i++) {
		uint64_t before = written;
		struct ibv_mr *mr = MUST(ibv_reg_mr(pd, buffer, length, ALL));

		if (!i)
			IS(is_shared(buffer) && is_shared((uint8_t *)buffer + length - 1), true);
		while (written == before)
			sched_yield();
		IS(ibv_dereg_mr(mr), 0);
	}
	IS(is_shared(buffer), false);
	stop = true;
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	IS(lost, 0);
	printf("%d rounds, %llu writes\n", rounds, (unsigned long long)written);
}

/* What a child has is what its parent had when it forked, whatever each writes. */
static void forks(void)
{
	size_t length = 64 * PAGE;
	uint8_t *heap = MUST(malloc(length + 100)), *from = anonymous(length);
	struct ibv_mr *mr = MUST(ibv_reg_mr(pd, heap + 50, length, ALL));
	struct ibv_mr *source = MUST(ibv_reg_mr(pd, from, length, ALL));
	int status, ends[2];

	IS(is_shared(heap + length / 2), true);
	for (int round = 0; round < 20; round++) {
		fill(heap, length + 100, (uint8_t)round);
		IS(pipe(ends), 0);
		pid_t child = fork();
		if (!child) {
			char go;

			close(ends[1]);
			IS(read(ends[0], &go, 1), 0);
			IS(is_shared(heap + length / 2), false);
			IS(has(heap, length + 100, (uint8_t)round), true);
			memset(heap, 0xee, length + 100);
			/* A device of its own works, too. */
			struct ibv_context *own = open_device();
			struct ibv_pd *own_pd = MUST(ibv_alloc_pd(own));
			struct ibv_mr *own_mr = MUST(ibv_reg_mr(own_pd, heap + 50, length, ALL));
			IS(is_shared(heap + length / 2), true);
			IS(heap[length / 2], 0xee);
			IS(ibv_dereg_mr(own_mr), 0);
			IS(heap[length / 2], 0xee);
			exit(0);
		}
		/* At once after it has forked. */
		fill(from, length, (uint8_t)(round + 100));
		move(source, from, mr, heap + 50, (uint32_t)length);
		close(ends[1]);
		IS(waitpid(child, &status, 0), child);
		IS(status, 0);
		IS(has(heap + 50, length, (uint8_t)(round + 100)), true);
		close(ends[0]);
	}
	/* Commands, by vfork() and exec. */
	IS(system("true"), 0);
	IS(ibv_dereg_mr(mr), 0);
	IS(ibv_dereg_mr(source), 0);
	IS(is_shared(heap + length / 2), false);
	IS(has(heap + 50, length, 119), true);
}

/* Regions that overlap, and that share pages with other objects. */
static void overlaps(void)
{
	size_t length = 16 * PAGE;
	uint8_t *buffer = anonymous(length), *other = anonymous(length);
	struct ibv_mr *inner = MUST(ibv_reg_mr(pd, buffer + 2 * PAGE + 100, 8 * PAGE, ALL));
	struct ibv_mr *again = MUST(ibv_reg_mr(pd, buffer + 2 * PAGE + 100, 8 * PAGE, ALL));
	struct ibv_mr *part = MUST(ibv_reg_mr(pd, buffer + 4 * PAGE, 3 * PAGE, ALL));
	struct ibv_mr *outer = MUST(ibv_reg_mr(pd, buffer, length, ALL));
	struct ibv_mr *source = MUST(ibv_reg_mr(pd, other, length, ALL));

	/* Whole pages inside of the first one. */
	IS(is_shared(buffer + 2 * PAGE), false);
	IS(is_shared(buffer + 3 * PAGE), true);
	IS(is_shared(buffer + 10 * PAGE - 1), true);
	IS(is_shared(buffer + 10 * PAGE), false);
	struct ibv_mr *regions[] = {inner, again, part, outer};
	for (int i = 0; i < 4; i++) {
		struct ibv_mr *mr = regions[i];

		fill(other, mr->length, (uint8_t)i);
		move(source, other, mr, mr->addr, (uint32_t)mr->length);
		IS(has(mr->addr, mr->length, (uint8_t)i), true);
		memset(other, 0, length);
		move(mr, mr->addr, source, other, (uint32_t)mr->length);
		IS(has(other, mr->length, (uint8_t)i), true);
	}
	IS(ibv_dereg_mr(inner), 0);
	IS(ibv_dereg_mr(again), 0);
	IS(ibv_dereg_mr(part), 0);
	/* All of it is still registered. */
	IS(is_shared(buffer + 5 * PAGE), true);
	move(source, other, outer, buffer, (uint32_t)length);
	IS(has(buffer, length, 3), true);
	IS(ibv_dereg_mr(outer), 0);
	IS(is_shared(buffer + 5 * PAGE), false);
	IS(has(buffer, length, 3), true);
	/* Of two devices. */
	struct ibv_context *second = open_device();
	struct ibv_pd *second_pd = MUST(ibv_alloc_pd(second));
	outer = MUST(ibv_reg_mr(pd, buffer, length, ALL));
	inner = MUST(ibv_reg_mr(second_pd, buffer + PAGE, 4 * PAGE, ALL));
	IS(ibv_dereg_mr(outer), 0);
	IS(is_shared(buffer + PAGE), true);
	IS(has(buffer, length, 3), true);
	IS(ibv_dereg_mr(inner), 0);
	IS(is_shared(buffer + PAGE), false);
	IS(has(buffer, length, 3), true);
	IS(ibv_dealloc_pd(second_pd), 0);
	/* A device that is closed leaves memory as it is. */
	second_pd = MUST(ibv_alloc_pd(second));
	MUST(ibv_reg_mr(second_pd, buffer, length, ALL));
	IS(is_shared(buffer), true);
	IS(ibv_close_device(second), 0);
	IS(is_shared(buffer), false);
	IS(has(buffer, length, 3), true);
}

/* A region that works, wherever its bytes are; `shared` says whether its pages are exchanged. */
static void works(int line, uint8_t *at, size_t length, bool shared)
{
	uint8_t *other = anonymous(length);
	struct ibv_mr *mr = MUST(ibv_reg_mr(pd, at, length, ALL));
	struct ibv_mr *source = MUST(ibv_reg_mr(pd, other, length, ALL));

	is(line, "is_shared", is_shared(at + length / 2), shared);
	fill(other, length, 9);
	move(source, other, mr, at, (uint32_t)length);
	is(line, "has", has(at, length, 9), true);
	is(line, "dereg", ibv_dereg_mr(mr), 0);
	is(line, "has", has(at, length, 9), true);
	IS(ibv_dereg_mr(source), 0);
	munmap(other, length);
}

static void places(void)
{
	size_t length = 16 * PAGE;
	uint8_t on_stack[16 * PAGE];
	FILE *file = MUST(tmpfile());

	works(__LINE__, on_stack, length, false);
	IS(ftruncate(fileno(file), (off_t)length), 0);
	uint8_t *mapped = MUST(mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0));
	struct ibv_mr *mr = MUST(ibv_reg_mr(pd, mapped, length, ALL));
	mapped[5] = 77;
	uint8_t byte;
	IS(pread(fileno(file), &byte, 1, 5), 1);
	IS(byte, 77);
	IS(ibv_dereg_mr(mr), 0);
	mapped = MUST(mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0));
	works(__LINE__, mapped, length, false);
	mapped = MUST(mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
	mr = MUST(ibv_reg_mr(pd, mapped, length, ALL));
	pid_t child = fork();
	if (!child)
		_exit((mapped[7] = 78) != 78);
	IS(waitpid(child, NULL, 0), child);
	IS(mapped[7], 78);
	IS(ibv_dereg_mr(mr), 0);
	/* Pages that may only be read, among others. */
	uint8_t *buffer = anonymous(length);
	IS(mprotect(buffer + 8 * PAGE, PAGE, PROT_READ), 0);
	mr = MUST(ibv_reg_mr(pd, buffer, length, IBV_ACCESS_REMOTE_READ));
	IS(is_shared(buffer), false);
	IS(ibv_dereg_mr(mr), 0);
	IS(mlock(buffer, PAGE), 0);
	mr = MUST(ibv_reg_mr(pd, buffer, 8 * PAGE, ALL));
	IS(is_shared(buffer), false);
	IS(ibv_dereg_mr(mr), 0);
	IS(munlock(buffer, PAGE), 0);
	works(__LINE__, buffer, 8 * PAGE, true);
	/* Huge pages; transparent ones are as others. */
	mapped = mmap(NULL, 2UL << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1,
	              0);
	if (mapped != MAP_FAILED) {
		mapped[0] = 1;
		works(__LINE__, mapped, 2UL << 20, false);
	} else {
		IS(getenv("HUGE_PAGES") != NULL, false);
	}
	mapped = MUST(aligned_alloc(2UL << 20, 4UL << 20));
	madvise(mapped, 4UL << 20, MADV_HUGEPAGE);
	memset(mapped, 1, 4UL << 20);
	works(__LINE__, mapped, 4UL << 20, true);
	/* 4 GiB, of which little is used; and what fits, without its holes. */
	mapped = MUST(mmap(NULL, 4UL << 30, PROT_READ | PROT_WRITE,
	                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
	works(__LINE__, mapped + (3UL << 30), length, true);
	mr = MUST(ibv_reg_mr(pd, mapped, 4UL << 30, ALL));
	IS(is_shared(mapped + (2UL << 30)), false);
	mapped[3UL << 30] = 5;
	move(mr, mapped + (3UL << 30), mr, mapped + (1UL << 30), 10);
	IS(mapped[1UL << 30], 5);
	IS(ibv_dereg_mr(mr), 0);
	mr = MUST(ibv_reg_mr(pd, mapped, 256UL << 20, ALL));
	IS(is_shared(mapped + (1UL << 20)), true);
	IS(ibv_dereg_mr(mr), 0);
}

/* Memory whose mapping the program changes while it is registered. */
static void changes(void)
{
	size_t length = 32 * PAGE;
	uint8_t *buffer = anonymous(length);
	struct ibv_mr *mr = MUST(ibv_reg_mr(pd, buffer, length, ALL));
	bool shared;

	fill(buffer, length, 4);
	/* Unmapped, and mapped anew: that is not ours to change. */
	IS(munmap(buffer + 8 * PAGE, 8 * PAGE), 0);
	uint8_t *anew = MUST(mmap(buffer + 8 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE,
	                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	memset(anew, 0x55, 4 * PAGE);
	IS(mprotect(buffer + 20 * PAGE, PAGE, PROT_READ), 0);
	pid_t child = fork();
	if (!child) {
		IS(anew[100], 0x55);
		IS(has(buffer, 8 * PAGE, 4), true);
		_exit(0);
	}
	int status;
	IS(waitpid(child, &status, 0), child);
	IS(status, 0);
	IS(ibv_dereg_mr(mr), 0);
	IS(anew[100], 0x55);
	IS(find_mapping(buffer + 12 * PAGE, &shared), false);
	IS(has(buffer, 8 * PAGE, 4), true);
	IS(buffer[20 * PAGE], (uint8_t)(4 + 20 * PAGE * 7 + 20));
	for (size_t at = 0; at < length; at += PAGE)
		IS(find_mapping(buffer + at, &shared) && shared, false);
	/* As the C library gives memory back, and relies on its being zero. */
	IS(madvise(buffer, 8 * PAGE, MADV_DONTNEED), 0);
	IS(buffer[100], 0);
}

/* The router ends: memory stays, and can be had by the next device. */
static void gone(void)
{
	size_t length = 32 * PAGE;
	uint8_t *buffer = anonymous(length);
	struct ibv_mr *mr;

	fill(buffer, length, 6);
	mr = MUST(ibv_reg_mr(pd, buffer, length, ALL));
	IS(is_shared(buffer), true);
	puts("registered");
	fflush(stdout);
	getchar();
	IS(has(buffer, length, 6), true);
	buffer[0]++;
	IS(ibv_dereg_mr(mr), 0);
	IS(is_shared(buffer), false);
	IS(buffer[0], 7);
	IS(has(buffer + PAGE, PAGE, (uint8_t)(6 + PAGE * 7 + 1)), true);
}

int main(int argc, char **argv)
{
	const char *part = argc > 1 ? argv[1] : "";

	open_all();
	if (!strcmp(part, "writers"))
		writers(argc > 2 ? atoi(argv[2]) : 10000);
	else if (!strcmp(part, "forks"))
		forks();
	else if (!strcmp(part, "overlaps"))
		overlaps();
	else if (!strcmp(part, "places"))
		places();
	else if (!strcmp(part, "changes"))
		changes();
	else if (!strcmp(part, "gone"))
		gone();
	else if (!strcmp(part, "off"))
		works(__LINE__, anonymous(16 * PAGE), 16 * PAGE, false);
	else
		IS(1, 0);
	return 0;
}

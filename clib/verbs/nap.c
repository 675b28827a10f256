/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What polls do that find nothing where there are few processors: a thread that spins would keep
 * the router, and the program at the other end, from one of them. It yields first. When nothing has
 * come for some time it waits until the router completes something, or for a moment: a program may
 * look at other things beside this. */

#include <sched.h>
#include <time.h>

#include "verbs/internal.h"

/* A thread that polls has a processor of its own where there are so many. */
#define PROCESSORS_ENOUGH 4
/* For how long polls go on before they wait, in ns: most round trips are shorter. */
#define PATIENCE          100000
/* When what came last came as late as this, the next one is waited for at once: a round trip whose
 * ends both wait is shorter. */
#define LATE              200000
/* For how long a wait goes on. */
#define NAP               100000

static int64_t now_ns(void)
{
	struct timespec now = {0};

	syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Atomic uint32_t *nap_word(struct context *c)
{
	return (_Atomic uint32_t *)((uint8_t *)c->shared + VERBS_CONTEXT_NAP);
}

void nap_begin(struct context *c)
{
	unsigned long mask[128] = {0};
	long length = syscall(SYS_sched_getaffinity, 0, sizeof(mask), mask);
	int processors = 0;

	for (long i = 0; i < length / (long)sizeof(mask[0]); i++)
		processors += __builtin_popcountl(mask[i]);
	c->naps = !c->hello.spin_us && processors > 0 && processors < PROCESSORS_ENOUGH;
	atomic_store(&c->patience, PATIENCE);
}

bool nap_yield(struct context *c)
{
	if (c->naps) {
		int64_t now = now_ns(), since = 0;

		if (!atomic_compare_exchange_strong(&c->quiet_since, &since, now) &&
		    now - since >= atomic_load_explicit(&c->patience, memory_order_relaxed))
			return true;
	}
	syscall(SYS_sched_yield);
	return false;
}

void nap_found_slowly(struct context *c, int64_t since)
{
	if (atomic_compare_exchange_strong(&c->quiet_since, &since, 0))
		atomic_store_explicit(&c->patience, now_ns() - since > LATE ? 0 : PATIENCE,
		                      memory_order_relaxed);
}

void nap_wait(struct cq *cq)
{
	struct context *c = context_of(cq->base.context);
	struct timespec nap = {.tv_nsec = NAP};
	struct verbs_completion completion;
	bool came;

	atomic_store(nap_word(c), 1);
	/* The router shows a completion and looks at the word then: one of the two sees the other's. */
	atomic_thread_fence(memory_order_seq_cst);
	lock_take(&cq->lock);
	came = ring_peek(&cq->ring, &completion, 1) > 0 || cq->ring.end.broken;
	lock_release(&cq->lock);
	if (!came)
		syscall(SYS_futex, nap_word(c), FUTEX_WAIT, 1, &nap);
}

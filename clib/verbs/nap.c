/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What waits of a program do before it sleeps. For as long as its container's setting says they
 * look on, and keep their processor. Then they sleep: who waits for an event at once, who polls
 * where there are few processors, since a thread that spins would keep the router, and the program
 * at the other end, from one of them. It yields first. When nothing has come for some time it waits
 * until the router completes something, or for a moment: a program may look at other things beside
 * this. */

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
/* So many waits at most go by without a spin after one that was in vain. */
#define SKIPS_MOST        63

int64_t now_ns(void)
{
	struct timespec now = {0};

	syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t spin_begin(struct context *c, struct spin *s)
{
	uint32_t skips = atomic_load_explicit(&s->skips, memory_order_relaxed);

	if (c->hello.spin_us && skips)
		atomic_store_explicit(&s->skips, skips - 1, memory_order_relaxed);
	return skips ? 0 : (int64_t)c->hello.spin_us * 1000;
}

void spin_end(struct spin *s, bool came)
{
	uint32_t misses = 0;

	if (!came)
		misses = 2 * atomic_load_explicit(&s->misses, memory_order_relaxed) + 1;
	if (misses > SKIPS_MOST)
		misses = SKIPS_MOST;
	atomic_store_explicit(&s->misses, misses, memory_order_relaxed);
	atomic_store_explicit(&s->skips, misses, memory_order_relaxed);
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
	c->naps = processors > 0 && processors < PROCESSORS_ENOUGH;
	atomic_store(&c->patience, PATIENCE);
}

bool nap_yield(struct context *c)
{
	if (c->naps || c->hello.spin_us) {
		int64_t now = now_ns(), since = 0, quiet = 0, spins;

		if (atomic_compare_exchange_strong(&c->quiet_since, &since, now))
			atomic_store_explicit(&c->spins, spin_begin(c, &c->spin), memory_order_relaxed);
		else
			quiet = now - since;
		spins = atomic_load_explicit(&c->spins, memory_order_relaxed);
		if (quiet < spins)
			return false;
		if (spins && atomic_compare_exchange_strong(&c->spins, &spins, 0))
			spin_end(&c->spin, false);
		if (c->naps && since && quiet >= atomic_load_explicit(&c->patience, memory_order_relaxed))
			return true;
	}
	syscall(SYS_sched_yield);
	return false;
}

void nap_found_slowly(struct context *c, int64_t since)
{
	if (!atomic_compare_exchange_strong(&c->quiet_since, &since, 0))
		return;
	if (atomic_exchange(&c->spins, 0))
		spin_end(&c->spin, true);
	if (c->naps)
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

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A lock that sleeps when it is held: for locks that are held for nanoseconds and mostly free. All
 * zero is a free one. */
#ifndef HEDDLE_VERBS_LOCK_H
#define HEDDLE_VERBS_LOCK_H

#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct lock {
	_Atomic uint32_t state; /* 0: free; 1: held; 2: held, and somebody may sleep */
};

static inline void futex_wait(void *word, uint32_t value)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL);
}

static inline void futex_wake_all(void *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff);
}

static inline void lock_take(struct lock *l)
{
	uint32_t free = 0;

	if (atomic_compare_exchange_strong_explicit(&l->state, &free, 1, memory_order_acquire,
	                                            memory_order_relaxed))
		return;
	while (atomic_exchange_explicit(&l->state, 2, memory_order_acquire) != 0)
		futex_wait(&l->state, 2);
}

static inline void lock_release(struct lock *l)
{
	if (atomic_exchange_explicit(&l->state, 0, memory_order_release) == 2)
		syscall(SYS_futex, &l->state, FUTEX_WAKE_PRIVATE, 1);
}

static inline void signal_mask(int how, const uint64_t *mask, uint64_t *before)
{
	syscall(SYS_rt_sigprocmask, how, mask, before, sizeof(*mask));
}

/* The same for a lock that fork() takes, too: a handler of a signal may fork. Returns the mask of
 * signals, for the release. */
static inline uint64_t lock_take_masked(struct lock *l)
{
	const uint64_t all = ~0ULL;
	uint64_t mask = 0;

	signal_mask(SIG_SETMASK, &all, &mask);
	lock_take(l);
	return mask;
}

static inline void lock_release_masked(struct lock *l, uint64_t mask)
{
	lock_release(l);
	signal_mask(SIG_SETMASK, &mask, NULL);
}

/* Of glibc. */
__attribute__((weak)) int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
                                            void *library);

#endif

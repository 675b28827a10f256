/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What is known of each descriptor. A connection that this process opened or accepted is counted
 * until it has moved enough to be worth a question; then it has lanes, or nothing to do with the
 * library. */

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include "guest/region.h"

#define NUMBERS     65536 /* descriptors beyond have no lanes */
#define CONNECTIONS 4096  /* of a process that have lanes */

/* A connection is asked for after so many bytes, or calls: twice as many each time that the answer
 * was to ask again. */
#define ASK_BYTES 32768UL
#define ASK_CALLS 16UL
#define ASKED_MAX 20

/* FORKED is ASKING of a connection that another process has got meanwhile, by a fork. */
enum kind { OTHER, OPENED, ASKING, FORKED, ATTACHED };

static struct entry {
	_Atomic uint32_t kind;
	_Atomic uint32_t busy; /* calls that are counted */
	_Atomic uint32_t calls;
	_Atomic uint32_t asked; /* how often, in vain */
	int role;
	_Atomic uint64_t sent, received;
	struct connection *_Atomic connection;
} table[NUMBERS];
static _Atomic int highest;
static struct connection connections[CONNECTIONS];
static _Atomic int forks; /* that have begun, and are not done */

static void stay_all(bool alone);
static void leave_all(void);

/* The process, in a page that a fork wipes: a child that shares its parent's memory (vfork) must
 * not change its table, and one that has a copy has no part in counting. */
static _Atomic int *_Atomic process;

static bool own_table(void)
{
	_Atomic int *page = atomic_load(&process), *none = NULL;
	int pid = (int)call(SYS_getpid);
	long made;

	if (!page) {
		made = call(SYS_mmap, NULL, 4096UL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		            0L);
		if (failed(made))
			return false;
		page = (_Atomic int *)made;
		if (failed(call(SYS_madvise, page, 4096UL, 18 /* MADV_WIPEONFORK */)))
			return false; /* it has no lanes: nothing is counted */
		atomic_store(page, pid);
		if (!atomic_compare_exchange_strong(&process, &none, page)) {
			call(SYS_munmap, page, 4096UL);
			page = none;
		}
	}
	if (atomic_load(page) == 0) {
		/* The threads that asked are the parent's, and so are its region and locks. */
		atomic_store(page, pid);
		forget_thread();
		queue_forked();
		atomic_store(&forks, 0);
		stay_all(true);
		leave_all();
	}
	return atomic_load(page) == pid;
}

bool borrowed(void)
{
	_Atomic int *page = atomic_load(&process);
	int owner = page ? atomic_load(page) : 0;

	return owner && owner != (int)call(SYS_getpid);
}

static struct entry *entry_of(int fd)
{
	return fd >= 0 && fd < NUMBERS ? &table[fd] : NULL;
}

static uint32_t kind_of(struct entry *e)
{
	return e ? atomic_load_explicit(&e->kind, memory_order_acquire) : OTHER;
}

/* Waits for a thread that asks. In a child that nobody told of its fork there is none. */
static void wait_for_answer(struct entry *e)
{
	for (;;) {
		uint32_t kind = kind_of(e);

		if (kind != ASKING && kind != FORKED)
			return;
		own_table();
		call(SYS_sched_yield);
	}
}

struct connection *use(int fd)
{
	struct entry *e = entry_of(fd);
	struct connection *c;

	wait_for_answer(e);
	if (kind_of(e) != ATTACHED)
		return NULL;
	c = atomic_load(&e->connection);
	atomic_fetch_add(&c->users, 1);
	if (kind_of(e) == ATTACHED && atomic_load(&e->connection) == c)
		return c;
	unuse(c);
	return NULL;
}

void unuse(struct connection *c)
{
	if (atomic_fetch_sub(&c->users, 1) == 1)
		release(c);
}

static struct connection *free_connection(void)
{
	static _Atomic uint32_t next;
	uint32_t none;

	for (int i = 0; i < CONNECTIONS; i++) {
		struct connection *c = &connections[atomic_fetch_add(&next, 1) % CONNECTIONS];

		none = 0;
		if (atomic_compare_exchange_strong(&c->taken, &none, 1)) {
			atomic_store(&c->users, 1);
			return c;
		}
	}
	return NULL;
}

/* Asks for lanes, or a stream of queues: a profile says one of them, or neither. The caller has
 * made the kind ASKING. Gives what it becomes: OPENED while nobody can say, as when no agent
 * runs. */
static uint32_t get_lanes(struct entry *e, int fd)
{
	struct connection *c = free_connection();
	long r = -EOPNOTSUPP;

	if (!c)
		return OTHER;
	if (!region_exists())
		r = ask_for_lanes(fd, e->role);
	if (!failed(r)) {
		int memory = (int)r;

		if (!attach(c, fd, e->role, memory, atomic_load(&e->sent), atomic_load(&e->received)))
			r = -EPROTO;
		call(SYS_close, memory);
	} else if (r != -EAGAIN) {
		r = queue_attach(c, fd);
	}
	if (failed(r)) {
		atomic_store(&c->taken, 0);
		if (r == -EAGAIN && atomic_load(&e->asked) < ASKED_MAX)
			atomic_fetch_add(&e->asked, 1);
		return r == -EAGAIN ? OPENED : OTHER;
	}
	atomic_store(&c->descriptors, 1);
	atomic_store(&e->connection, c);
	return ATTACHED;
}

static bool worth_it(struct entry *e)
{
	uint32_t asked = atomic_load_explicit(&e->asked, memory_order_relaxed);

	return atomic_load_explicit(&e->calls, memory_order_relaxed) >= ASK_CALLS << asked ||
	       atomic_load_explicit(&e->sent, memory_order_relaxed) +
	                       atomic_load_explicit(&e->received, memory_order_relaxed) >=
	               ASK_BYTES << asked;
}

/* Takes what an answer has made of a connection. Of one that a child has got meanwhile it is
 * dropped: the child has the socket alone. */
static void answered(struct entry *e, uint32_t kind)
{
	struct connection *c = kind == ATTACHED ? atomic_load(&e->connection) : NULL;
	uint32_t asking = ASKING, forked = FORKED;

	if (c)
		atomic_fetch_add(&c->users, 1); /* another thread may close it as soon as it is attached */
	if (atomic_compare_exchange_strong(&e->kind, &asking, kind)) {
		if (c)
			attached(c);
	} else {
		if (c)
			unuse(c);
		atomic_compare_exchange_strong(&e->kind, &forked, OTHER);
	}
	if (c)
		unuse(c);
}

/* Asks, unless another thread does, or is in a call. A handler of a signal that came meanwhile
 * would wait for this thread if it used the descriptor. */
static void change_over(struct entry *e, int fd)
{
	uint64_t all = ~0UL, before = 0;
	uint32_t kind = OPENED;

	call(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	if (atomic_compare_exchange_strong(&e->kind, &kind, ASKING)) {
		/* After ASKING: either this sees a fork that begins, or that one sees ASKING. */
		bool not_now = atomic_load(&forks) || atomic_load(&e->busy) != 1;

		answered(e, not_now ? OPENED : get_lanes(e, fd));
	}
	call(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
}

struct connection *begin_io(int fd)
{
	struct entry *e = entry_of(fd);
	uint32_t kind = kind_of(e);

	if (kind == OTHER)
		return NULL;
	if (kind != OPENED)
		return use(fd);
	if (!own_table() || kind_of(e) != OPENED)
		return NULL;
	atomic_fetch_add(&e->busy, 1);
	kind = OPENED;
	/* Not while another thread is in a call: nobody could say what that one gets. */
	if (worth_it(e) && atomic_load(&e->busy) == 1)
		change_over(e, fd);
	if (kind_of(e) == OPENED)
		return COUNTED;
	atomic_fetch_sub(&e->busy, 1);
	return use(fd);
}

void end_io(int fd, struct connection *c, long sent, long received)
{
	struct entry *e = entry_of(fd);

	if (c && c != COUNTED)
		unuse(c);
	if (c != COUNTED)
		return;
	if (sent > 0)
		atomic_fetch_add_explicit(&e->sent, (uint64_t)sent, memory_order_relaxed);
	if (received > 0)
		atomic_fetch_add_explicit(&e->received, (uint64_t)received, memory_order_relaxed);
	atomic_fetch_add_explicit(&e->calls, 1, memory_order_relaxed);
	atomic_fetch_sub(&e->busy, 1);
}

void opened(int fd, int role)
{
	struct entry *e = entry_of(fd);
	int most = atomic_load(&highest);

	if (!e || !own_table())
		return;
	closing(fd);
	if (atomic_load(&e->busy))
		return; /* of a call of the descriptor that had the number before */
	while (most < fd && !atomic_compare_exchange_weak(&highest, &most, fd))
		;
	atomic_store(&e->sent, 0);
	atomic_store(&e->received, 0);
	atomic_store(&e->calls, 0);
	atomic_store(&e->asked, 0);
	e->role = role;
	atomic_store_explicit(&e->kind, OPENED, memory_order_release);
}

void stay_with_tcp(int fd)
{
	struct entry *e = entry_of(fd);
	uint32_t kind = OPENED;

	if (kind_of(e) != OTHER && own_table())
		atomic_compare_exchange_strong(&e->kind, &kind, OTHER);
}

static void leave_all(void)
{
	int most = atomic_load(&highest);

	for (int fd = 0; fd <= most; fd++) {
		struct connection *c = kind_of(&table[fd]) == ATTACHED ? use(fd) : NULL;

		if (c && c->stream)
			queue_leave(c);
		if (c)
			unuse(c);
	}
}

/* The program closes numbers that it does not know, or puts files there: what is written to a bell
 * must not go into these. */
static void closing_region(unsigned first, unsigned last)
{
	if (!region_has(first, last) || !own_table())
		return;
	leave_all();
	region_give_up(first, last);
}

void closing(int fd)
{
	struct entry *e = entry_of(fd);
	struct connection *c;

	closing_region((unsigned)fd, (unsigned)fd);
	if (kind_of(e) == OTHER || !own_table())
		return;
	c = use(fd);
	if (!c) {
		atomic_store(&e->kind, OTHER);
		return;
	}
	lanes_settle(c, fd);
	if (atomic_exchange(&e->kind, OTHER) == ATTACHED) {
		/* Not only when the last call has come back: the peer is to hear of the end. */
		if (atomic_fetch_sub(&c->descriptors, 1) == 1 && c->stream)
			queue_leave(c);
		unuse(c);
	}
	unuse(c);
}

void closing_range(unsigned first, unsigned last)
{
	unsigned most = (unsigned)atomic_load(&highest);

	closing_region(first, last);
	for (unsigned fd = first; fd <= last && fd <= most; fd++)
		closing((int)fd);
}

long duplicated(int from, int to)
{
	struct entry *e = entry_of(to);
	struct connection *c = use(from);
	int most = atomic_load(&highest);

	stay_with_tcp(from);
	if (!c)
		return 0;
	/* What goes by a number that nothing is known of, or by a standard stream, which the C library
	 * may read and write itself, must be TCP's. */
	if (!e || to <= STDERR_FILENO || !own_table()) {
		unuse(c);
		return handing_over(from);
	}
	while (most < to && !atomic_compare_exchange_weak(&highest, &most, to))
		;
	atomic_fetch_add(&c->descriptors, 1);
	atomic_store(&e->connection, c); /* with the use of it */
	atomic_store_explicit(&e->kind, ATTACHED, memory_order_release);
	return 0;
}

/* Has connections that have no lanes yet stay TCP's. Alone: there is no other thread, which would
 * ask, or be in a call. */
static void stay_all(bool alone)
{
	int most = atomic_load(&highest);

	for (int fd = 0; fd <= most; fd++) {
		uint32_t opened = OPENED, asking = ASKING, forked = FORKED;

		atomic_compare_exchange_strong(&table[fd].kind, &opened, OTHER);
		atomic_compare_exchange_strong(&table[fd].kind, &asking, alone ? OTHER : FORKED);
		if (alone) {
			atomic_compare_exchange_strong(&table[fd].kind, &forked, OTHER);
			atomic_store(&table[fd].busy, 0);
		}
	}
}

void forking(void)
{
	atomic_fetch_add(&forks, 1);
	stay_all(false);
	leave_all();
}

void fork_done(void)
{
	stay_all(false); /* what came since */
	atomic_fetch_sub(&forks, 1);
}

void forked(void)
{
	atomic_store(&forks, 0);
	if (atomic_load(&process))
		own_table();
}

long handing_over(int fd)
{
	struct connection *c = use(fd);
	bool clean;

	stay_with_tcp(fd);
	if (!c)
		return 0;
	clean = lanes_hand_over(c, fd);
	unuse(c);
	return clean ? 0 : -EBUSY;
}

long executing(void)
{
	int most = atomic_load(&highest);
	long flags, r = 0;

	for (int fd = 0; fd <= most; fd++) {
		if (kind_of(&table[fd]) == OTHER)
			continue;
		flags = call(SYS_fcntl, fd, F_GETFD);
		if (!failed(flags) && !(flags & FD_CLOEXEC) && handing_over(fd) && fd <= 2)
			r = -EBUSY;
	}
	return r;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* libheddle-pool.so: preloaded into a dynamically linked program of a container, it takes the
 * program's TCP sockets from a batch of many, which the agent fills while they are taken from it,
 * instead of asking for each by a trapped socket(). docs/decisions/0038-sockets-by-the-batch.md
 * says why it is like this, internal/plane/tcp/intercept/batch.go is the agent's side.
 *
 * The file works under any C library: it makes its system calls itself and needs of the library
 * where errno is. Nothing in it waits for another thread, so it may be called in signal handlers
 * and between fork and exec. */

#include <asm/unistd.h>
#include <linux/time_types.h>

#include "trap/call.h"

typedef unsigned int u32;
typedef unsigned long u64; /* both architectures have 64 bits */

/* The kernel's numbers, the same on both architectures. */
#define AF_UNIX             1
#define AF_INET             2
#define AF_INET6            10
#define SOCK_STREAM         1
#define SOCK_TYPE_MASK      0xf
#define SOCK_NONBLOCK       04000
#define SOCK_CLOEXEC        02000000
#define O_RDWR              02
#define IPPROTO_TCP         6
#define SOL_SOCKET          1
#define SO_DOMAIN           39
#define SCM_RIGHTS          1
#define MSG_CTRUNC          0x8
#define MSG_DONTWAIT        0x40
#define MSG_CMSG_CLOEXEC    0x40000000
#define F_SETFD             2
#define F_SETFL             4
#define F_DUPFD_CLOEXEC     1030
#define FD_CLOEXEC          1
#define RLIMIT_NOFILE       7
#define CLOCK_COARSE        6 /* CLOCK_MONOTONIC_COARSE */
#define MADV_WIPEONFORK     18
#define CLONE_FILES         0x00000400
#define CLONE_NEWNET        0x40000000
#define EINTR               4
#define EAGAIN              11
#define EMFILE              24
#define MAX_ERRNO           4095
#define PROT_READ_WRITE     3
#define MAP_PRIVATE_UNNAMED 0x22

/* What the agent knows a request for a batch by. */
#define BATCH_MAGIC 0xb7c15e0d92f64a83UL

#define FIRST_BATCH 4
#define MAX_BATCH   512
/* A process has a pool after so many sockets within a second. */
#define BEGIN_AFTER 4
#define SECOND      1000UL
/* What is older is not given out: the container's endpoint may be another by now. */
#define MAX_AGE     (10 * SECOND)
/* For so long an empty batch may be one that the agent has still to add to; later it is given
 * up. */
#define FILLING     (SECOND / 4)
/* A batch that lasts shorter than the first is followed by a larger one, longer than the second by
 * a smaller one. */
#define SHORT_USE   (SECOND / 4)
#define LONG_USE    (2 * SECOND)
/* Programs that may have fewer files open have no pool. */
#define MIN_FILES   256
/* Batches are at the numbers below this, or below the limit of files if that is less. */
#define TOP_NUMBER  1024
#define SLOTS       2 /* for each family: the second one while the first is filled again */

#define PUBLIC            __attribute__((visibility("default")))
#define load(p)           __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define store(p, v)       __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define swap(p, v)        __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL)
#define is_error(r)       ((u64)(r) > -(u64)(MAX_ERRNO + 1))
#define call1(n, a)       trapped_call(n, (long)(a), 0, 0, 0, 0, 0)
#define call2(n, a, b)    trapped_call(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define call3(n, a, b, c) trapped_call(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)

/* A batch. full changes with every batch in the slot and is 0 when nothing is left to take, and
 * nothing more comes; what else is there is written while it is 0. number stays the same as long as
 * it leads to a batch, so that whoever has seen it meets a batch. */
struct slot {
	u32 full;
	int number; /* -1: none */
	u64 device, inode;
	u32 user, group;
	u64 born;
};

/* The state of a process. A fork wipes it. */
struct state {
	u32 filling; /* by a thread; others take what there is, or ask for a single socket */
	u32 begun;
	u32 generation;
	u32 count; /* of sockets since window */
	u64 window;
	u64 refused_until; /* the agent gave no batch */
	struct family {
		u32 size; /* of the next batch */
		u64 filled;
		struct slot slots[SLOTS];
	} families[2];
};

/* The page that has it, NULL before the first socket. */
static struct state *page;
/* There is no pool in this process, nor in its children. */
static u32 off;
/* The batches that a child has of its parent: it closes them. Written as batches come and not
 * wiped. */
static struct {
	int number; /* plus 1, so that 0 is none */
	u64 device, inode;
} known[2 * SLOTS];

extern int *__errno_location(void);

/* What a C library does with a system call's result. */
static int result_of(long r)
{
	if (!is_error(r))
		return (int)r;
	*__errno_location() = (int)-r;
	return -1;
}

static u64 now(void)
{
	struct __kernel_timespec t = {0, 0};

	call2(__NR_clock_gettime, CLOCK_COARSE, &t);
	return (u64)t.tv_sec * SECOND + (u64)t.tv_nsec / 1000000;
}

/* The part of struct stat that is the same on both architectures, with room for the rest. */
struct file {
	u64 device, inode;
	u64 rest[32];
};

static int look_at(int number, struct file *f)
{
	return !is_error(call2(__NR_fstat, number, f));
}

static int is_file(int number, u64 device, u64 inode)
{
	struct file f;

	return number >= 0 && look_at(number, &f) && f.device == device && f.inode == inode;
}

/* The page, with its wiping; NULL if there is none. */
static struct state *get_page(void)
{
	struct state *p = load(&page), *none = (void *)0;
	long r;

	if (p)
		return p;
	r = trapped_call(__NR_mmap, 0, sizeof(*p), PROT_READ_WRITE, MAP_PRIVATE_UNNAMED, -1, 0);
	if (is_error(r))
		return (void *)0;
	p = (struct state *)r;
	if (is_error(call3(__NR_madvise, p, sizeof(*p), MADV_WIPEONFORK))) {
		call2(__NR_munmap, p, sizeof(*p));
		store(&off, 1);
		return (void *)0;
	}
	if (!__atomic_compare_exchange_n(&page, &none, p, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
		call2(__NR_munmap, p, sizeof(*p));
		p = none; /* another thread's */
	}
	return p;
}

/* Begins in a new process: closes the batches that are its parent's. */
static void begin(struct state *s)
{
	int i;

	if (swap(&s->begun, 1))
		return;
	for (i = 0; i < 2 * SLOTS; i++) {
		int number = load(&known[i].number) - 1;

		if (number >= 0 && is_file(number, known[i].device, known[i].inode))
			call1(__NR_close, number);
		store(&known[i].number, 0);
	}
}

/* What there is instead of a socket's number. */
#define NONE     (-1) /* none, and none comes any more */
#define NO_FILES (-2) /* the process can have no more files */
#define NOT_MINE (-3) /* another user's, of a moment ago */
#define NOT_YET  (-4) /* none, but the agent may still add some */

/* Receives a socket from a batch. Gives its number, or one of the above. */
static int receive(int batch, int flags)
{
	struct {
		u64 length;
		int level, type, number, padding;
	} control = {0, 0, 0, -1, 0};
	char byte;
	struct {
		void *at;
		u64 length;
	} data = {&byte, 1};
	struct {
		void *name;
		u32 name_length, padding;
		void *data;
		u64 data_length;
		void *control;
		u64 control_length;
		u32 flags, padding2;
	} m = {(void *)0, 0, 0, &data, 1, &control, sizeof(control), 0, 0};
	long r = call3(__NR_recvmsg, batch, &m, MSG_DONTWAIT | flags);

	if (r == -EAGAIN)
		return NOT_YET;
	if (is_error(r) || r == 0)
		return NONE;
	if (m.control_length >= 20 && control.level == SOL_SOCKET && control.type == SCM_RIGHTS &&
	    control.number >= 0)
		return control.number;
	return m.flags & MSG_CTRUNC ? NO_FILES : NONE;
}

/* Whether more than so many milliseconds lie between two times. Another thread's may be ahead. */
static int passed(u64 from, u64 to, u64 longer)
{
	return (long)(to - from) > (long)longer;
}

/* Takes a socket for a caller from a slot, as receive. */
static int take_from(struct slot *c, u32 user, u32 group, u64 time, int flags)
{
	u32 full = load(&c->full), none = 0;
	int number = load(&c->number), got;
	u64 device = load(&c->device), inode = load(&c->inode), born = load(&c->born);
	int mine = load(&c->user) == user && load(&c->group) == group;

	if (!full || load(&c->full) != full)
		return NONE;
	if (!mine && !passed(born, time, SECOND))
		return NOT_MINE;
	if (mine && !passed(born, time, MAX_AGE)) {
		if (is_file(number, device, inode)) {
			got = receive(number, flags);
			if (got >= 0 || got == NO_FILES || (got == NOT_YET && !passed(born, time, FILLING)))
				return got;
		} else if (load(&c->full) == full) {
			store(&c->number, -1); /* the program has closed it */
		}
	}
	/* Unless there is another batch by now. */
	__atomic_compare_exchange_n(&c->full, &full, none, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	return NONE;
}

/* Moves a batch to the number of the slot, or to one below the limit. A program that closes the
 * batch that it does not know of after the look, and has a file of its own at that number before
 * the next call, loses that: no call replaces only what was looked at. To close the old number
 * instead would be no safer, and who has seen it could meet the program's file. */
static int place(struct slot *c, int batch)
{
	u64 limit[2] = {0, 0};
	int number = load(&c->number);
	long r;

	if (number >= 0 && is_file(number, c->device, c->inode)) {
		r = call3(__NR_dup3, batch, number, SOCK_CLOEXEC);
	} else {
		trapped_call(__NR_prlimit64, 0, RLIMIT_NOFILE, 0, (long)limit, 0, 0);
		if (limit[0] > TOP_NUMBER)
			limit[0] = TOP_NUMBER;
		r = limit[0] < MIN_FILES ? -EMFILE : call3(__NR_fcntl, batch, F_DUPFD_CLOEXEC, limit[0] - 16);
	}
	call1(__NR_close, batch);
	return is_error(r) ? -1 : (int)r;
}

/* How many sockets the next batch should have. */
static u32 next_size(struct family *f, u64 time)
{
	u64 filled = load(&f->filled);

	if (!f->size || passed(filled, time, MAX_AGE))
		f->size = FIRST_BATCH;
	else if (!passed(filled, time, SHORT_USE) && f->size < MAX_BATCH)
		f->size = f->size * 4 > MAX_BATCH ? MAX_BATCH : f->size * 4;
	else if (passed(filled, time, LONG_USE))
		f->size = f->size / 4 > FIRST_BATCH ? f->size / 4 : FIRST_BATCH;
	store(&f->filled, time);
	return f->size;
}

/* Asks for a batch and puts it into a slot. Gives -1, or the single socket that came instead, which
 * is close-on-exec and blocks. Called by the thread that has set filling. */
static long fill(struct state *s, struct family *f, struct slot *c, int i, int family, u32 user, u32 group,
                 u64 time)
{
	int domain = 0, number;
	u32 length = sizeof(domain), size = next_size(f, time);
	struct file file;
	long r;
	int tries = 0;

	/* The same call again gives what a signal kept us from hearing of. */
	do
		r = trapped_call(__NR_socket, family, SOCK_STREAM | SOCK_CLOEXEC, 0, (long)BATCH_MAGIC, size,
		                 (long)~BATCH_MAGIC);
	while (r == -EINTR && ++tries < 16);

	if (is_error(r)) {
		store(&s->refused_until, time + SECOND);
		return -1;
	}
	if (is_error(trapped_call(__NR_getsockopt, r, SOL_SOCKET, SO_DOMAIN, (long)&domain, (long)&length,
	                          0)) ||
	    domain != AF_UNIX) {
		store(&s->refused_until, time + SECOND);
		return r;
	}
	store(&c->full, 0);
	number = place(c, (int)r);
	if (number < 0 || !look_at(number, &file)) {
		store(&s->refused_until, time + 60 * SECOND);
		return -1;
	}
	store(&c->number, number);
	store(&c->device, file.device);
	store(&c->inode, file.inode);
	store(&c->user, user);
	store(&c->group, group);
	store(&c->born, time);
	store(&known[i].number, 0);
	store(&known[i].device, file.device);
	store(&known[i].inode, file.inode);
	store(&known[i].number, number + 1);
	s->generation++;
	store(&c->full, s->generation ? s->generation : ++s->generation);
	return -1;
}

/* Counts a socket and tells whether the process asks for enough of them to have a pool. */
static int many(struct state *s, u64 time)
{
	if (passed(load(&s->window), time, SECOND)) {
		store(&s->window, time);
		store(&s->count, 0);
	}
	return __atomic_add_fetch(&s->count, 1, __ATOMIC_RELAXED) >= BEGIN_AFTER;
}

/* Gives up the batches of a process that can have no more files: it may have their numbers. Tells
 * whether there were any. */
static int make_room(struct state *s, u64 time)
{
	int i, room = 0;

	store(&s->refused_until, time + SECOND);
	for (i = 0; i < 2 * SLOTS; i++) {
		struct slot *c = &s->families[i / SLOTS].slots[i % SLOTS];
		int number = swap(&c->number, -1);

		store(&c->full, 0);
		/* An empty batch has a number, too. */
		if (is_file(number, load(&c->device), load(&c->inode)) &&
		    !is_error(call1(__NR_close, number)))
			room = 1;
	}
	return room;
}

/* Gives a socket from the pool, with close-on-exec if flags say so; -1 if the caller has to ask for
 * one. */
static int take(struct state *s, int family, int flags)
{
	struct family *f = &s->families[family == AF_INET6];
	u32 user = (u32)call1(__NR_geteuid, 0), group = (u32)call1(__NR_getegid, 0);
	u64 time = now();
	int i, empty = -1, got = NONE, first = family == AF_INET6 ? SLOTS : 0;
	int older = load(&f->slots[1].full) - load(&f->slots[0].full) > 0x7fffffff;
	long single = -1;

	/* The older batch first, so that none gets old. */
	for (i = 0; i < SLOTS && (got == NONE || got == NOT_YET); i++) {
		got = take_from(&f->slots[i ^ older], user, group, time, flags);
		if (got == NONE)
			empty = i ^ older;
	}
	if (got == NO_FILES)
		make_room(s, time);
	if (got == NO_FILES || got == NOT_MINE || (got < 0 && empty < 0))
		return -1;
	/* A second batch is for processes that use one up in less than a moment. */
	if (got >= 0 && (empty < 0 || passed(load(&f->filled), time, SHORT_USE)))
		return got;
	if (got < 0 && !many(s, time))
		return got;
	if ((long)(time - load(&s->refused_until)) < 0 || swap(&s->filling, 1))
		return got;
	/* Another thread may have filled it since: that batch must not be replaced. */
	if (!load(&f->slots[empty].full))
		single = fill(s, f, &f->slots[empty], first + empty, family, user, group, time);
	if (got < 0 && single < 0)
		got = take_from(&f->slots[empty], user, group, time, flags);
	store(&s->filling, 0);
	if (single >= 0) {
		if (got >= 0) {
			call1(__NR_close, single);
		} else {
			got = (int)single;
			if (!(flags & MSG_CMSG_CLOEXEC))
				call3(__NR_fcntl, got, F_SETFD, 0);
		}
	}
	return got < 0 ? -1 : got;
}

/* Asks for a socket. A signal can end a call that is trapped, and never one that is not: so no
 * program expects EINTR. */
static long ask(int family, int type, int protocol)
{
	long r;

	do
		r = call3(__NR_socket, family, type, protocol);
	while (r == -EINTR);
	return r;
}

PUBLIC int socket(int family, int type, int protocol)
{
	struct state *s = (void *)0;
	int got;
	long r;

	if ((family == AF_INET || family == AF_INET6) && (type & SOCK_TYPE_MASK) == SOCK_STREAM &&
	    !(type & ~(SOCK_TYPE_MASK | SOCK_CLOEXEC | SOCK_NONBLOCK)) &&
	    (protocol == 0 || protocol == IPPROTO_TCP) && !load(&off) && (s = get_page())) {
		begin(s);
		got = take(s, family, type & SOCK_CLOEXEC ? MSG_CMSG_CLOEXEC : 0);
		if (got >= 0) {
			if (type & SOCK_NONBLOCK)
				call3(__NR_fcntl, got, F_SETFL, O_RDWR | SOCK_NONBLOCK);
			return got;
		}
	}
	r = ask(family, type, protocol);
	if (r == -EMFILE && s && make_room(s, now()))
		r = ask(family, type, protocol);
	return result_of(r);
}

/* What is in batches is of the network namespace that the process was in, and at numbers of its
 * table of files. */
PUBLIC int unshare(int flags)
{
	long r = call1(__NR_unshare, flags);

	if (!is_error(r) && flags & (CLONE_NEWNET | CLONE_FILES))
		store(&off, 1);
	return result_of(r);
}

PUBLIC int setns(int fd, int type)
{
	long r = call2(__NR_setns, fd, type);

	if (!is_error(r) && (!type || type & CLONE_NEWNET))
		store(&off, 1);
	return result_of(r);
}

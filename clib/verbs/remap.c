/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which pages of registered buffers are memory that the router has mapped: docs/decisions/0070.
 * Whole pages inside a buffer become such memory (a part), once for all registrations that lie in
 * them, and the program's own again after the last one. A child of fork() finds its own copy. */

#define _GNU_SOURCE /* MREMAP_FIXED */
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>

#include "verbs/internal.h"
#include "verbs/remap.h"

#define PAGE         4096UL
/* Smaller ones do not repay what the exchange costs. */
#define PART_LEAST   (2 * PAGE)
#define RUNS         16
/* For how long fork() waits until the child has its copy, should neither happen. */
#define FORK_SECONDS 10
#define NOREPLACE    0x100000 /* MAP_FIXED_NOREPLACE */

/* Pages of the program that are memory of the router's making. */
struct part {
	struct part *next;
	struct context *context; /* that has the memory, NULL when it is closed */
	uint32_t handle;
	uint32_t users; /* registrations */
	uintptr_t at, end;
	/* The same memory once more, which children of fork() have, too: the pages themselves are
	 * kept from them, so that none of them writes to its parent's. */
	uint8_t *alias;
	struct wanted wanted; /* how /proc/self/maps tells its pages */
	bool stuck;           /* it could not be undone: pages stay so */
};

static struct {
	struct lock lock; /* taken with all signals blocked: a handler may fork, or wait for a page */
	struct part *parts;
	struct registration *registrations;
	int userfaultfd; /* -1: not to be had */
	long process;    /* whose memory it is of, 0 before it was asked for */
	bool is_watched; /* fork() is */
	/* From fork()'s first handler to its last. */
	bool forks;
	uint64_t fork_mask;
	int fork_pipe[2];
} state;

char *getenv(const char *name);

static uint64_t state_lock(void)
{
	return lock_take_masked(&state.lock);
}

static void state_unlock(uint64_t mask)
{
	lock_release_masked(&state.lock, mask);
}

static void fork_prepare(void)
{
	uint64_t mask = state_lock();

	state.forks = true;
	state.fork_mask = mask;
	state.fork_pipe[0] = state.fork_pipe[1] = -1;
	if (state.parts)
		syscall(SYS_pipe2, state.fork_pipe, O_CLOEXEC);
}

/* Waits until the child has its copy: what this program writes from now on is not for it. */
static void fork_parent(void)
{
	struct pollfd wait = {.fd = state.fork_pipe[0], .events = POLLIN};
	struct timespec limit = {.tv_sec = FORK_SECONDS};

	if (!state.forks)
		return;
	state.forks = false;
	close_fd(state.fork_pipe[1]);
	/* Signals are blocked, so that nothing interrupts it. */
	if (wait.fd >= 0)
		syscall(SYS_ppoll, &wait, 1L, &limit, NULL, 0L);
	close_fd(wait.fd);
	state_unlock(state.fork_mask);
}

/* Gives a child pages of its own where it has none: others were the program's to unmap. */
static void fill(uintptr_t at, const uint8_t *from, size_t length)
{
	long got = syscall(SYS_mmap, at, length, PROT_READ | PROT_WRITE,
	                   MAP_PRIVATE | MAP_ANONYMOUS | NOREPLACE, -1, 0L);

	if (got == (long)at) {
		pages_copy((uint8_t *)at, from, length);
		return;
	}
	if (got != -1)
		syscall(SYS_munmap, got, length);
	if (length > PAGE) {
		size_t half = length / PAGE / 2 * PAGE;

		fill(at, from, half);
		fill(at + half, from + half, length - half);
	}
}

static void fork_child(void)
{
	if (!state.forks)
		return;
	state.forks = false;
	for (struct part *p = state.parts; p; p = p->next) {
		fill(p->at, p->alias, p->end - p->at);
		syscall(SYS_munmap, p->alias, p->end - p->at);
	}
	/* They are its parent's. */
	state.parts = NULL;
	state.registrations = NULL;
	state.process = 0;
	close_fd(state.userfaultfd);
	state.userfaultfd = -1;
	close_fd(state.fork_pipe[0]);
	close_fd(state.fork_pipe[1]);
	state_unlock(state.fork_mask);
}

/* Whether pages can be exchanged at all. */
static bool is_able(struct context *c)
{
	struct verbs_plain_request request;
	struct verbs_reply reply;
	const char *wish = getenv("HEDDLE_VERBS_REMAP");
	int device = -1;

	/* Of a child that did not come by the C library's fork() it is the parent's memory. */
	if (state.process)
		return state.userfaultfd >= 0 && state.process == c->process;
	state.process = c->process;
	state.userfaultfd = -1;
	if ((wish && wish[0] == '0') || !__register_atfork)
		return false;
	if (!state.is_watched && __register_atfork(fork_prepare, fork_parent, fork_child, NULL))
		return false;
	state.is_watched = true;
	if (control_request(c, VERBS_OPEN_USERFAULTFD, &request, sizeof(request), &reply, sizeof(reply),
	                    &device, 1))
		return false;
	state.userfaultfd = pages_userfaultfd(device);
	close_fd(device);
	return state.userfaultfd >= 0;
}

static bool is_registered(uintptr_t at, uintptr_t end)
{
	for (struct registration *r = state.registrations; r; r = r->next)
		if (r->at < end && at < r->end)
			return true;
	return false;
}

/* Whether all of a range is as it is wanted. */
static bool is_all(uintptr_t at, uintptr_t end, const struct wanted *wanted)
{
	struct run run[2];

	return pages_find(at, end, wanted, run, 2) == 1 && run[0].at == at && run[0].end == end;
}

/* Asks the router for memory, and maps it twice: for children, and as a window without them. */
static int make_memory(struct part *p, uint8_t **window)
{
	struct verbs_create_memory_request request = {.length = p->end - p->at};
	struct verbs_create_memory_reply reply;
	size_t length = request.length;
	struct stat status;
	int fd = -1;

	if (control_request(p->context, VERBS_CREATE_MEMORY, &request, sizeof(request), &reply, sizeof(reply),
	                    &fd, 1))
		return -1;
	p->handle = reply.memory;
	p->alias = reply.length == length ? ring_map(fd, length) : NULL;
	*window = p->alias ? (uint8_t *)syscall(SYS_mmap, NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED,
	                                        fd, 0L)
	                   : MAP_FAILED;
	if (*window != MAP_FAILED && syscall(SYS_madvise, *window, length, MADV_DONTFORK) == 0 &&
	    syscall(SYS_fstat, fd, &status) == 0) {
		/* As the kernel puts a device's two numbers into one. */
		uint64_t major = status.st_dev >> 8 & 0xfff;
		uint64_t minor = (status.st_dev & 0xff) | (status.st_dev >> 12 & 0xfff00);

		p->wanted =
		        (struct wanted){.device = major << 20 | minor, .inode = status.st_ino, .base = p->at};
		return fd;
	}
	if (*window != MAP_FAILED)
		syscall(SYS_munmap, *window, length);
	*window = MAP_FAILED;
	close_fd(fd);
	return -1;
}

static void forget_memory(struct part *p)
{
	if (p->context && p->handle)
		control_destroy(p->context, VERBS_DESTROY_MEMORY, p->handle);
	p->handle = 0;
	p->context = NULL;
}

/* Makes pages the program's own again. What is not the part's any more is left alone. */
static void give_back(const struct part *p)
{
	size_t length = p->end - p->at;
	struct run runs[RUNS];
	int count = pages_find(p->at, p->end, &p->wanted, runs, RUNS);
	long got =
	        syscall(SYS_mmap, NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
	uint8_t *own = (uint8_t *)got;
	uintptr_t after = p->at;

	if (got == -1)
		return;
	for (int i = 0; i < count; i++) {
		const struct run *run = &runs[i];
		size_t skip = run->at - p->at, size = run->end - run->at;

		if (run->at > after)
			syscall(SYS_munmap, own + (after - p->at), run->at - after);
		size_t done = pages_exchange(state.userfaultfd, run->at, (uintptr_t)p->alias + skip, size,
		                             own + skip, -1);
		if (run->protection != (PROT_READ | PROT_WRITE))
			syscall(SYS_mprotect, run->at, done, run->protection);
		after = run->at + done;
	}
	if (p->end > after)
		syscall(SYS_munmap, own + (after - p->at), p->end - after);
}

/* Undoes a part. False if pages of it stay as they are: then it has to be kept for children. */
static bool undo(struct part *p)
{
	struct run run;

	give_back(p);
	forget_memory(p);
	if (pages_find(p->at, p->end, &p->wanted, &run, 1) != 0)
		return false;
	syscall(SYS_munmap, p->alias, p->end - p->at);
	free(p);
	return true;
}

/* Undoes parts that nothing is registered in any more. */
static void settle(void)
{
	for (struct part **link = &state.parts, *p; (p = *link);) {
		struct part *next = p->next;

		if (p->users || p->stuck || is_registered(p->at, p->end)) {
			link = &p->next;
		} else if (undo(p)) {
			*link = next;
		} else {
			p->stuck = true;
			link = &p->next;
		}
	}
}

/* Makes whole pages, in which nothing is registered, a part. NULL if they stay as they are. */
static struct part *make_part(struct context *c, uintptr_t at, uintptr_t end)
{
	const struct wanted wanted = {.is_private = true};
	uint8_t *window = MAP_FAILED;
	struct part *p;
	size_t done;
	int fd;

	if (!is_able(c) || is_registered(at, end) || !is_all(at, end, &wanted) || pages_are_locked())
		return NULL;
	p = calloc(1, sizeof(*p));
	if (!p)
		return NULL;
	*p = (struct part){.next = state.parts, .context = c, .at = at, .end = end};
	fd = make_memory(p, &window);
	if (fd < 0) {
		if (p->alias)
			syscall(SYS_munmap, p->alias, end - at);
		forget_memory(p);
		free(p);
		return NULL;
	}
	state.parts = p;
	done = pages_exchange(state.userfaultfd, at, at, end - at, window, fd);
	close_fd(fd);
	if (done == end - at)
		return p;
	/* The pages in front are exchanged, and become the program's again. */
	syscall(SYS_munmap, window + done, end - at - done);
	return NULL;
}

/* The part of this context that has most of some pages, if the program still has it there. */
static struct part *find_part(struct context *c, uintptr_t at, uintptr_t end)
{
	struct part *best = NULL;
	size_t most = 0;

	for (struct part *p = state.parts; p; p = p->next) {
		uintptr_t from = p->at > at ? p->at : at, to = p->end < end ? p->end : end;

		if (p->context == c && p->handle && !p->stuck && from < to && to - from > most &&
		    is_all(from, to, &p->wanted)) {
			best = p;
			most = to - from;
		}
	}
	return best;
}

void remap_begin(struct context *c, struct registration *r, void *address, size_t length, uint32_t *memory,
                 uint64_t *offset)
{
	uintptr_t begin = (uintptr_t)address;
	uintptr_t at = (begin + PAGE - 1) & ~(PAGE - 1), end = (begin + length) & ~(PAGE - 1);
	uint64_t mask = state_lock();
	struct part *part = NULL;

	*r = (struct registration){.context = c, .at = begin, .end = begin + length};
	if (r->end > begin && at < end && !is_gone(c) && c->process == syscall(SYS_getpid)) {
		part = find_part(c, at, end);
		if (!part && end - at >= PART_LEAST)
			part = make_part(c, at, end);
	}
	r->part = part;
	*memory = part ? part->handle : 0;
	*offset = part ? begin - part->at : 0;
	if (part)
		part->users++;
	r->next = state.registrations;
	state.registrations = r;
	settle();
	state_unlock(mask);
}

static void end_registration(struct registration *r)
{
	for (struct registration **link = &state.registrations; *link; link = &(*link)->next) {
		if (*link != r)
			continue;
		*link = r->next;
		if (r->part)
			r->part->users--;
		return;
	}
}

void remap_end(struct registration *r)
{
	uint64_t mask = state_lock();

	end_registration(r);
	settle();
	state_unlock(mask);
}

void remap_close(struct context *c)
{
	uint64_t mask = state_lock();

	for (struct registration *r = state.registrations, *next; r; r = next) {
		next = r->next;
		if (r->context == c)
			end_registration(r);
	}
	settle();
	for (struct part *p = state.parts; p; p = p->next)
		if (p->context == c)
			forget_memory(p);
	state_unlock(mask);
}

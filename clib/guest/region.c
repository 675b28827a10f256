/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The region of this process: its memory, and its end of the job ring. */

#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "guest/region.h"
#include "ring/ring.h"

enum state { NONE, THERE, NEVER };

static struct region {
	_Atomic uint32_t state;
	struct direction lock; /* of what follows, and of the job ring */
	struct ring_producer jobs;
	struct ring_consumer completions;
	struct queues_header *header;
	uint8_t *base;
	size_t size;
	uint64_t streams_at, bytes_at, id;
	uint32_t streams, capacity;
	int life, bell, wait;
	struct stat life_is; /* the file that life was at first */
} region;

/* Receives MADE: the region's number, and its memory and bells. */
static bool receive_made(int life, struct queues_made *made, int fds[3])
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(3 * sizeof(int))];
	} control = {0};
	struct iovec list = {made, sizeof(*made)};
	struct msghdr m = {.msg_iov = &list,
	                   .msg_iovlen = 1,
	                   .msg_control = control.bytes,
	                   .msg_controllen = sizeof(control.bytes)};
	long r = call(SYS_recvmsg, life, &m, MSG_CMSG_CLOEXEC);
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	fds[0] = fds[1] = fds[2] = -1;
	if (failed(r) || !h || h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
		return false;
	memcpy(fds, CMSG_DATA(h), h->cmsg_len < CMSG_LEN(3 * sizeof(int)) ? 0 : 3 * sizeof(int));
	return r == sizeof(*made) && made->head.type == QUEUES_MADE && fds[2] >= 0;
}

/* Whether a part of the region lies in it. */
static bool within(uint64_t at, uint64_t count, uint64_t each, uint64_t size)
{
	return at % 64 == 0 && at <= size && count * each <= size - at;
}

static bool take(const struct queues_made *made, int memory)
{
	struct queues_header *h = ring_map(memory, made->size);
	struct queues_header copy;

	if (!h)
		return false;
	memcpy(&copy, h, 128);
	region.header = h;
	region.base = (uint8_t *)h;
	region.size = made->size;
	region.id = made->head.region;
	region.streams = copy.streams;
	region.capacity = copy.capacity;
	region.streams_at = copy.streams_at;
	region.bytes_at = copy.bytes_at;
	/* Without QUEUES_EDGES it is a service of before, and another one comes when that ends. */
	if (copy.magic == QUEUES_MAGIC && copy.version == QUEUES_VERSION && copy.flags & QUEUES_EDGES &&
	    copy.streams && copy.streams <= QUEUES_STREAMS_MAX && copy.capacity >= QUEUES_CAPACITY_MIN &&
	    copy.capacity <= QUEUES_CAPACITY_MAX && !(copy.capacity & (copy.capacity - 1)) &&
	    within(copy.streams_at, copy.streams, sizeof(struct queues_stream), made->size) &&
	    within(copy.bytes_at, copy.streams, 2 * (uint64_t)copy.capacity, made->size) &&
	    ring_producer_attach(&region.jobs, h, made->size, copy.jobs_at, copy.slots) &&
	    ring_consumer_attach(&region.completions, h, made->size, copy.completions_at, copy.slots))
		return true;
	ring_unmap(h, made->size);
	return false;
}

static void close_all(int *fds, int n)
{
	for (int i = 0; i < n; i++)
		if (fds[i] >= 0)
			call(SYS_close, fds[i]);
}

/* Asks for a region. Gives 0, or -errno: a profile may come. */
static long make(void)
{
	struct queues_made made;
	int fds[3];
	long life = ask_agent(QUEUES_ASK, QUEUES_ASK_REGION);
	bool told;

	if (failed(life))
		return life;
	told = receive_made((int)life, &made, fds);
	if (!told || !take(&made, fds[0])) {
		close_all(fds, 3);
		call(SYS_close, life);
		/* Else it was a socket: whoever let the call go on does not know the question. */
		if (told)
			atomic_store(&region.state, NEVER);
		return -EPROTO;
	}
	call(SYS_close, fds[0]);
	region.life = (int)life;
	if (failed(call(SYS_fstat, life, &region.life_is)))
		memset(&region.life_is, 0, sizeof(region.life_is));
	region.bell = fds[1];
	region.wait = fds[2];
	atomic_store(&region.state, THERE);
	return 0;
}

bool region_exists(void)
{
	return atomic_load(&region.state) == THERE;
}

long region_ready(void)
{
	long r;

	if (atomic_load(&region.state) == THERE)
		return atomic_load_explicit(&region.header->ended, memory_order_relaxed) ? -EOPNOTSUPP : 0;
	if (atomic_load(&region.state) == NEVER || !lock_direction(&region.lock))
		return -EOPNOTSUPP;
	r = atomic_load(&region.state) == THERE ? 0 : make();
	unlock_direction(&region.lock);
	return r;
}

long region_ask(int fd)
{
	return ask_agent(QUEUES_ASK, (long)(region.id << QUEUES_ASK_BITS) | fd);
}

bool region_stream(uint32_t number, struct queues_stream **words, uint8_t **ring)
{
	if (number >= region.streams)
		return false;
	*words = (struct queues_stream *)(region.base + region.streams_at) + number;
	*ring = region.base + region.bytes_at + 2 * (uint64_t)region.capacity * number;
	return true;
}

struct queues_header *region_header(void)
{
	return region.header;
}

uint32_t region_capacity(void)
{
	return region.capacity;
}

/* The service answers what is asked for loudly, which nothing here is; what it says nevertheless
 * must not fill the ring. */
static void drop_completions(void)
{
	struct queues_nqe nqes[16];
	uint32_t n;

	while ((n = ring_peek(&region.completions, nqes, 16)))
		ring_pop(&region.completions, n);
}

/* For so long a job waits for room in the ring of a service that lives. */
#define ROOM_MS 1000

bool region_push(const struct queues_nqe *nqe)
{
	uint64_t all = ~0UL, before = 0;
	bool pushed = false;

	if (atomic_load(&region.state) != THERE)
		return false;
	/* A handler of a signal would wait for this thread. */
	call(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	if (lock_direction(&region.lock)) {
		for (int ms = 0; !pushed && ms < ROOM_MS && region_exists(); ms++) {
			if (ring_room(&region.jobs, 1)) {
				memcpy(ring_free_slot(&region.jobs, 0), nqe, sizeof(*nqe));
				ring_push(&region.jobs, 1);
				pushed = true;
			} else {
				drop_completions();
				if (region.jobs.end.broken || !region_lives())
					break;
				call(SYS_ppoll, NULL, 0UL, &(struct timespec){0, 1000000}, NULL, 8UL);
			}
			ring_doorbell((void *)&region.header->job_bell, region.bell);
		}
		unlock_direction(&region.lock);
	}
	call(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
	return pushed;
}

bool region_lives(void)
{
	struct pollfd life = {region.life, 0, 0};

	return atomic_load(&region.state) == THERE &&
	       call(SYS_ppoll, &life, 1UL, &(struct timespec){0, 0}, NULL, 8UL) == 0;
}

/* Whether the number of life is of its file still: the program may have closed it by a system call
 * of its own, or another thread gives the region up. */
static bool is_life(void)
{
	struct stat now;

	return !failed(call(SYS_fstat, region.life, &now)) && now.st_dev == region.life_is.st_dev &&
	       now.st_ino == region.life_is.st_ino;
}

/* Not the opposite of region_lives(): of a region that was given up, or whose descriptor is not its
 * own any more, nobody knows, and a signal that comes meanwhile says nothing. The file is asked for
 * last: if it is the region's still, it was so when it was polled. */
bool region_died(void)
{
	struct pollfd life = {region.life, 0, 0};

	return atomic_load(&region.state) == THERE &&
	       call(SYS_ppoll, &life, 1UL, &(struct timespec){0, 0}, NULL, 8UL) == 1 &&
	       life.revents & POLLHUP && is_life() && atomic_load(&region.state) == THERE;
}

bool region_has(unsigned first, unsigned last)
{
	const int all[] = {region.life, region.bell, region.wait};

	for (int i = 0; i < 3; i++)
		if (region_exists() && (unsigned)all[i] >= first && (unsigned)all[i] <= last)
			return true;
	return false;
}

void region_give_up(unsigned first, unsigned last)
{
	const int all[] = {region.life, region.bell, region.wait};
	uint64_t every = ~0UL, before = 0;

	call(SYS_rt_sigprocmask, SIG_SETMASK, &every, &before, sizeof(every));
	if (lock_direction(&region.lock)) {
		bool had = atomic_exchange(&region.state, NEVER) == THERE;

		unlock_direction(&region.lock);
		for (int i = 0; had && i < 3; i++)
			if ((unsigned)all[i] < first || (unsigned)all[i] > last)
				call(SYS_close, all[i]);
	}
	call(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
}

/* The memory stays: connections that were the parent's are asked of by it. */
void region_forked(void)
{
	if (atomic_load(&region.state) == THERE)
		close_all((int[]){region.life, region.bell, region.wait}, 3);
	memset(&region, 0, sizeof(region));
}

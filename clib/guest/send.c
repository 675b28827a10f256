/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a program sends: into the ring while it has room, else by TCP, which then waits, refuses and
 * says when it can be written as TCP does. */

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <time.h>

#include "guest/queues.h"

/* For so long a send waits for room in the ring before it goes by TCP: what a reader that runs
 * takes for half of it, or a little of a program's time that does not want to wait. */
#define WAIT_NS     20000000L
#define NO_WAIT_NS  200000L
/* So many sends into a ring that nobody reads, and so many bytes, before the socket is asked
 * whether its peer is there. */
#define QUIET_SENDS 8
#define QUIET_BYTES LANES_CAPACITY

static void mark_end(struct lane *lane, struct direction *d)
{
	struct lane_end *end = &lane->ended[d->epoch & 3];

	atomic_store_explicit(&end->stream, d->stream, memory_order_relaxed);
	atomic_store_explicit(&end->ring, d->own, memory_order_relaxed);
	d->epoch++;
	atomic_store_explicit(&lane->epoch, d->epoch, memory_order_release);
}

/* For so long lanes are used that no agent looks after. */
#define BEAT_SECONDS 10

/* Whether the agent would have bytes go by the ring. */
static bool may_use(struct connection *c)
{
	struct direction *d = &c->sides->out;
	uint32_t beat = atomic_load_explicit(&c->lanes->beat, memory_order_relaxed);
	struct timespec now = {0, 0};

	if (d->final || atomic_load_explicit(&c->lanes->stop, memory_order_relaxed))
		return false;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	if (beat != d->beat || !d->beat_at) {
		d->beat = beat;
		d->beat_at = (uint64_t)now.tv_sec;
	}
	return (uint64_t)now.tv_sec - d->beat_at < BEAT_SECONDS;
}

/* Has bytes go by the ring, if they may. The first ones want a doorbell in any case, for which TCP
 * must have room. */
static bool enter_ring(struct connection *c, int fd)
{
	struct direction *d = &c->sides->out;
	int queued = 1;

	if (!may_use(c) || atomic_load_explicit(&c->out->attached, memory_order_acquire) != 1 ||
	    atomic_load_explicit(&c->out->followed, memory_order_acquire) != d->epoch ||
	    atomic_load(&d->native) || failed(call(SYS_ioctl, fd, SIOCOUTQ, &queued)) || queued)
		return false;
	atomic_store_explicit(&c->out->armed, 0, memory_order_relaxed);
	atomic_store_explicit(&c->out->stream, d->stream, memory_order_relaxed);
	mark_end(c->out, d);
	return true;
}

/* Has bytes go by TCP from here on. */
static void leave_ring(struct connection *c)
{
	if (c->sides->out.epoch & 1)
		mark_end(c->out, &c->sides->out);
}

/* Whether the socket takes bytes at all: what a send would say. */
static long alive(int fd, int flags)
{
	return call(SYS_sendto, fd, "", 0UL, flags & MSG_NOSIGNAL, NULL, 0UL);
}

static long ring_doorbell_of(struct connection *c, int fd, int flags)
{
	struct direction *d = &c->sides->out;
	struct pollfd writable = {fd, POLLOUT, 0};
	long r;

	d->stream++;
	atomic_store_explicit(&c->out->stream, d->stream, memory_order_release);
	for (int tries = 0; tries < 100; tries++) {
		r = call(SYS_sendto, fd, "", 1UL, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0UL);
		if (r != -EAGAIN)
			break;
		call(SYS_ppoll, &writable, 1UL, &(struct timespec){0, 1000000}, NULL, 8UL);
	}
	if (r == 1)
		return 0;
	if (r == -EPIPE)
		r = alive(fd, flags); /* with the signal, if the program wants it */
	return r < 0 ? r : -EPIPE;
}

/* Bytes that the ring has room for; -1 if the peer does not keep to the rules. */
static long room_in(struct connection *c)
{
	struct direction *d = &c->sides->out;
	uint64_t consumed = atomic_load_explicit(&c->out->consumed, memory_order_acquire);

	if (d->own - consumed > d->own - d->peer)
		return -1;
	if (consumed != d->peer)
		d->quiet = 0;
	d->peer = consumed;
	return (long)(LANES_CAPACITY - (d->own - consumed));
}

#define FULL   0
#define CLOSED (-4096)

/* Puts bytes into the ring. Gives how many, FULL, CLOSED, or -errno. */
static long put(struct connection *c, int fd, struct buffers *b, int flags, bool first)
{
	struct direction *d = &c->sides->out;
	uint64_t had = d->own;
	uint32_t asleep = 1;
	struct buffers copied = *b;
	size_t at = d->own & (LANES_CAPACITY - 1), n, end = LANES_CAPACITY - at;
	long room = room_in(c), r = 0;

	if (room <= 0)
		return room ? give_up(c, fd) : FULL;
	n = (size_t)room < b->left ? (size_t)room : b->left;
	copy_out(&copied, c->out_ring + at, n < end ? n : end);
	if (n > end)
		copy_out(&copied, c->out_ring, n - end);
	if (!atomic_compare_exchange_strong_explicit(&c->out->produced, &had, had + n, memory_order_release,
	                                             memory_order_relaxed))
		return had == (d->own | LANE_CLOSED) ? CLOSED : give_up(c, fd);
	d->own += n;
	*b = copied;
	atomic_thread_fence(memory_order_seq_cst);
	if (first || (atomic_load_explicit(&c->out->armed, memory_order_relaxed) == 1 &&
	              atomic_compare_exchange_strong_explicit(&c->out->armed, &asleep, 0,
	                                                      memory_order_relaxed, memory_order_relaxed)))
		r = ring_doorbell_of(c, fd, flags);
	else if (++d->quiet >= QUIET_SENDS || had / QUIET_BYTES != d->own / QUIET_BYTES)
		r = alive(fd, flags);
	return r < 0 ? r : (long)n;
}

/* Waits a little for room. The reader wakes it when there is some to speak of. */
static bool wait_for_room(struct connection *c, bool waits)
{
	struct timespec limit = {0, waits ? WAIT_NS : NO_WAIT_NS};

	atomic_store_explicit(&c->out->waiting, 1, memory_order_relaxed);
	atomic_thread_fence(memory_order_seq_cst);
	if (room_in(c) <= 0)
		UNDONE(call(SYS_futex, &c->out->waiting, FUTEX_WAIT, 1, &limit, NULL, 0), .c = c,
		       .locked = &c->sides->out);
	atomic_store_explicit(&c->out->waiting, 0, memory_order_relaxed);
	return room_in(c) != 0;
}

bool never_waits(int fd, int flags)
{
	long set = flags & MSG_DONTWAIT ? O_NONBLOCK : call(SYS_fcntl, fd, F_GETFL);

	return set < 0 || set & O_NONBLOCK;
}

long send_native(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->out;
	struct iovec list[NATIVE_LIST];
	struct msghdr m = {.msg_iov = list, .msg_iovlen = rest_of(b, list, NATIVE_LIST, b->left)};
	long r;

	if (!atomic_load(&c->descriptors))
		return -EBADF; /* closed meanwhile: the number may be another file's */
	atomic_fetch_add(&d->native, 1);
	unlock_direction(d);
	UNDONE(r = PLAIN(sendmsg, SYS_sendmsg, fd, &m, flags), .c = c, .native = d);
	if (r < 0)
		r = -errno;
	while (!lock_direction(d))
		;
	if (r > 0)
		d->data = d->stream += (uint64_t)r;
	atomic_fetch_sub(&d->native, 1);
	if (r > 0)
		skip(b, (size_t)r);
	return r;
}

/* One step: gives how many bytes went, or -errno; 0 that nothing did and another step is due. */
static long step(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->out;
	bool first = false;
	long r;

	if (atomic_load(&c->sides->broken))
		return -ECONNRESET;
	if (d->epoch & 1 && !may_use(c))
		leave_ring(c);
	if (!(d->epoch & 1)) {
		first = enter_ring(c, fd);
		if (!first)
			return send_native(c, fd, b, flags);
	}
	r = put(c, fd, b, flags, first);
	if (r == CLOSED) {
		d->final = true;
		leave_ring(c);
		return 0;
	}
	if (r == FULL) {
		/* Not less than was wanted while TCP has room: programs that wait for edges would wait for
		 * one that TCP has no reason to give. */
		if (!wait_for_room(c, !never_waits(fd, flags)))
			leave_ring(c);
		return 0;
	}
	return r;
}

long lanes_send(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->out;
	size_t all = b->left;
	long r = 0;

	if (c->stream)
		return queue_send(c, fd, b, flags);
	if (!lock_direction(d))
		return -EAGAIN;
	while (b->left && r >= 0) {
		r = step(c, fd, b, flags);
		if (r > 0 && !(d->epoch & 1) && b->left && never_waits(fd, flags))
			break; /* TCP took what it could */
	}
	unlock_direction(d);
	return b->left < all ? (long)(all - b->left) : r;
}

long lanes_native(struct connection *c, int fd, long (*f)(void *), void *arg)
{
	struct direction *d = &c->sides->out;
	long r;

	if (c->stream)
		return queue_native(c, fd, f, arg);
	if (!lock_direction(d))
		return -EAGAIN;
	leave_ring(c);
	atomic_fetch_add(&d->native, 1);
	unlock_direction(d);
	UNDONE(r = f(arg), .c = c, .native = d);
	while (!lock_direction(d))
		;
	if (r > 0)
		d->data = d->stream += (uint64_t)r;
	atomic_fetch_sub(&d->native, 1);
	unlock_direction(d);
	return r;
}

/* Has all that is sent from here on go by TCP. */
void lanes_finish(struct connection *c, int fd)
{
	struct direction *d = &c->sides->out;

	if (c->stream) {
		queue_finish(c, fd);
		return;
	}
	if (!lock_direction(d))
		return;
	d->final = true;
	leave_ring(c);
	unlock_direction(d);
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections whose bytes the service of queues sends. What a program sends in a row goes into a
 * byte ring, out of which the service has the same socket take large pieces; what is large already,
 * or waits for an answer, goes to the socket itself. What a program receives is the socket's. */

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "guest/region.h"

/* So many sends without a receive between them are a row. */
#define ROW          4
/* A send of so many bytes costs the socket no more than the ring, once the ring is empty. */
#define LARGE        32768
/* For so long a hand-over waits for the ring. */
#define HAND_OVER_MS 2000
/* After so many seconds whoever waits for the service looks whether it is there. */
#define LOOK_SECONDS 1

long queue_attach(struct connection *c, int fd)
{
	long number = region_ready(), sides;

	if (failed(number))
		return number;
	sides = call(SYS_mmap, NULL, sizeof(struct sides), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
	             -1, 0L);
	if (failed(sides))
		return sides;
	number = region_ask(fd);
	if (!failed(number) && !region_stream((uint32_t)number, &c->words, &c->out_ring))
		number = -EPROTO;
	if (failed(number)) {
		call(SYS_munmap, sides, sizeof(struct sides));
		return number;
	}
	c->sides = (struct sides *)sides;
	c->stream = (uint32_t)number + 1;
	c->capacity = region_capacity();
	c->header = region_header();
	c->generation = atomic_load_explicit(&c->words->generation, memory_order_acquire);
	return 0;
}

void queue_forked(void)
{
	region_forked();
}

static bool is_ours(struct connection *c)
{
	return atomic_load_explicit(&c->words->state, memory_order_acquire) & QUEUES_STREAM_USED &&
	       atomic_load_explicit(&c->words->generation, memory_order_acquire) == c->generation;
}

/* Bytes in the ring that the socket has not taken; 0 also once the stream is nobody's, or its
 * connection over: nobody takes them then. */
static uint64_t in_ring(struct connection *c)
{
	struct direction *d = &c->sides->out;
	uint64_t consumed = atomic_load_explicit(&c->words->out_consumed, memory_order_acquire);
	uint32_t state = atomic_load_explicit(&c->words->state, memory_order_acquire);

	if (!is_ours(c) || state & QUEUES_STREAM_DEAD || d->own - consumed > c->capacity)
		return 0;
	return d->own - consumed;
}

/* Whether bytes may go by the ring at all. */
static bool may_use(struct connection *c)
{
	return !c->sides->out.final && !atomic_load_explicit(&c->header->stop, memory_order_relaxed) &&
	       !atomic_load_explicit(&c->header->ended, memory_order_relaxed) &&
	       !(atomic_load_explicit(&c->words->state, memory_order_acquire) & QUEUES_STREAM_DEAD);
}

static struct queues_nqe about(struct connection *c, uint32_t operation)
{
	return (struct queues_nqe){.operation = (uint8_t)operation,
	                           .flags = QUEUES_QUIET,
	                           .socket = c->stream,
	                           .generation = c->generation,
	                           .offset = c->sides->out.own};
}

/* Whether the agent has written that the service has died, and bytes are in the ring. The service
 * may have sent them, and died before it could say so: they are never sent by anybody else. */
static bool left_behind(struct connection *c)
{
	return atomic_load_explicit(&c->header->ended, memory_order_acquire) == QUEUES_ENDED_DIED &&
	       in_ring(c) > 0; /* in this order: it may have taken all before */
}

/* Has the last close of a socket reset its connection: the peer is not to take what came for all
 * there was. */
static void reset_at_close(int fd)
{
	struct {
		int on;
		uint32_t seconds;
	} linger = {1, 0};

	call(SYS_setsockopt, fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
}

/* Whether the connection has ended with bytes in the ring. */
static bool has_lost(struct connection *c)
{
	return is_ours(c) &&
	       atomic_load_explicit(&c->words->state, memory_order_acquire) & QUEUES_STREAM_DEAD &&
	       atomic_load_explicit(&c->words->out_consumed, memory_order_acquire) != c->sides->out.own;
}

/* Resets a connection, at once. */
static void reset(int fd)
{
	struct sockaddr none = {.sa_family = AF_UNSPEC};

	reset_at_close(fd); /* a module's, which cannot be disconnected */
	if (failed(call(SYS_connect, fd, &none, sizeof(none))))
		call(SYS_shutdown, fd, SHUT_RDWR);
}

/* Ends a connection whose bytes nobody takes any more as the agent does: at once, and by a RST. The
 * next call is told. */
static void end_orphaned(struct connection *c, int fd)
{
	reset(fd);
	atomic_store_explicit(&c->words->error, ECONNRESET, memory_order_relaxed);
	atomic_fetch_or_explicit(&c->words->state, QUEUES_STREAM_DEAD, memory_order_release);
	atomic_store(&c->words->out_waiting, 0);
	call(SYS_futex, &c->words->out_waiting, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Puts bytes into the ring, as far as there is room. Of a service that died just before, the agent
 * writes that first, and then looks for bytes in the ring; here they are written first. One of the
 * two sees what the other has written, and ends the connection. */
static size_t put(struct connection *c, int fd, struct buffers *b)
{
	struct direction *d = &c->sides->out;
	size_t at = d->own & (c->capacity - 1), end = c->capacity - at, n = c->capacity - in_ring(c);
	uint32_t asleep = 1;

	if (n > b->left)
		n = b->left;
	if (!n)
		return 0;
	copy_out(b, c->out_ring + at, n < end ? n : end);
	if (n > end)
		copy_out(b, c->out_ring, n - end);
	d->own += n;
	atomic_store_explicit(&c->words->out_produced, d->own, memory_order_release);
	atomic_thread_fence(memory_order_seq_cst);
	if (left_behind(c)) {
		end_orphaned(c, fd);
		return n;
	}
	if (atomic_load_explicit(&c->words->out_asleep, memory_order_relaxed) == 1 &&
	    atomic_compare_exchange_strong_explicit(&c->words->out_asleep, &asleep, 0, memory_order_relaxed,
	                                            memory_order_relaxed)) {
		struct queues_nqe nqe = about(c, QUEUES_SEND);

		region_push(&nqe);
	}
	return n;
}

/* Has the service say when there is room. */
static uint32_t ask(struct connection *c, uint32_t how)
{
	uint32_t all = atomic_fetch_or_explicit(&c->words->out_waiting, how, memory_order_relaxed) | how;

	atomic_thread_fence(memory_order_seq_cst);
	return all;
}

/* Whether nobody will take what is in the ring: its service has died, and no agent has ended the
 * connection, as one that came after the region does not know of it. A forked child has no end of
 * the region's socket to ask. */
static bool orphaned(struct connection *c)
{
	return left_behind(c) || (c->header == region_header() && region_died() && in_ring(c) > 0);
}

/* Waits at out_waiting for LOOK_SECONDS at most, and else as FUTEX_WAIT without a limit does. That
 * one with a limit is never made again after a signal (SA_RESTART), which programs expect of a send
 * without a timeout; FUTEX_WAITV is. Where there is none it waits as long as it takes. */
static long wait_and_look(struct connection *c, uint32_t waits)
{
	struct futex_waitv word = {waits, (uintptr_t)&c->words->out_waiting, FUTEX_32, 0};
	struct timespec until = {0, 0};
	long r;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += LOOK_SECONDS;
	r = call(SYS_futex_waitv, &word, 1UL, 0UL, &until, (long)CLOCK_MONOTONIC);
	if (r == -ENOSYS || r == -EPERM)
		r = call(SYS_futex, &c->words->out_waiting, FUTEX_WAIT, waits, NULL, NULL, 0);
	return r;
}

/* Waits until the service has taken some of more than `most` bytes, so long at most; NULL: as long
 * as it takes, and perhaps not so long. Gives 0, or -errno. Then the connection may be over. */
static long wait_for(struct connection *c, int fd, uint64_t most, const struct timespec *limit)
{
	uint32_t waits = ask(c, QUEUES_WAITS);
	long r = 0;

	if (in_ring(c) > most)
		UNDONE(r = limit ? call(SYS_futex, &c->words->out_waiting, FUTEX_WAIT, waits, limit, NULL, 0)
		                 : wait_and_look(c, waits),
		       .c = c);
	if (r == -ETIMEDOUT && orphaned(c)) {
		end_orphaned(c, fd);
		return 0;
	}
	return r == -EAGAIN || r > 0 || (r == -ETIMEDOUT && !limit) ? 0 : r;
}

/* What SO_SNDTIMEO says; false: nothing. */
static bool send_timeout(int fd, struct timespec *limit)
{
	struct {
		long seconds, micros;
	} set = {0, 0};
	socklen_t length = sizeof(set);

	if (failed(call(SYS_getsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &set, &length)) ||
	    (!set.seconds && !set.micros))
		return false;
	*limit = (struct timespec){set.seconds, set.micros * 1000};
	return true;
}

/* The ring has more than `most` bytes: waits as the socket would. Whoever may not wait is told that
 * there is no room, and the service has the kernel tell of an edge when there is. The direction is
 * unlocked meanwhile. */
static long wait_as_socket(struct connection *c, int fd, uint64_t most, int flags)
{
	struct direction *d = &c->sides->out;
	struct timespec limit;
	long r;

	if (never_waits(fd, flags)) {
		ask(c, QUEUES_WAITS_EDGE);
		if (in_ring(c) <= most)
			return 0;
		if (!orphaned(c))
			return -EAGAIN;
		end_orphaned(c, fd);
		return 0;
	}
	unlock_direction(d);
	r = wait_for(c, fd, most, send_timeout(fd, &limit) ? &limit : NULL);
	if (r == -ETIMEDOUT)
		r = -EAGAIN;
	while (!lock_direction(d))
		;
	return r;
}

/* Whether bytes go by the ring: while it has some, or if they are small and in a row. Not while
 * another thread's call writes to the socket itself: nobody could say whose are first. */
static bool by_ring(struct connection *c, size_t n)
{
	struct direction *d = &c->sides->out;

	if (!may_use(c) || atomic_load(&d->native))
		return false;
	return in_ring(c) > 0 || (d->quiet > ROW && n < LARGE);
}

/* One step: gives how many bytes went, or -errno. */
static long step(struct connection *c, int fd, struct buffers *b, int flags)
{
	long n;
	int error;

	if (c->sides->in.final)
		return -EPIPE; /* shut down, though the kernel may not know yet */
	error = queue_error(c);
	if (error)
		return -error;
	if (by_ring(c, b->left)) {
		n = (long)put(c, fd, b);
		return n ? n : wait_as_socket(c, fd, c->capacity / 2, flags);
	}
	if (in_ring(c) > 0)
		return wait_as_socket(c, fd, 0, flags);
	/* Nothing may follow what is lost, also before the agent has come to end the connection. */
	if (has_lost(c))
		reset(fd);
	return send_native(c, fd, b, flags);
}

long queue_send(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->out;
	size_t all = b->left;
	long r = 0;
	bool native = false;

	if (!lock_direction(d))
		return -EAGAIN;
	d->quiet++;
	while (b->left && r >= 0) {
		size_t left = b->left;

		native = !in_ring(c);
		r = step(c, fd, b, flags);
		if (native && b->left && b->left < left && never_waits(fd, flags) && !in_ring(c))
			break; /* the socket took what it could */
	}
	unlock_direction(d);
	if (b->left < all)
		return (long)(all - b->left);
	if (r == -EPIPE && c->sides->in.final)
		call(SYS_sendto, fd, "", 0UL, flags & MSG_NOSIGNAL, NULL, 0UL); /* with its signal */
	return r;
}

int queue_error(struct connection *c)
{
	int error;

	if (!is_ours(c) ||
	    !(atomic_load_explicit(&c->words->state, memory_order_acquire) & QUEUES_STREAM_DEAD))
		return 0;
	error = atomic_load_explicit(&c->words->error, memory_order_relaxed);
	if (error <= 0 || error > 4095 || c->sides->in.error == error)
		return 0;
	c->sides->in.error = error;
	return error;
}

long queue_receive(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct iovec list[NATIVE_LIST];
	struct msghdr m = {.msg_iov = list, .msg_iovlen = rest_of(b, list, NATIVE_LIST, b->left)};
	long r;
	int error;

	UNDONE(r = PLAIN(recvmsg, SYS_recvmsg, fd, &m, flags), .c = c);
	if (r < 0)
		r = -errno;
	else
		c->sides->out.quiet = 0;
	if (r == 0 && b->left) {
		error = queue_error(c);
		return error ? -error : 0;
	}
	return r;
}

/* Waits until the ring is empty, as the socket would for room. */
static long drain(struct connection *c, int fd, int flags)
{
	long r = 0;

	while (in_ring(c) && !r)
		r = wait_as_socket(c, fd, 0, flags);
	return r;
}

long queue_native(struct connection *c, int fd, long (*f)(void *), void *arg)
{
	struct direction *d = &c->sides->out;
	long r;

	if (!lock_direction(d))
		return -EAGAIN;
	r = drain(c, fd, 0);
	if (r) {
		unlock_direction(d);
		return r;
	}
	atomic_fetch_add(&d->native, 1);
	unlock_direction(d);
	UNDONE(r = f(arg), .c = c, .native = d);
	atomic_fetch_sub(&d->native, 1);
	return r;
}

/* Has the service close its duplicate once the ring is empty, or with QUEUES_ABORT at once. */
static void say_close(struct connection *c, uint32_t how)
{
	struct queues_nqe nqe = about(c, QUEUES_CLOSE);

	nqe.flags |= (uint8_t)how;
	if (!c->sides->out.clean && is_ours(c))
		region_push(&nqe);
	c->sides->out.clean = true;
}

static void leave(struct connection *c, uint32_t how)
{
	struct direction *d = &c->sides->out;

	if (d->clean || !lock_direction(d))
		return;
	d->final = true;
	say_close(c, how);
	unlock_direction(d);
}

void queue_leave(struct connection *c)
{
	leave(c, 0);
}

bool queue_hand_over(struct connection *c, int fd)
{
	struct timespec pause = {0, 1000000};

	queue_leave(c);
	for (int ms = 0; in_ring(c) && ms < HAND_OVER_MS; ms++)
		wait_for(c, fd, 0, &pause);
	return in_ring(c) == 0;
}

void queue_finish(struct connection *c, int fd)
{
	queue_leave(c);
	while (in_ring(c))
		wait_for(c, fd, 0, NULL);
}

void queue_settle(struct connection *c, int fd)
{
	struct {
		int on;
		uint32_t seconds;
	} linger = {0, 0};
	socklen_t length = sizeof(linger);

	if (in_ring(c) && orphaned(c))
		end_orphaned(c, fd);
	else if (has_lost(c))
		reset_at_close(fd); /* the agent may do so later */
	if (!failed(call(SYS_getsockopt, fd, SOL_SOCKET, SO_LINGER, &linger, &length)) && linger.on &&
	    atomic_load(&c->descriptors) <= 1) {
		/* The last close of the file is to be the program's, and one that resets the connection
		 * waits for nothing. */
		leave(c, linger.seconds ? 0 : QUEUES_ABORT);
		for (uint64_t ms = 0; is_ours(c) && ms < linger.seconds * 1000ULL; ms++)
			call(SYS_ppoll, NULL, 0UL, &(struct timespec){0, 1000000}, NULL, 8UL);
	}
}

void queue_release(struct connection *c)
{
	queue_leave(c);
	call(SYS_munmap, c->sides, sizeof(struct sides));
	c->stream = 0;
	atomic_store_explicit(&c->taken, 0, memory_order_release);
}

long queue_shutdown(struct connection *c, int fd, int how)
{
	struct direction *d = &c->sides->out;
	struct queues_nqe nqe;
	bool later;
	long r;

	if (how != SHUT_WR && how != SHUT_RDWR)
		return call(SYS_shutdown, fd, how);
	while (d->clean && in_ring(c)) /* of a process that has forked: nobody would do it later */
		wait_for(c, fd, 0, NULL);
	if (!lock_direction(d))
		return -EAGAIN;
	later = in_ring(c) && !d->clean && !c->sides->in.final;
	if (later) {
		nqe = about(c, QUEUES_SHUTDOWN);
		nqe.length = QUEUES_SHUT_WRITE;
		later = region_push(&nqe);
	}
	r = later ? 0 : call(SYS_shutdown, fd, how);
	if (!failed(r))
		c->sides->in.final = true; /* or a small send would be told success */
	unlock_direction(d);
	if (!later)
		return r;
	return how == SHUT_RDWR ? call(SYS_shutdown, fd, SHUT_RD) : 0;
}

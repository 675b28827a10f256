/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a program receives: out of the ring or from TCP, as the writer's epochs say. While the ring
 * has bytes a doorbell lies in the socket, so that it is readable; when it is empty, none does. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <time.h>

#include "guest/queues.h"

#define AGAIN      (-4097) /* another step is due */
#define MANY_STEPS 64      /* of a call that find nothing: only a hostile writer makes more */

/* Bytes in the ring; -1 if the writer does not keep to the rules. */
static long available(struct connection *c)
{
	uint64_t n = (atomic_load_explicit(&c->in->produced, memory_order_acquire) & ~LANE_CLOSED) -
	             c->sides->in.own;

	return n > LANES_CAPACITY ? -1 : (long)n;
}

static uint64_t writers_epoch(struct connection *c)
{
	return atomic_load_explicit(&c->in->epoch, memory_order_acquire);
}

/* How many bytes of the stream are before the end of the reader's epoch, which is over. */
static uint64_t left_of_epoch(struct connection *c)
{
	struct direction *d = &c->sides->in;

	return atomic_load_explicit(&c->in->ended[d->epoch & 3].stream, memory_order_relaxed) - d->stream;
}

static void follow(struct connection *c)
{
	struct direction *d = &c->sides->in;

	d->epoch++;
	atomic_store_explicit(&c->in->followed, d->epoch, memory_order_release);
}

void say_taken(struct connection *c)
{
	atomic_store_explicit(&c->in->taken, c->sides->in.stream + 1, memory_order_release);
}

/* Takes at most n doorbells out of the socket. Gives how many, or -errno; *end if there are none
 * and none will come. */
static long drop(struct connection *c, int fd, uint64_t n, bool *end)
{
	char bells[256];
	uint64_t dropped = 0;
	long r;

	while (dropped < n) {
		size_t want = n - dropped < sizeof(bells) ? n - dropped : sizeof(bells);

		r = call(SYS_recvfrom, fd, bells, want, MSG_DONTWAIT, NULL, NULL);
		*end = r == 0;
		if (r < 0 && r != -EAGAIN)
			c->sides->in.error = (int)r; /* the kernel tells it once */
		if (r <= 0)
			break;
		dropped += (uint64_t)r;
		c->sides->in.stream += (uint64_t)r;
		say_taken(c);
	}
	return (long)dropped;
}

/* Whether there is something to do that was not when the ring was found empty. */
static bool moved(struct connection *c)
{
	return available(c) != 0 || writers_epoch(c) != c->sides->in.epoch;
}

/* Has the writer ring for what it writes next, and takes the doorbells before that out. False:
 * there is something in the ring, and a doorbell in the socket or on its way. */
static bool arm(struct connection *c, int fd)
{
	/* Before armed: whatever is rung later counts beyond it. */
	uint64_t bells = atomic_load_explicit(&c->in->stream, memory_order_acquire) - c->sides->in.stream;
	uint32_t yes = 1;
	bool end;

	if (atomic_load_explicit(&c->in->armed, memory_order_acquire) != 1) {
		atomic_store_explicit(&c->in->armed, 1, memory_order_relaxed);
		atomic_thread_fence(memory_order_seq_cst);
		if (moved(c)) {
			atomic_compare_exchange_strong_explicit(&c->in->armed, &yes, 0, memory_order_relaxed,
			                                        memory_order_relaxed);
			return false;
		}
	}
	if (bells && bells < LANES_CAPACITY)
		drop(c, fd, bells, &end);
	return true;
}

static void wake_writer(struct connection *c)
{
	atomic_thread_fence(memory_order_seq_cst);
	if (atomic_load_explicit(&c->in->waiting, memory_order_relaxed) != 1 ||
	    available(c) > (long)LANES_CAPACITY / 2)
		return;
	atomic_store_explicit(&c->in->waiting, 0, memory_order_relaxed);
	call(SYS_futex, &c->in->waiting, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Copies bytes out of the ring: 0 if it is empty, -1 as of available. */
static long take(struct connection *c, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->in;
	struct buffers peeked = *b, *to = flags & MSG_PEEK ? &peeked : b;
	size_t at = d->own & (LANES_CAPACITY - 1), end = LANES_CAPACITY - at, n;
	long have = available(c);

	if (have <= 0)
		return have;
	n = (size_t)have < b->left ? (size_t)have : b->left;
	if (flags & MSG_TRUNC) {
		skip(to, n);
	} else {
		copy_in(to, c->in_ring + at, n < end ? n : end);
		if (n > end)
			copy_in(to, c->in_ring, n - end);
	}
	if (!(flags & MSG_PEEK)) {
		d->own += n;
		atomic_store_explicit(&c->in->consumed, d->own, memory_order_release);
		wake_writer(c);
	}
	return (long)n;
}

/* What the socket says when a byte is looked for: 1, 0 for the end, or -errno. */
static long probe(int fd)
{
	char byte;

	return call(SYS_recvfrom, fd, &byte, 1UL, MSG_PEEK | MSG_DONTWAIT, NULL, NULL);
}

static long receive_native(int fd, struct buffers *b, size_t limit, int flags)
{
	struct iovec list[NATIVE_LIST];
	struct msghdr m = {.msg_iov = list, .msg_iovlen = rest_of(b, list, NATIVE_LIST, limit)};
	long r = call(SYS_recvmsg, fd, &m, (flags & (MSG_PEEK | MSG_TRUNC)) | MSG_DONTWAIT);

	if (r > 0 && !(flags & MSG_PEEK))
		skip(b, (size_t)r);
	return r;
}

/* A peer that had read all closed in order, though a doorbell was left: TCP has reset the
 * connection for that. One that had taken all doorbells, too, or had left other bytes, meant the
 * reset. */
static long in_order(struct connection *c, long r)
{
	struct direction *d = &c->sides->out;
	uint64_t taken = atomic_load_explicit(&c->out->taken, memory_order_acquire);

	if (r != -ECONNRESET || !d->own ||
	    atomic_load_explicit(&c->out->consumed, memory_order_acquire) != d->own)
		return r;
	return !taken || (taken - 1 >= d->data && taken - 1 < d->stream) ? 0 : r;
}

/* The ring is empty, and its epoch is over: TCP's bytes are next, behind the doorbells. */
static long leave(struct connection *c, int fd)
{
	struct direction *d = &c->sides->in;
	uint64_t bells = left_of_epoch(c);
	bool end = false;

	if (available(c) != 0)
		return AGAIN;
	if (writers_epoch(c) != d->epoch + 1 || bells >= LANES_CAPACITY ||
	    atomic_load_explicit(&c->in->ended[d->epoch & 3].ring, memory_order_relaxed) != d->own)
		return give_up(c, fd);
	if ((uint64_t)drop(c, fd, bells, &end) < bells)
		return end ? 0 : d->error ? in_order(c, d->error) : -EAGAIN;
	follow(c);
	return AGAIN;
}

/* The ring is empty: what does the socket say? */
static long ask_socket(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->in;
	long r;

	if (!arm(c, fd))
		return AGAIN;
	r = d->error ? d->error : probe(fd);
	if (moved(c)) {
		if (r < 0 && r != -EAGAIN)
			d->error = (int)r; /* what came before it comes first */
		return AGAIN;
	}
	if (r > 0) {
		if (atomic_load_explicit(&c->in->stream, memory_order_acquire) != d->stream)
			return AGAIN; /* a doorbell */
		/* Of a program that wrote to the socket by itself. */
		return receive_native(fd, b, b->left, flags);
	}
	d->error = 0;
	return in_order(c, r);
}

/* So many doorbells lie in the socket at most that mean nothing more than that it can be read. */
#define BELLS_MOST 64

/* Looks at what the ring has. If that is less than was wanted, the next bytes want a doorbell: who
 * waits for edges waits for it. */
static long look(struct connection *c, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->in;

	for (;;) {
		long r = take(c, b, flags);
		uint64_t bells = atomic_load_explicit(&c->in->stream, memory_order_acquire) - d->stream -
		                 (d->epoch & 1 ? 0 : left_of_epoch(c));

		if (r <= 0 || (size_t)r == b->left || bells > BELLS_MOST)
			return r;
		atomic_store_explicit(&c->in->armed, 1, memory_order_relaxed);
		atomic_thread_fence(memory_order_seq_cst);
		if (available(c) == r)
			return r;
	}
}

static long from_ring(struct connection *c, int fd, struct buffers *b, int flags)
{
	long r = flags & MSG_PEEK ? look(c, b, flags) : take(c, b, flags), more = r;

	if (r < 0)
		return give_up(c, fd);
	if (r == 0)
		return writers_epoch(c) == c->sides->in.epoch ? ask_socket(c, fd, b, flags) : leave(c, fd);
	/* A call that gives less than was wanted has emptied the ring. */
	while (!(flags & MSG_PEEK) && more > 0 && available(c) == 0 && !arm(c, fd) && b->left) {
		more = take(c, b, flags);
		r += more > 0 ? more : 0;
	}
	return r;
}

static long from_tcp(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->in;
	/* First: if the writer is in this epoch afterwards, all that lies there are its bytes. */
	int queued = 0;
	long r = call(SYS_ioctl, fd, FIONREAD, &queued);
	uint64_t epoch = writers_epoch(c), limit = (uint64_t)queued;

	if (failed(r))
		return r;
	if (epoch != d->epoch) {
		uint64_t left = left_of_epoch(c);

		if (epoch - d->epoch > 2 || left > LONG_MAX)
			return give_up(c, fd);
		if (left == 0) {
			follow(c);
			return AGAIN;
		}
		limit = left < limit ? left : limit;
	}
	if (queued == 0) {
		r = d->error ? d->error : probe(fd);
		if (writers_epoch(c) != epoch) {
			if (r < 0 && r != -EAGAIN)
				d->error = (int)r; /* what came before it comes first */
			return AGAIN;
		}
		d->error = 0;
		if (r <= 0)
			return in_order(c, r);
		limit = 1; /* it has come since, or urgent bytes keep more from being counted */
	}
	r = receive_native(fd, b, limit, flags);
	if (r > 0 && !(flags & MSG_PEEK)) {
		d->stream += (uint64_t)r;
		say_taken(c);
	}
	return r;
}

#define BELLS_PEEKED 256 /* that may lie before TCP's bytes when these are looked at */

/* How many ends of an epoch lie ahead of the reader, and how many bytes of the stream before the
 * first. Read once: a hostile writer changes it after it was checked. */
static uint64_t ends_ahead(struct connection *c, uint64_t *left)
{
	uint64_t ahead = writers_epoch(c) - c->sides->in.epoch;

	*left = left_of_epoch(c);
	return ahead;
}

/* Whether a look sees all that there is, and what comes next. */
static bool sees_all(struct connection *c)
{
	uint64_t left, ahead = ends_ahead(c, &left);

	return !ahead || (ahead == 1 && (!(c->sides->in.epoch & 1) || left <= BELLS_PEEKED));
}

/* Looks beyond the end of the reader's epoch, of which r bytes have been seen. */
static long look_on(struct connection *c, int fd, const struct buffers *b, long r, int flags)
{
	char bells[BELLS_PEEKED];
	struct iovec list[NATIVE_LIST] = {{bells, 0}};
	struct msghdr m = {.msg_iov = list};
	struct buffers rest = *b;
	uint64_t left;

	if (ends_ahead(c, &left) != 1 || flags & MSG_TRUNC)
		return 0;
	skip(&rest, (size_t)r);
	if (!(c->sides->in.epoch & 1))
		return left == (uint64_t)r ? look(c, &rest, flags) : 0;
	if (left > BELLS_PEEKED || available(c) != r)
		return 0;
	list[0].iov_len = left;
	m.msg_iovlen = 1 + rest_of(&rest, list + 1, NATIVE_LIST - 1, rest.left);
	return call(SYS_recvmsg, fd, &m, MSG_PEEK | MSG_DONTWAIT) - (long)left;
}

/* Waits a little for more than a look has seen. False: there will be no more, or the program's
 * time, of which it takes some, is over. */
static bool more_comes(struct connection *c, int fd, long *micros)
{
	struct timespec millisecond = {0, 1000000};
	struct pollfd end = {fd, POLLRDHUP, 0};
	struct {
		long seconds, micros;
	} limit = {0, 0};
	socklen_t length = sizeof(limit);
	long r;

	if (*micros == 0 && !failed(call(SYS_getsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &length)))
		*micros = limit.seconds * 1000000 + limit.micros ?: LONG_MAX;
	UNDONE(r = PLAIN(ppoll, SYS_ppoll, &end, 1UL, &millisecond, NULL), .c = c);
	*micros -= 1000;
	return r == 0 && *micros > 0 && sees_all(c);
}

/* Waits as the socket does: for a doorbell, bytes or the end. */
static long wait_native(struct connection *c, int fd)
{
	char byte;
	long r;

	UNDONE(r = PLAIN(recvfrom, SYS_recvfrom, fd, &byte, 1, MSG_PEEK, NULL, NULL), .c = c);
	return r < 0 ? -errno : 0;
}

static bool waits(int fd, int flags)
{
	long set;

	if (flags & MSG_DONTWAIT)
		return false;
	set = call(SYS_fcntl, fd, F_GETFL);
	return set >= 0 && !(set & O_NONBLOCK);
}

/* Goes on into the next epoch while there is more: programs that wait for edges take a call that
 * gives less than they wanted for the last one. */
static long step(struct connection *c, int fd, struct buffers *b, int flags)
{
	struct direction *d = &c->sides->in;
	long r = AGAIN, got = 0;
	bool on = true;

	if (!lock_direction(d))
		return -EAGAIN;
	for (int i = 0; on && i < MANY_STEPS; i++) {
		r = atomic_load(&c->sides->broken) ? -ECONNRESET
		    : d->epoch & 1                 ? from_ring(c, fd, b, flags)
		                                   : from_tcp(c, fd, b, flags);
		if (r > 0 && flags & MSG_PEEK && (size_t)r < b->left) {
			long more = look_on(c, fd, b, r, flags);

			r += more > 0 ? more : 0;
		}
		got += r > 0 ? r : 0;
		on = r == AGAIN || (r > 0 && b->left && !(flags & MSG_PEEK) && moved(c));
	}
	if (got && r < 0 && r != -EAGAIN && r != AGAIN)
		d->error = (int)r; /* for the next call */
	unlock_direction(d);
	return got ? got : r;
}

long lanes_receive(struct connection *c, int fd, struct buffers *b, int flags)
{
	long r, got = 0, micros = 0;
	bool last = false;

	if (c->stream)
		return queue_receive(c, fd, b, flags);
	do {
		r = step(c, fd, b, flags);
		if (r > 0 && flags & MSG_PEEK) {
			if (last || !(flags & MSG_WAITALL) || (size_t)r >= b->left || !waits(fd, flags))
				return r;
			last = !more_comes(c, fd, &micros);
			r = AGAIN;
			continue;
		}
		if (r > 0)
			got += r;
		if (r > 0 && !(flags & MSG_WAITALL))
			break;
		if (r == -EAGAIN && waits(fd, flags))
			r = got && !(flags & MSG_WAITALL) ? 0 : wait_native(c, fd) ?: AGAIN;
		else if (r == AGAIN)
			r = -EAGAIN; /* a hostile writer, which has no more of this call's time */
	} while ((r > 0 || r == AGAIN) && b->left);
	return got ? got : r == AGAIN ? 0 : r;
}

/* FIONREAD. */
long lanes_readable(struct connection *c, int fd)
{
	struct direction *d = &c->sides->in;
	int queued = 0;
	long r = call(SYS_ioctl, fd, FIONREAD, &queued), have;
	uint64_t left;

	if (c->stream)
		return failed(r) ? r : queued;
	if (failed(r) || !lock_direction(d))
		return failed(r) ? r : 0;
	have = available(c);
	left = left_of_epoch(c);
	if (writers_epoch(c) == d->epoch)
		have = d->epoch & 1 ? have : queued;
	else if (d->epoch & 1)
		have += (uint64_t)queued > left ? (long)((uint64_t)queued - left) : 0;
	else
		have += (uint64_t)queued < left ? queued : (long)left;
	unlock_direction(d);
	return have < 0 ? 0 : have;
}

/* Takes doorbells out of the socket that mean nothing: a socket that is closed with bytes unread
 * resets its connection. */
void lanes_settle(struct connection *c, int fd)
{
	struct direction *d = &c->sides->in;

	if (c->stream) {
		queue_settle(c, fd);
		return;
	}
	if (!lock_direction(d))
		return;
	if (d->epoch & 1 && !moved(c))
		arm(c, fd);
	unlock_direction(d);
}

/* For so long doorbells may be on their way. */
#define BELLS_MS 100

/* Has the writer put nothing more into the ring. True: it is empty, and no doorbell is left. */
static bool close_ring(struct connection *c, int fd)
{
	struct direction *d = &c->sides->in;
	struct pollfd readable = {fd, POLLIN, 0};
	bool end = false, owed = d->epoch & 1 && atomic_exchange(&c->in->armed, 0) != 1;

	atomic_fetch_or(&c->in->produced, LANE_CLOSED);
	if (!(d->epoch & 1))
		return writers_epoch(c) == d->epoch;
	for (int ms = 0; ms < BELLS_MS; ms++) {
		uint64_t bells = atomic_load_explicit(&c->in->stream, memory_order_acquire) - d->stream;

		if (available(c) != 0)
			return false;
		if (!bells && !owed)
			return true;
		if (bells && bells < LANES_CAPACITY && drop(c, fd, bells, &end) == (long)bells)
			owed = false;
		else
			call(SYS_ppoll, &readable, 1UL, &(struct timespec){0, 1000000}, NULL, 8UL);
	}
	return false;
}

bool lanes_hand_over(struct connection *c, int fd)
{
	struct direction *d = &c->sides->in;
	bool clean;

	if (c->stream)
		return queue_hand_over(c, fd);
	lanes_finish(c, fd);
	if (!lock_direction(d))
		return false;
	if (!d->clean)
		d->clean = close_ring(c, fd);
	clean = d->clean;
	unlock_direction(d);
	return clean;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* libheddle-guest.so: preloaded into a dynamically linked program of a container, it has the bytes
 * of TCP connections with other containers of the node go through shared memory, by lanes:
 * docs/protocols/memory-lanes.md. The descriptor stays the kernel's TCP socket, which policy,
 * names, options and the end of the connection are about; a byte in it is the doorbell.
 *
 * calls.c, files.c and processes.c have the functions that programs call, table.c what is known of
 * a descriptor, ask.c asks the agent, send.c and receive.c move bytes. queues.c and region.c have
 * connections whose bytes a service of the node sends: docs/protocols/stack-queues.md. */

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "guest/queues.h"
#include "ring/ring.h"

/* Whether the kernel counts for the socket what this library did: else bytes went by it that the
 * library has not seen, and nobody can tell where in the stream it is. */
static bool counts_agree(int fd, uint64_t sent, uint64_t received)
{
	struct tcp_info info;
	socklen_t length = sizeof(info);
	int queued = 0;

	memset(&info, 0, sizeof(info));
	if (failed(call(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &info, &length)) ||
	    length < offsetof(struct tcp_info, tcpi_bytes_retrans) + sizeof(info.tcpi_bytes_retrans) ||
	    failed(call(SYS_ioctl, fd, FIONREAD, &queued)))
		return false;
	/* More may have come to the queue between the two calls, but nothing left it. */
	return info.tcpi_state == 1 /* TCP_ESTABLISHED */ &&
	       info.tcpi_bytes_sent - info.tcpi_bytes_retrans + info.tcpi_notsent_bytes == sent &&
	       info.tcpi_bytes_received <= received + (uint64_t)queued &&
	       info.tcpi_bytes_received >= received;
}

/* A doorbell goes at once, and wakes whoever waits. */
static bool ready_for_doorbells(int fd)
{
	int one = 1, none = 0, least = 0;
	socklen_t length = sizeof(least);

	return !failed(call(SYS_getsockopt, fd, SOL_SOCKET, SO_RCVLOWAT, &least, &length)) && least == 1 &&
	       !failed(call(SYS_setsockopt, fd, IPPROTO_TCP, TCP_CORK, &none, sizeof(none))) &&
	       !failed(call(SYS_setsockopt, fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
}

/* Gives a connection its lanes, which lie in a file that stays the caller's. */
bool attach(struct connection *c, int fd, int role, int memory, uint64_t sent, uint64_t received)
{
	struct lanes *lanes = ring_map(memory, LANES_SIZE);
	long sides;

	if (!lanes)
		return false;
	sides = call(SYS_mmap, NULL, sizeof(struct sides), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
	             -1, 0L);
	if (lanes->magic != LANES_MAGIC || lanes->version != LANES_VERSION ||
	    lanes->capacity != LANES_CAPACITY || failed(sides) || !counts_agree(fd, sent, received) ||
	    !ready_for_doorbells(fd)) {
		if (!failed(sides))
			call(SYS_munmap, sides, sizeof(struct sides));
		ring_unmap(lanes, LANES_SIZE);
		return false;
	}
	c->sides = (struct sides *)sides;
	c->sides->out.stream = c->sides->out.data = sent;
	c->sides->in.stream = received;
	c->out = &lanes->lane[role];
	c->in = &lanes->lane[!role];
	c->out_ring = (uint8_t *)lanes + LANES_HEAD + (size_t)role * LANES_CAPACITY;
	c->in_ring = (uint8_t *)lanes + LANES_HEAD + (size_t)!role * LANES_CAPACITY;
	atomic_store(&c->lanes, lanes);
	say_taken(c);
	return true;
}

void attached(struct connection *c)
{
	if (!c->stream)
		atomic_store_explicit(&c->in->attached, 1, memory_order_release);
}

/* Gives the memory back. */
void release(struct connection *c)
{
	struct lanes *lanes;

	if (c->stream) {
		queue_release(c);
		return;
	}
	lanes = atomic_exchange(&c->lanes, NULL);
	if (!lanes)
		return;
	ring_unmap(lanes, LANES_SIZE);
	call(SYS_munmap, c->sides, sizeof(struct sides));
	atomic_store_explicit(&c->taken, 0, memory_order_release);
}

static __thread uint32_t this_thread __attribute__((tls_model("initial-exec")));

void forget_thread(void)
{
	this_thread = 0;
}

/* Locks a direction. It is held for 20 ms at most, where a send waits for room; it may be held by a
 * thread that was killed, in another process that shares the connection. False: this thread holds
 * it, and a signal has interrupted it. */
bool lock_direction(struct direction *d)
{
	struct timespec pause = {0, 50000};
	uint32_t holder, own = this_thread;
	int tries = 0;

	if (!own) {
		own = (uint32_t)call(SYS_gettid);
		if (!borrowed()) /* else the word is the parent's, too, and the child will be gone */
			this_thread = own;
	}
	for (;;) {
		holder = 0;
		if (atomic_compare_exchange_strong_explicit(&d->lock, &holder, own, memory_order_acquire,
		                                            memory_order_relaxed))
			return true;
		if (holder == own)
			return false;
		if (++tries % 64) {
			call(SYS_sched_yield);
			continue;
		}
		if (call(SYS_kill, holder, 0) == -ESRCH &&
		    atomic_compare_exchange_strong_explicit(&d->lock, &holder, own, memory_order_acquire,
		                                            memory_order_relaxed))
			return true;
		call(SYS_nanosleep, &pause, NULL);
	}
}

void unlock_direction(struct direction *d)
{
	atomic_store_explicit(&d->lock, 0, memory_order_release);
}

/* The list of what the C library does for a thread that is cancelled. The one of glibc does it,
 * too, when a signal's handler jumps out of the call; under another C library such a handler
 * would leave the list behind with what lies on the stack no more. */
extern void _pthread_cleanup_push(void *kept, void (*)(void *), void *) __attribute__((weak));
extern void _pthread_cleanup_pop(void *kept, int run) __attribute__((weak));
extern const char *gnu_get_libc_version(void) __attribute__((weak));

static bool has_list(void)
{
	return gnu_get_libc_version && _pthread_cleanup_push && _pthread_cleanup_pop;
}

static void undo(void *arg)
{
	struct undo *u = arg;

	if (u->native) {
		u->native->final = true; /* nobody knows what the call has sent */
		atomic_fetch_sub(&u->native->native, 1);
	}
	if (u->locked)
		unlock_direction(u->locked);
	end_io(u->fd, u->c, 0, 0);
}

void undo_begin(struct undo *u)
{
	if (has_list())
		_pthread_cleanup_push(u->kept, undo, u);
}

void undo_end(struct undo *u)
{
	if (has_list())
		_pthread_cleanup_pop(u->kept, 0);
}

/* Ends a connection whose other end does not keep to the rules. */
long give_up(struct connection *c, int fd)
{
	atomic_store(&c->sides->broken, 1);
	call(SYS_shutdown, fd, SHUT_RDWR);
	return -ECONNRESET;
}

bool buffers_of(struct buffers *b, const struct iovec *list, size_t count)
{
	*b = (struct buffers){.list = list, .count = count};
	if (count > 1024)
		return false;
	for (size_t i = 0; i < count; i++) {
		if (list[i].iov_len > 0x7ffff000 - b->left)
			b->left = 0x7ffff000; /* as the kernel does */
		else
			b->left += list[i].iov_len;
	}
	return true;
}

/* Gives the next piece of at most n bytes, and goes on behind it. */
static uint8_t *next_piece(struct buffers *b, size_t n, size_t *piece)
{
	uint8_t *at;

	while (b->list->iov_len == b->offset) {
		b->list++;
		b->count--;
		b->offset = 0;
	}
	*piece = b->list->iov_len - b->offset;
	if (*piece > n)
		*piece = n;
	at = (uint8_t *)b->list->iov_base + b->offset;
	b->offset += *piece;
	b->left -= *piece;
	return at;
}

void copy_in(struct buffers *b, const uint8_t *from, size_t n)
{
	for (size_t piece; n; n -= piece, from += piece) {
		uint8_t *to = next_piece(b, n, &piece);
		memcpy(to, from, piece);
	}
}

void copy_out(struct buffers *b, uint8_t *to, size_t n)
{
	for (size_t piece; n; n -= piece, to += piece) {
		const uint8_t *from = next_piece(b, n, &piece);
		memcpy(to, from, piece);
	}
}

void skip(struct buffers *b, size_t n)
{
	for (size_t piece; n; n -= piece)
		next_piece(b, n, &piece);
}

size_t rest_of(const struct buffers *b, struct iovec *list, size_t most, size_t limit)
{
	size_t offset = b->offset, made = 0;

	if (limit > b->left)
		limit = b->left;
	for (size_t i = 0; i < b->count && made < most && limit; i++, offset = 0) {
		size_t n = b->list[i].iov_len - offset;

		if (n > limit)
			n = limit;
		if (!n)
			continue;
		list[made++] = (struct iovec){(uint8_t *)b->list[i].iov_base + offset, n};
		limit -= n;
	}
	return made;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the files of the library share. connection.c has the way from one to another. */
#ifndef HEDDLE_GUEST_INTERNAL_H
#define HEDDLE_GUEST_INTERNAL_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "guest/lanes.h"

#define PUBLIC __attribute__((visibility("default")))

/* What one direction of a connection needs beside the shared memory: memory of this container's
 * alone, shared with forked children, which have the connection, too. */
struct direction {
	_Atomic uint32_t lock;   /* thread that holds it; see lock_direction */
	_Atomic uint32_t native; /* calls that write to the TCP socket itself just now */
	uint64_t own;            /* bytes that this side has put into the ring, or taken out */
	uint64_t peer;           /* as far as the other side was seen to be */
	uint64_t epoch;          /* in which this side writes, or reads */
	uint64_t stream;         /* bytes of the TCP stream that this side wrote, or read */
	uint64_t data;           /* of those that it wrote, up to the last one that is no doorbell */
	uint32_t beat;           /* the agent's, as it was seen last */
	uint64_t beat_at;        /* when it was seen to change, in seconds */
	uint32_t quiet;          /* sends since the peer was last seen to live */
	bool final;              /* it is TCP's from here on, whatever comes */
	bool clean;              /* of a ring that was closed: nothing is left of it */
	int error;               /* of the socket, told when the ring is empty */
};

struct sides {
	struct direction out, in;
	_Atomic uint32_t broken; /* the peer does not keep to the rules */
};

/* A connection that has lanes, or a stream of queues, in this process. */
struct connection {
	_Atomic uint32_t taken;
	_Atomic uint32_t users; /* calls that use it just now, and descriptors that lead to it */
	_Atomic uint32_t descriptors;
	struct lanes *_Atomic lanes;
	struct sides *sides;
	/* Of one that has a stream of the service of queues instead. */
	uint32_t stream; /* its number plus 1; 0: it has lanes */
	uint32_t generation, capacity;
	struct queues_stream *words;
	struct queues_header *header;
	struct lane *out, *in;
	uint8_t *out_ring, *in_ring;
};

/* connection.c */
bool attach(struct connection *c, int fd, int role, int memory, uint64_t sent, uint64_t received);
/* Tells the peer that this process reads its ring. */
void attached(struct connection *c);
void release(struct connection *c);
bool lock_direction(struct direction *d);
void unlock_direction(struct direction *d);
long give_up(struct connection *c, int fd);
void forget_thread(void);
/* table.c: whether the memory is another process's, which a child of vfork() has. */
bool borrowed(void);

/* What is to be undone of a call that its thread never comes back from: it is cancelled, or the
 * handler of a signal jumps out. Between the two functions the call waits in the kernel. */
struct undo {
	void *kept[4]; /* the C library's */
	int fd;
	struct connection *c;
	struct direction *native, *locked; /* NULL: none */
};

void undo_begin(struct undo *u);
void undo_end(struct undo *u);
#define UNDONE(r, ...)                                                                                       \
	do {                                                                                                 \
		struct undo undo_ = {__VA_ARGS__};                                                           \
		undo_begin(&undo_);                                                                          \
		r;                                                                                           \
		undo_end(&undo_);                                                                            \
	} while (0)

/* A list of buffers, and how far it was used. */
struct buffers {
	const struct iovec *list;
	size_t count, offset; /* in the first one that is left */
	size_t left;          /* bytes of all */
};

bool buffers_of(struct buffers *b, const struct iovec *list, size_t count);
void copy_in(struct buffers *b, const uint8_t *from, size_t n);
void copy_out(struct buffers *b, uint8_t *to, size_t n);
void skip(struct buffers *b, size_t n);
/* Makes a list of what is left, of at most most buffers and limit bytes. */
size_t rest_of(const struct buffers *b, struct iovec *list, size_t most, size_t limit);
/* How many of them a call of the socket itself has at most. */
#define NATIVE_LIST 64

/* send.c, receive.c: as the system calls, but -errno is the result. */
long lanes_send(struct connection *c, int fd, struct buffers *b, int flags);
long lanes_receive(struct connection *c, int fd, struct buffers *b, int flags);
/* Sends by the socket itself what is left. The direction is unlocked meanwhile. */
long send_native(struct connection *c, int fd, struct buffers *b, int flags);
/* Whether a call with these flags does not wait for room. */
bool never_waits(int fd, int flags);
/* Runs what writes to the TCP socket itself. */
long lanes_native(struct connection *c, int fd, long (*f)(void *), void *arg);
void lanes_finish(struct connection *c, int fd);
long lanes_readable(struct connection *c, int fd);
void lanes_settle(struct connection *c, int fd);
/* Tells the writer how much of the stream has been read. */
void say_taken(struct connection *c);
/* Has both directions be TCP's. False: bytes are left in the ring, or on their way, that whoever
 * reads the socket without this library would not get. */
bool lanes_hand_over(struct connection *c, int fd);

/* table.c: what is known of descriptors. */
#define COUNTED ((struct connection *)1)
/* Begins a call that moves bytes: NULL for a descriptor that the library has nothing to do with,
 * COUNTED for one that may get lanes. end_io ends it. */
struct connection *begin_io(int fd);
void end_io(int fd, struct connection *c, long sent, long received);
/* The same for other calls: NULL for all that have no lanes. */
struct connection *use(int fd);
void unuse(struct connection *c);
void opened(int fd, int role);
void stay_with_tcp(int fd);
void closing(int fd);
void closing_range(unsigned first, unsigned last);
/* -EBUSY: the duplicate cannot be. */
long duplicated(int from, int to);
/* Before the process forks: both would count for themselves. Then in the parent, or in the
 * child. */
void forking(void);
void fork_done(void);
void forked(void);
/* Has descriptors that a program which is executed gets be TCP's. -EBUSY: one of its standard
 * streams cannot be. */
long executing(void);
/* Has a descriptor that others may get be TCP's. -EBUSY: it cannot be. */
long handing_over(int fd);

/* ask.c */
long ask_agent(unsigned long magic, long question);
long ask_for_lanes(int fd, int role);

static inline bool failed(long r)
{
	return r < 0 && r >= -4095;
}

/* Makes a system call that gives -errno. */
#define call(...)                                                                                            \
	({                                                                                                   \
		int saved_ = errno;                                                                          \
		long r_ = syscall(__VA_ARGS__);                                                              \
		if (r_ == -1) {                                                                              \
			r_ = -errno;                                                                         \
			errno = saved_;                                                                      \
		}                                                                                            \
		r_;                                                                                          \
	})

/* What a C library does with a system call's result. */
static inline long result(long r)
{
	if (!failed(r))
		return r;
	errno = (int)-r;
	return -1;
}

/* The function of the name that would be called without this library; NULL if it cannot be told. */
void *next_of(const char *name, void *_Atomic *kept);
#define NEXT(name)                                                                                           \
	({                                                                                                   \
		static void *_Atomic kept_;                                                                  \
		(__typeof__(&name))next_of(#name, &kept_);                                                   \
	})

/* The call by that function, or by the kernel. */
#define PLAIN(name, number, ...)                                                                             \
	({                                                                                                   \
		__typeof__(&name) next_ = NEXT(name);                                                        \
		next_ ? next_(__VA_ARGS__)                                                                   \
		      : (__typeof__(next_(__VA_ARGS__)))result(call(number, __VA_ARGS__));                   \
	})

#endif

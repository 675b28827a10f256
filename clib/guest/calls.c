/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The calls that move bytes. What has no lanes, and never had, goes on as it would. */

#define _GNU_SOURCE
#include <stdarg.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>

#include "guest/internal.h"

/* Flags of sends and receives that lanes know. */
#define SEND_FLAGS    (MSG_NOSIGNAL | MSG_DONTWAIT | MSG_MORE | MSG_EOR | MSG_CONFIRM)
#define RECEIVE_FLAGS (MSG_DONTWAIT | MSG_PEEK | MSG_WAITALL | MSG_TRUNC | MSG_NOSIGNAL | MSG_CMSG_CLOEXEC)

static ssize_t receive_list(struct connection *c, int fd, const struct iovec *list, size_t count, int flags)
{
	struct buffers b;

	if (!buffers_of(&b, list, count))
		return result(-EMSGSIZE);
	return b.left ? result(lanes_receive(c, fd, &b, flags)) : 0;
}

static ssize_t send_list(struct connection *c, int fd, const struct iovec *list, size_t count, int flags)
{
	struct buffers b;

	if (!buffers_of(&b, list, count))
		return result(-EMSGSIZE);
	return b.left ? result(lanes_send(c, fd, &b, flags)) : 0;
}

/* Runs a call that lanes know nothing of, with what is counted of it. Urgent bytes are counted
 * otherwise by the two ends, so that nobody can count after them. */
#define HAS_LANES(c) ((c) && (c) != COUNTED)
#define UNKNOWN(fd, c, bad)                                                                                  \
	do {                                                                                                 \
		if (HAS_LANES(c) && (bad))                                                                   \
			lanes_finish(c, fd);                                                                 \
		else if (bad)                                                                                \
			stay_with_tcp(fd);                                                                   \
	} while (0)

#define RECEIVE(fd, list, count, flags, plain)                                                               \
	({                                                                                                   \
		struct connection *c_ = begin_io(fd);                                                        \
		ssize_t r_ = HAS_LANES(c_) && !((flags) & ~RECEIVE_FLAGS)                                    \
		                     ? receive_list(c_, fd, list, count, flags)                              \
		                     : WAITS(fd, c_, plain);                                                 \
		end_io(fd, c_, 0, (flags) & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE) ? 0 : r_);                   \
		r_;                                                                                          \
	})

#define SEND(fd, list, count, flags, plain)                                                                  \
	({                                                                                                   \
		struct connection *c_ = begin_io(fd);                                                        \
		ssize_t r_;                                                                                  \
		UNKNOWN(fd, c_, (flags) & ~SEND_FLAGS);                                                      \
		r_ = HAS_LANES(c_) && !((flags) & ~SEND_FLAGS) ? send_list(c_, fd, list, count, flags)       \
		                                               : WAITS(fd, c_, plain);                       \
		end_io(fd, c_, r_, 0);                                                                       \
		r_;                                                                                          \
	})

/* Makes a call of the C library's, which may wait. No connection: nothing is to be undone. */
#define WAITS(number, connection, plain)                                                                     \
	({                                                                                                   \
		struct undo undo_ = {.fd = (number), .c = (connection)};                                     \
		__typeof__(plain) waited_;                                                                   \
		if (undo_.c)                                                                                 \
			undo_begin(&undo_);                                                                  \
		waited_ = (plain);                                                                           \
		if (undo_.c)                                                                                 \
			undo_end(&undo_);                                                                    \
		waited_;                                                                                     \
	})

#define ONE(at, n) (&(struct iovec){(void *)(at), n})

PUBLIC ssize_t read(int fd, void *to, size_t n)
{
	return RECEIVE(fd, ONE(to, n), 1, 0, PLAIN(read, SYS_read, fd, to, n));
}

PUBLIC ssize_t readv(int fd, const struct iovec *list, int count)
{
	return RECEIVE(fd, list, (size_t)count, 0, PLAIN(readv, SYS_readv, fd, list, count));
}

PUBLIC ssize_t recv(int fd, void *to, size_t n, int flags)
{
	return RECEIVE(fd, ONE(to, n), 1, flags, PLAIN(recvfrom, SYS_recvfrom, fd, to, n, flags, NULL, NULL));
}

PUBLIC ssize_t recvfrom(int fd, void *restrict to, size_t n, int flags, struct sockaddr *restrict from,
                        socklen_t *restrict length)
{
	struct connection *c = begin_io(fd);
	ssize_t r;

	if (HAS_LANES(c) && !(flags & ~RECEIVE_FLAGS)) {
		r = receive_list(c, fd, ONE(to, n), 1, flags);
		if (from && length && r >= 0)
			*length = 0; /* as TCP does */
	} else {
		r = WAITS(fd, c, PLAIN(recvfrom, SYS_recvfrom, fd, to, n, flags, from, length));
	}
	end_io(fd, c, 0, flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE) ? 0 : r);
	return r;
}

PUBLIC ssize_t recvmsg(int fd, struct msghdr *m, int flags)
{
	struct connection *c = begin_io(fd);
	ssize_t r;

	if (HAS_LANES(c) && !(flags & ~RECEIVE_FLAGS)) {
		r = receive_list(c, fd, m->msg_iov, m->msg_iovlen, flags);
		if (r >= 0) {
			m->msg_namelen = 0;
			m->msg_controllen = 0;
			m->msg_flags = 0;
		}
	} else {
		r = WAITS(fd, c, PLAIN(recvmsg, SYS_recvmsg, fd, m, flags));
	}
	end_io(fd, c, 0, flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE) ? 0 : r);
	return r;
}

PUBLIC int recvmmsg(int fd, struct mmsghdr *all, unsigned count, int flags, struct timespec *limit)
{
	struct connection *c = begin_io(fd);
	ssize_t r;

	if (!c) /* of a datagram socket, as a rule */
		return PLAIN(recvmmsg, SYS_recvmmsg, fd, all, count, flags, limit);
	end_io(fd, c, 0, 0);
	if (!count)
		return 0;
	r = recvmsg(fd, &all->msg_hdr, flags & ~MSG_WAITFORONE);
	if (r < 0)
		return -1;
	all->msg_len = (unsigned)r;
	return 1;
}

/* Fortified programs call these, which check a size that the compiler knows. */
extern void __chk_fail(void) __attribute__((noreturn, weak));
#define CHECK(n, size) ((n) > (size) && __chk_fail ? __chk_fail() : (void)0)

PUBLIC ssize_t __read_chk(int fd, void *to, size_t n, size_t size)
{
	CHECK(n, size);
	return read(fd, to, n);
}

PUBLIC ssize_t __recv_chk(int fd, void *to, size_t n, size_t size, int flags)
{
	CHECK(n, size);
	return recv(fd, to, n, flags);
}

PUBLIC ssize_t __recvfrom_chk(int fd, void *restrict to, size_t n, size_t size, int flags,
                              struct sockaddr *restrict from, socklen_t *restrict length)
{
	CHECK(n, size);
	return recvfrom(fd, to, n, flags, from, length);
}

PUBLIC ssize_t write(int fd, const void *from, size_t n)
{
	return SEND(fd, ONE(from, n), 1, 0, PLAIN(write, SYS_write, fd, from, n));
}

PUBLIC ssize_t writev(int fd, const struct iovec *list, int count)
{
	return SEND(fd, list, (size_t)count, 0, PLAIN(writev, SYS_writev, fd, list, count));
}

PUBLIC ssize_t send(int fd, const void *from, size_t n, int flags)
{
	return SEND(fd, ONE(from, n), 1, flags, PLAIN(sendto, SYS_sendto, fd, from, n, flags, NULL, 0));
}

PUBLIC ssize_t sendto(int fd, const void *from, size_t n, int flags, const struct sockaddr *to,
                      socklen_t length)
{
	/* Of a socket that is no connection's yet: MSG_FASTOPEN. */
	return SEND(fd, ONE(from, n), 1, flags, PLAIN(sendto, SYS_sendto, fd, from, n, flags, to, length));
}

/* What is passed on is TCP's for whoever gets it. */
static bool passes_on(const struct msghdr *m)
{
	struct msghdr copy = *m;
	struct cmsghdr *h;

	if (!m->msg_control || m->msg_controllen < sizeof(*h))
		return true;
	for (h = CMSG_FIRSTHDR(&copy); h; h = CMSG_NXTHDR(&copy, h)) {
		size_t bytes = h->cmsg_len > CMSG_LEN(0) ? h->cmsg_len - CMSG_LEN(0) : 0;
		int fd;

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i + sizeof(fd) <= bytes; i += sizeof(fd)) {
			memcpy(&fd, CMSG_DATA(h) + i, sizeof(fd));
			if (handing_over(fd))
				return false;
		}
	}
	return true;
}

PUBLIC ssize_t sendmsg(int fd, const struct msghdr *m, int flags)
{
	struct connection *c = begin_io(fd);
	ssize_t r;

	if (!c && !passes_on(m))
		return result(-EBUSY);
	/* Control messages are about how TCP sends. */
	UNKNOWN(fd, c, flags & ~SEND_FLAGS || (c && m->msg_controllen));
	if (HAS_LANES(c) && !(flags & ~SEND_FLAGS) && !m->msg_controllen)
		r = send_list(c, fd, m->msg_iov, m->msg_iovlen, flags);
	else
		r = WAITS(fd, c, PLAIN(sendmsg, SYS_sendmsg, fd, m, flags));
	end_io(fd, c, r, 0);
	return r;
}

PUBLIC int sendmmsg(int fd, struct mmsghdr *all, unsigned count, int flags)
{
	struct connection *c = begin_io(fd);
	unsigned sent;

	if (!c) {
		for (sent = 0; sent < count; sent++)
			if (!passes_on(&all[sent].msg_hdr))
				return (int)result(-EBUSY);
		return PLAIN(sendmmsg, SYS_sendmmsg, fd, all, count, flags);
	}
	end_io(fd, c, 0, 0);
	for (sent = 0; sent < count; sent++) {
		ssize_t r = sendmsg(fd, &all[sent].msg_hdr, flags);

		if (r < 0)
			return sent ? (int)sent : -1;
		all[sent].msg_len = (unsigned)r;
	}
	return (int)sent;
}

struct file_to_socket {
	int out, in;
	off_t *offset;
	size_t count;
};

static long send_file(void *arg)
{
	struct file_to_socket *s = arg;
	ssize_t r = PLAIN(sendfile, SYS_sendfile, s->out, s->in, s->offset, s->count);

	return r < 0 ? -errno : r;
}

PUBLIC ssize_t sendfile(int out, int in, off_t *offset, size_t count)
{
	struct connection *c = begin_io(out);
	struct file_to_socket s = {out, in, offset, count};
	ssize_t r = result(HAS_LANES(c) ? lanes_native(c, out, send_file, &s) : WAITS(out, c, send_file(&s)));

	end_io(out, c, r, 0);
	return r;
}

PUBLIC ssize_t sendfile64(int out, int in, off64_t *offset, size_t count)
{
	return sendfile(out, in, offset, count);
}

struct spliced {
	int in, out;
	off64_t *in_at, *out_at;
	size_t count;
	unsigned flags;
};

static long splice_native(void *arg)
{
	struct spliced *s = arg;
	ssize_t r = PLAIN(splice, SYS_splice, s->in, s->in_at, s->out, s->out_at, s->count, s->flags);

	return r < 0 ? -errno : r;
}

/* Out of lanes into a pipe: what the pipe takes is taken out. One reader at a time, as splice()
 * wants of its pipe, too. */
static long splice_out(struct connection *c, struct spliced *s)
{
	char bytes[16384];
	struct iovec list = {bytes, s->count < sizeof(bytes) ? s->count : sizeof(bytes)};
	int flags = s->flags & 2 /* SPLICE_F_NONBLOCK */ ? MSG_DONTWAIT : 0;
	struct pollfd room = {s->out, POLLOUT, 0};
	struct buffers b;
	long r;

	if (flags) {
		/* A pipe that can be written takes a page. */
		if (call(SYS_ppoll, &room, 1UL, &(struct timespec){0, 0}, NULL, 8UL) != 1)
			return -EAGAIN;
		if (list.iov_len > PIPE_BUF)
			list.iov_len = PIPE_BUF;
	}
	buffers_of(&b, &list, 1);
	r = lanes_receive(c, s->in, &b, MSG_PEEK | flags);
	if (r <= 0)
		return r;
	r = WAITS(s->in, c, PLAIN(write, SYS_write, s->out, bytes, (size_t)r));
	if (r < 0)
		return -errno;
	list.iov_len = (size_t)r;
	buffers_of(&b, &list, 1);
	return lanes_receive(c, s->in, &b, MSG_TRUNC | MSG_DONTWAIT);
}

PUBLIC ssize_t splice(int in, off64_t *in_at, int out, off64_t *out_at, size_t count, unsigned flags)
{
	struct connection *from = begin_io(in), *to = begin_io(out);
	struct spliced s = {in, out, in_at, out_at, count, flags};
	ssize_t r;

	if (HAS_LANES(from))
		r = count ? splice_out(from, &s) : 0;
	else
		r = HAS_LANES(to) ? lanes_native(to, out, splice_native, &s)
		                  : WAITS(from ? in : out, from ? from : to, splice_native(&s));
	r = result(r);
	end_io(in, from, 0, r);
	end_io(out, to, r, 0);
	return r;
}

/* The C library's own writes to a descriptor are not seen here. */
PUBLIC int vdprintf(int fd, const char *format, va_list args)
{
	char *text = NULL;
	int n = vasprintf(&text, format, args);

	if (n < 0)
		return -1;
	for (int at = 0; at < n;) {
		ssize_t r = write(fd, text + at, (size_t)(n - at));

		if (r < 0 && errno != EINTR) {
			n = -1;
			break;
		}
		at += r > 0 ? (int)r : 0;
	}
	free(text);
	return n;
}

PUBLIC int dprintf(int fd, const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vdprintf(fd, format, args);
	va_end(args);
	return n;
}

PUBLIC int __vdprintf_chk(int fd, int flag, const char *format, va_list args)
{
	(void)flag;
	return vdprintf(fd, format, args);
}

PUBLIC int __dprintf_chk(int fd, int flag, const char *format, ...)
{
	va_list args;
	int n;

	(void)flag;
	va_start(args, format);
	n = vdprintf(fd, format, args);
	va_end(args);
	return n;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The calls by which descriptors come, go and are asked about. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include "guest/queues.h"

/* TLS by the kernel, which older headers lack: it encrypts from TLS_TX and TLS_RX on. TCP_ULP
 * does nothing yet, and OpenSSL asks for it whether or not it will use it. */
#define SOL_TLS 282
#define TLS_TX  1
#define TLS_RX  2

PUBLIC int connect(int fd, const struct sockaddr *to, socklen_t length)
{
	int r = PLAIN(connect, SYS_connect, fd, to, length), e = errno;
	int family = to && length >= sizeof(to->sa_family) ? to->sa_family : AF_UNSPEC;

	if ((r == 0 || e == EINPROGRESS || e == EINTR) && (family == AF_INET || family == AF_INET6))
		opened(fd, 0);
	else if (r == 0)
		closing(fd); /* it is not connected any more, or to something else */
	errno = e;
	return r;
}

/* A descriptor of another family is counted, and never asked for: it has no TCP_INFO. */
static int accepted(int fd)
{
	int e = errno, domain = 0;
	socklen_t length = sizeof(domain);

	if (fd >= 0 && !failed(call(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &length)) &&
	    (domain == AF_INET || domain == AF_INET6))
		opened(fd, 1);
	errno = e;
	return fd;
}

PUBLIC int accept(int fd, struct sockaddr *restrict from, socklen_t *restrict length)
{
	return accepted(PLAIN(accept, SYS_accept, fd, from, length));
}

PUBLIC int accept4(int fd, struct sockaddr *restrict from, socklen_t *restrict length, int flags)
{
	return accepted(PLAIN(accept4, SYS_accept4, fd, from, length, flags));
}

PUBLIC int close(int fd)
{
	closing(fd);
	return PLAIN(close, SYS_close, fd);
}

PUBLIC int close_range(unsigned first, unsigned last, int flags)
{
	if (!(flags & 4 /* CLOSE_RANGE_CLOEXEC */))
		closing_range(first, last);
	return (int)result(call(SYS_close_range, first, last, flags));
}

PUBLIC void closefrom(int first)
{
	void (*next)(int) = NEXT(closefrom);

	closing_range(first < 0 ? 0 : (unsigned)first, UINT_MAX);
	if (next)
		next(first);
	else
		call(SYS_close_range, first < 0 ? 0 : first, UINT_MAX, 0);
}

/* A duplicate that cannot be is none. */
static int made(int fd, int duplicate)
{
	long r = duplicate < 0 ? 0 : duplicated(fd, duplicate);

	if (!r)
		return duplicate;
	call(SYS_close, duplicate);
	return (int)result(r);
}

PUBLIC int dup(int fd)
{
	return made(fd, PLAIN(dup, SYS_dup, fd));
}

PUBLIC int dup3(int fd, int to, int flags)
{
	/* What there is of a descriptor stays if the call would fail. */
	if (fd != to && !(flags & ~O_CLOEXEC) && !failed(call(SYS_fcntl, fd, F_GETFD)))
		closing(to);
	return made(fd, (int)result(call(SYS_dup3, fd, to, flags)));
}

PUBLIC int dup2(int fd, int to)
{
	if (fd == to)
		return (int)result(call(SYS_fcntl, fd, F_GETFD)) < 0 ? -1 : fd;
	return dup3(fd, to, 0);
}

static int control(int fd, int what, void *arg)
{
	int r = (int)result(call(SYS_fcntl, fd, what, arg));

	return what == F_DUPFD || what == F_DUPFD_CLOEXEC ? made(fd, r) : r;
}

#define VARIADIC(f, fd, what)                                                                                \
	({                                                                                                   \
		va_list args_;                                                                               \
		void *arg_;                                                                                  \
		va_start(args_, what);                                                                       \
		arg_ = va_arg(args_, void *);                                                                \
		va_end(args_);                                                                               \
		f(fd, what, arg_);                                                                           \
	})

/* File locks wait: what is not about duplicates goes on as it would. */
static int controlled(int fd, int what, void *arg, int (*next)(int, int, ...))
{
	if (!next || what == F_DUPFD || what == F_DUPFD_CLOEXEC)
		return control(fd, what, arg);
	return next(fd, what, arg);
}

static int fcntl_arg(int fd, int what, void *arg)
{
	return controlled(fd, what, arg, NEXT(fcntl));
}

PUBLIC int fcntl(int fd, int what, ...)
{
	return VARIADIC(fcntl_arg, fd, what);
}

extern int fcntl64(int, int, ...);

static int fcntl64_arg(int fd, int what, void *arg)
{
	return controlled(fd, what, arg, NEXT(fcntl64));
}

PUBLIC int fcntl64(int fd, int what, ...)
{
	return VARIADIC(fcntl64_arg, fd, what);
}

static int ioctl_arg(int fd, unsigned long what, void *arg)
{
	struct connection *c = what == FIONREAD ? use(fd) : NULL;
	long r;

	if (!c)
		return PLAIN(ioctl, SYS_ioctl, fd, what, arg);
	r = lanes_readable(c, fd);
	unuse(c);
	if (failed(r))
		return (int)result(r);
	*(int *)arg = (int)(r > INT_MAX ? INT_MAX : r);
	return 0;
}

PUBLIC int ioctl(int fd, unsigned long what, ...)
{
	return VARIADIC(ioctl_arg, fd, what);
}

PUBLIC int shutdown(int fd, int how)
{
	struct connection *c = how == SHUT_RD ? NULL : use(fd);
	long r;

	if (c && c->stream) {
		r = queue_shutdown(c, fd, how);
		unuse(c);
		return (int)result(r);
	}
	if (c) {
		lanes_finish(c, fd);
		unuse(c);
	}
	return PLAIN(shutdown, SYS_shutdown, fd, how);
}

PUBLIC int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	struct connection *c = use(fd);
	bool by_queues = c && c->stream;

	if (c)
		unuse(c);
	if (c && !by_queues && level == IPPROTO_TCP && (name == TCP_NODELAY || name == TCP_CORK) &&
	    length >= sizeof(int))
		return 0; /* doorbells want their own */
	/* A doorbell is one byte. */
	if (!by_queues && level == SOL_SOCKET && name == SO_RCVLOWAT && length >= sizeof(int) &&
	    *(const int *)value > 1 && handing_over(fd))
		return (int)result(-EBUSY);
	/* From here on the kernel encrypts what goes by TCP, and that alone. */
	if (level == SOL_TLS && (name == TLS_TX || name == TLS_RX) && handing_over(fd))
		return (int)result(-EBUSY);
	return PLAIN(setsockopt, SYS_setsockopt, fd, level, name, value, length);
}

/* What the kernel has told the service of queues it tells nobody else. */
PUBLIC int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict length)
{
	struct connection *c = level == SOL_SOCKET && name == SO_ERROR ? use(fd) : NULL;
	int r = PLAIN(getsockopt, SYS_getsockopt, fd, level, name, value, length);

	if (c && c->stream && r == 0 && *length == sizeof(int) && *(int *)value == 0)
		*(int *)value = queue_error(c);
	if (c)
		unuse(c);
	return r;
}

/* The C library reads and writes a stream by calls that are not seen here. */
PUBLIC FILE *fdopen(int fd, const char *mode)
{
	FILE *(*next)(int, const char *) = NEXT(fdopen);
	long r = next ? handing_over(fd) : -ENOSYS;

	if (r) {
		result(r);
		return NULL;
	}
	closing(fd); /* the stream closes it unseen, and the number may be a file's next */
	return next(fd, mode);
}

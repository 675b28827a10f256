/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* libheddle-machine.so: preloaded into the programs of a virtual machine without a network device,
 * it gives them TCP sockets of `heddle-machine guest`, which are one end of a socket pair each:
 * bytes, poll(), epoll, dup, fork, exec and SCM_RIGHTS are the kernel's, and only calls about
 * addresses and options come here. Nothing is kept of a socket: whoever has the descriptor shows it
 * to the guest.
 * docs/architecture/machines.md. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "machine/protocol.h"

#define QUEUES_LAYOUT_ONLY
#include "stack/queues.h"

#define PUBLIC __attribute__((visibility("default")))

static int fail(int error)
{
	errno = error;
	return -1;
}

static int connect_guest(void)
{
	const char *path = getenv("HEDDLE_MACHINE_SOCKET");
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	if (!path)
		path = MACHINE_SOCKET_PATH;
	strncpy(to.sun_path, path, sizeof(to.sun_path) - 1);
	if (syscall(SYS_connect, fd, &to, sizeof(to)) == 0)
		return fd;
	syscall(SYS_close, fd);
	return fail(ENETDOWN); /* nobody here knows the way out */
}

union control {
	struct cmsghdr head;
	char bytes[CMSG_SPACE(sizeof(int))];
};

/* Sends a message, with a descriptor unless it is -1. */
static ssize_t send_with(int to, void *data, size_t length, int fd)
{
	union control c = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
	struct iovec list = {data, length};
	struct msghdr m = {.msg_iov = &list, .msg_iovlen = 1};

	if (fd >= 0) {
		memcpy(CMSG_DATA(&c.head), &fd, sizeof(fd));
		m.msg_control = &c;
		m.msg_controllen = sizeof(c);
	}
	return syscall(SYS_sendmsg, to, &m, MSG_NOSIGNAL);
}

/* Receives a message, and the descriptor that comes with it, or -1. */
static ssize_t receive_with(int from, void *data, size_t length, int flags, int *fd)
{
	union control c = {0};
	struct iovec list = {data, length};
	struct msghdr m = {.msg_iov = &list, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof(c)};
	ssize_t r = syscall(SYS_recvmsg, from, &m, flags);

	*fd = -1;
	if (r > 0 && m.msg_controllen >= sizeof(c.head) && c.head.cmsg_type == SCM_RIGHTS)
		memcpy(fd, CMSG_DATA(&c.head), sizeof(*fd));
	return r;
}

/* Asks the guest. Gives 0 or -1; what it refuses is in the answer, too. */
static int ask(struct machine_request *q, int fd, struct machine_answer *a, int *given)
{
	int guest = connect_guest(), got = -1;
	ssize_t r;

	if (guest < 0)
		return -1;
	r = send_with(guest, q, sizeof(*q), fd);
	if (r >= 0)
		r = receive_with(guest, a, sizeof(*a), MSG_CMSG_CLOEXEC, &got);
	/* A guest that ends meanwhile is none. */
	int error = r == sizeof(*a) ? a->error : r < 0 && errno == EINTR ? EINTR : ENETDOWN;
	syscall(SYS_close, guest);
	if (given)
		*given = got;
	else if (got >= 0)
		syscall(SYS_close, got);
	return error ? fail(error) : 0;
}

static int option(int fd, int name)
{
	int value = -1;
	socklen_t length = sizeof(value);

	return syscall(SYS_getsockopt, fd, SOL_SOCKET, name, &value, &length) == 0 ? value : -1;
}

/* Whether a descriptor may be one of ours: an end of a pair of stream sockets. */
static bool may_be_ours(int fd)
{
	struct sockaddr_un name;
	socklen_t length = sizeof(name);
	int saved = errno;
	bool is = option(fd, SO_DOMAIN) == AF_UNIX && option(fd, SO_TYPE) == SOCK_STREAM &&
	          syscall(SYS_getsockname, fd, &name, &length) == 0 && length == sizeof(sa_family_t);

	errno = saved;
	return is;
}

/* What the guest knows of a descriptor; false: nothing. */
static bool known(int fd, struct machine_answer *a)
{
	struct machine_request q = {.type = MACHINE_NAMES};
	int saved = errno;
	bool is = may_be_ours(fd) && ask(&q, fd, a, NULL) == 0;

	errno = saved;
	return is;
}

PUBLIC int socket(int domain, int type, int protocol)
{
	struct machine_request q = {.type = MACHINE_SOCKET, .family = domain == AF_INET6 ? 6 : 4};
	struct machine_answer a;
	int fd;

	if ((domain != AF_INET && domain != AF_INET6) || (type & 0xf) != SOCK_STREAM ||
	    (protocol && protocol != IPPROTO_TCP))
		return (int)syscall(SYS_socket, domain, type, protocol);
	if (ask(&q, -1, &a, &fd) < 0)
		return -1;
	if (fd < 0)
		return fail(EMFILE);
	if (type & SOCK_NONBLOCK)
		syscall(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
	if (!(type & SOCK_CLOEXEC))
		syscall(SYS_fcntl, fd, F_SETFD, 0);
	return fd;
}

/* Puts an address into a request. Gives 0 or an errno. */
static int address_of(struct machine_request *q, const struct sockaddr *at, socklen_t length, uint32_t family)
{
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;

	if (length < sizeof(v4))
		return EINVAL;
	if (at->sa_family == AF_INET && family == 4) {
		memcpy(&v4, at, sizeof(v4));
		memset(q->address + 10, 0xff, 2);
		memcpy(q->address + 12, &v4.sin_addr, 4);
		q->port = ntohs(v4.sin_port);
		return 0;
	}
	if (at->sa_family != AF_INET6 || family != 6)
		return EAFNOSUPPORT;
	if (length < sizeof(v6))
		return EINVAL;
	memcpy(&v6, at, sizeof(v6));
	memcpy(q->address, &v6.sin6_addr, 16);
	q->port = ntohs(v6.sin6_port);
	return 0;
}

/* Gives a program an address, as the kernel does. */
static int give_address(const uint8_t address[16], uint16_t port, uint32_t family, struct sockaddr *to,
                        socklen_t *length)
{
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	const void *from = &v6;
	socklen_t size = sizeof(v6), room;

	if (!length)
		return fail(EFAULT);
	memcpy(&v6.sin6_addr, address, 16);
	if (family == 4) {
		memcpy(&v4.sin_addr, address + 12, 4);
		from = &v4;
		size = sizeof(v4);
	}
	room = *length;
	if ((int)room < 0)
		return fail(EINVAL);
	memcpy(to, from, room < size ? room : size);
	*length = size;
	return 0;
}

PUBLIC int bind(int fd, const struct sockaddr *at, socklen_t length)
{
	struct machine_request q = {.type = MACHINE_BIND};
	struct machine_answer a;
	int error;

	if (!at || length < sizeof(sa_family_t) || at->sa_family == AF_UNIX || !known(fd, &a))
		return (int)syscall(SYS_bind, fd, at, length);
	error = address_of(&q, at, length, a.family);
	return error ? fail(error) : ask(&q, fd, &a, NULL);
}

PUBLIC int listen(int fd, int backlog)
{
	struct machine_request q = {.type = MACHINE_LISTEN, .value = backlog < 0 ? 4096 : (uint32_t)backlog};
	struct machine_answer a;

	return known(fd, &a) ? ask(&q, fd, &a, NULL) : (int)syscall(SYS_listen, fd, backlog);
}

/* Fills the socket, so that it is not writable before the connect is done; or puts one byte into
 * it, by which the guest has the program see a reset if it must. Says how many bytes. */
static uint32_t fill(int fd, bool all)
{
	static const char bytes[4096];
	uint32_t count = 0;
	long r;

	do {
		r = syscall(SYS_sendto, fd, bytes, all ? sizeof(bytes) : 1UL, MSG_DONTWAIT | MSG_NOSIGNAL,
		            NULL, 0);
		count += r > 0 ? (uint32_t)r : 0;
	} while (r > 0 && all);
	return count;
}

PUBLIC int connect(int fd, const struct sockaddr *to, socklen_t length)
{
	struct machine_request q = {.type = MACHINE_GET, .option = MACHINE_ERROR};
	struct machine_answer a;
	int error;

	if (!to || length < sizeof(sa_family_t) || to->sa_family == AF_UNIX || !may_be_ours(fd) ||
	    ask(&q, fd, &a, NULL) < 0)
		return (int)syscall(SYS_connect, fd, to, length);
	if (a.value)
		return fail((int)a.value); /* of a connect before */
	q = (struct machine_request){.type = MACHINE_CONNECT};
	error = address_of(&q, to, length, a.family);
	if (error)
		return fail(error);
	if (a.state == MACHINE_FRESH || a.state == MACHINE_BOUND) {
		bool waits = !(syscall(SYS_fcntl, fd, F_GETFL) & O_NONBLOCK);

		q.flags = waits ? 0 : MACHINE_NO_WAIT;
		q.value = fill(fd, !waits);
		if (!q.value)
			return fail(ECONNABORTED); /* it was tried before, without waiting */
	}
	return ask(&q, fd, &a, NULL);
}

PUBLIC int accept4(int fd, struct sockaddr *restrict from, socklen_t *restrict length, int flags)
{
	struct machine_accepted told;
	struct machine_answer a;
	int got;
	ssize_t r;

	if (!known(fd, &a))
		return (int)syscall(SYS_accept4, fd, from, length, flags);
	if (a.state != MACHINE_LISTENS || flags & ~(SOCK_NONBLOCK | SOCK_CLOEXEC))
		return fail(EINVAL);
	r = receive_with(fd, &told, sizeof(told), MSG_CMSG_CLOEXEC, &got);
	if (r < 0)
		return -1;
	if (got < 0)
		return fail(r ? EMFILE : EINVAL);
	if (flags & SOCK_NONBLOCK)
		syscall(SYS_fcntl, got, F_SETFL, O_RDWR | O_NONBLOCK);
	if (!(flags & SOCK_CLOEXEC))
		syscall(SYS_fcntl, got, F_SETFD, 0);
	if (from)
		give_address(told.remote, told.remote_port, a.family, from, length);
	return got;
}

PUBLIC int accept(int fd, struct sockaddr *restrict from, socklen_t *restrict length)
{
	return accept4(fd, from, length, 0);
}

PUBLIC int getsockname(int fd, struct sockaddr *restrict to, socklen_t *restrict length)
{
	struct machine_answer a;

	if (!known(fd, &a))
		return (int)syscall(SYS_getsockname, fd, to, length);
	return give_address(a.local, a.local_port, a.family, to, length);
}

PUBLIC int getpeername(int fd, struct sockaddr *restrict to, socklen_t *restrict length)
{
	struct machine_answer a;

	if (!known(fd, &a))
		return (int)syscall(SYS_getpeername, fd, to, length);
	if (a.state != MACHINE_CONNECTED)
		return fail(ENOTCONN);
	return give_address(a.remote, a.remote_port, a.family, to, length);
}

/* The service's number of an option, or 0. */
static uint16_t number_of(int level, int name)
{
	static const struct {
		int level, name;
		uint16_t number;
	} all[] = {
	        {SOL_SOCKET, SO_REUSEADDR, QUEUES_OPTION_REUSE_ADDRESS},
	        {SOL_SOCKET, SO_REUSEPORT, QUEUES_OPTION_REUSE_PORT},
	        {SOL_SOCKET, SO_KEEPALIVE, QUEUES_OPTION_KEEPALIVE},
	        {IPPROTO_IPV6, IPV6_V6ONLY, QUEUES_OPTION_V6_ONLY},
	        {IPPROTO_TCP, TCP_NODELAY, QUEUES_OPTION_NO_DELAY},
	        {IPPROTO_TCP, TCP_KEEPIDLE, QUEUES_OPTION_KEEPALIVE_IDLE},
	        {IPPROTO_TCP, TCP_KEEPINTVL, QUEUES_OPTION_KEEPALIVE_INTERVAL},
	        {IPPROTO_TCP, TCP_KEEPCNT, QUEUES_OPTION_KEEPALIVE_COUNT},
	        {IPPROTO_TCP, TCP_USER_TIMEOUT, QUEUES_OPTION_USER_TIMEOUT},
	};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
		if (all[i].level == level && all[i].name == name)
			return all[i].number;
	return 0;
}

/* Options of packets that mean nothing here: taken, as by a kernel that has no use for them. */
static bool means_nothing(int level, int name)
{
	return (level == IPPROTO_IP && (name == IP_TOS || name == IP_TTL)) ||
	       (level == IPPROTO_IPV6 && (name == IPV6_TCLASS || name == IPV6_UNICAST_HOPS)) ||
	       (level == IPPROTO_TCP && (name == TCP_CORK || name == TCP_QUICKACK));
}

PUBLIC int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
	struct machine_request q = {.type = MACHINE_SET, .option = number_of(level, name)};
	struct machine_answer a;
	bool lingers = level == SOL_SOCKET && name == SO_LINGER;

	if ((level == SOL_SOCKET && !q.option && !lingers) || !known(fd, &a))
		return (int)syscall(SYS_setsockopt, fd, level, name, value, length);
	if (means_nothing(level, name))
		return 0;
	if (!q.option && !lingers)
		return fail(ENOPROTOOPT);
	if (length < (lingers ? sizeof(struct linger) : sizeof(int)))
		return fail(EINVAL);
	if (lingers) {
		const struct linger *l = value;

		q.option = QUEUES_OPTION_LINGER;
		q.value = l->l_onoff ? (uint32_t)l->l_linger : QUEUES_LINGER_OFF;
	} else {
		memcpy(&q.value, value, sizeof(q.value));
	}
	return ask(&q, fd, &a, NULL);
}

static int give_number(int number, void *value, socklen_t *length)
{
	socklen_t size = *length < sizeof(number) ? *length : sizeof(number);

	memcpy(value, &number, size);
	*length = size;
	return 0;
}

/* What the guest says of an option of the socket layer; -1: the pair says it. */
static long socket_option(int fd, int name, const struct machine_answer *a)
{
	struct machine_request q = {.type = MACHINE_GET, .option = MACHINE_ERROR};
	struct machine_answer error;

	switch (name) {
	case SO_DOMAIN:
		return a->family == 6 ? AF_INET6 : AF_INET;
	case SO_PROTOCOL:
		return IPPROTO_TCP;
	case SO_ACCEPTCONN:
		return a->state == MACHINE_LISTENS;
	case SO_ERROR:
		return ask(&q, fd, &error, NULL) == 0 && error.value ? (long)error.value : -1;
	default:
		return -1;
	}
}

PUBLIC int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict length)
{
	struct machine_request q = {.type = MACHINE_GET, .option = number_of(level, name)};
	struct machine_answer a;

	if (!known(fd, &a))
		return (int)syscall(SYS_getsockopt, fd, level, name, value, length);
	if (level == SOL_SOCKET && !q.option) {
		long number = socket_option(fd, name, &a);

		if (number < 0)
			return (int)syscall(SYS_getsockopt, fd, level, name, value, length);
		return give_number((int)number, value, length);
	}
	if (means_nothing(level, name))
		return give_number(0, value, length);
	if (!q.option)
		return fail(ENOPROTOOPT);
	return ask(&q, fd, &a, NULL) < 0 ? -1 : give_number((int)a.value, value, length);
}

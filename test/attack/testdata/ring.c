/* Does by io_uring what hooks refuse or change when it is done by system calls, on sockets that
 * socket() gave: "ring NODE-ADDRESS PORT" prints one line for each call. Without arguments, which
 * of the operations the kernel has: to be asked of sockets that no hook sees. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../sockets/testdata/ring.h"

#define OP_URING_CMD     46
#define OP_BIND          56
#define SOCKET_SETSOCKOPT 3 /* SOCKET_URING_OP_SETSOCKOPT */

static void say(const char *what, int result)
{
	printf("%s: %s\n", what, result < 0 ? strerror(-result) : "ok");
}

/* setsockopt() as a command of the socket's file. */
static int set_option(int fd, int level, int name, const void *value, unsigned len)
{
	unsigned tail = *ring.sq_tail, index = tail & *ring.sq_mask;
	struct io_uring_sqe *s = &ring.sqes[index];
	int got;

	memset(s, 0, sizeof(*s));
	s->opcode = OP_URING_CMD;
	s->fd = fd;
	s->off = SOCKET_SETSOCKOPT; /* cmd_op */
	s->addr = level | (unsigned long)name << 32;
	s->file_index = len; /* optlen */
	((unsigned long *)s)[6] = (unsigned long)value; /* optval */
	ring.sq_array[index] = index;
	__atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring.fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
		die("io_uring_enter");
	got = ring.cqes[*ring.cq_head & *ring.cq_mask].res;
	__atomic_store_n(ring.cq_head, *ring.cq_head + 1, __ATOMIC_RELEASE);
	return got;
}

int main(int argc, char **argv)
{
	struct sockaddr_in node = {.sin_family = AF_INET}, loopback = {.sin_family = AF_INET};
	int fd, one = 1;

	loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (argc == 1) {
		setup();
		fd = socket(AF_INET, SOCK_STREAM, 0);
		say("setsockopt", set_option(fd, IPPROTO_TCP, 1 /* TCP_NODELAY */, &one, sizeof(one)));
		say("bind", go(OP_BIND, fd, &loopback, 0, sizeof(loopback)));
		return 0;
	}
	if (argc != 3 || inet_pton(AF_INET, argv[1], &node.sin_addr) != 1)
		return 2;
	setup();
	fd = socket(AF_INET, SOCK_STREAM, 0);
	say("bind an address of the node", go(OP_BIND, fd, &node, 0, sizeof(node)));
	loopback.sin_port = htons(atoi(argv[2]));
	fd = socket(AF_INET, SOCK_STREAM, 0);
	say("connect to the node's wildcard", go(IORING_OP_CONNECT, fd, &loopback, 0, sizeof(loopback)));
	fd = socket(AF_INET, SOCK_STREAM, 0);
	say("TCP_REPAIR", set_option(fd, IPPROTO_TCP, 19, &one, sizeof(one)));
	say("IP_OPTIONS", set_option(fd, IPPROTO_IP, IP_OPTIONS, "\1\1\1", 4));
	return 0;
}

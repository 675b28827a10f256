/* TCP through io_uring, by raw system calls: socket, connect, accept, send and receive. "ring serve PORT" echoes one
 * message a connection; "ring ADDRESS PORT plain" makes its socket with socket(), "ring ADDRESS PORT ring" with
 * IORING_OP_SOCKET, which no seccomp filter sees. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
	int fd;
	unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
} ring;

static void die(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(1);
}

static void *map(size_t size, off_t what)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, what);

	if (p == MAP_FAILED)
		die("mmap");
	return p;
}

static void setup(void)
{
	struct io_uring_params p = {0};
	char *sq, *cq;

	ring.fd = syscall(SYS_io_uring_setup, 8, &p);
	if (ring.fd < 0)
		die("io_uring_setup");
	sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
	cq = map(p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
	ring.sqes = map(p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
	ring.sq_tail = (unsigned *)(sq + p.sq_off.tail);
	ring.sq_mask = (unsigned *)(sq + p.sq_off.ring_mask);
	ring.sq_array = (unsigned *)(sq + p.sq_off.array);
	ring.cq_head = (unsigned *)(cq + p.cq_off.head);
	ring.cq_tail = (unsigned *)(cq + p.cq_off.tail);
	ring.cq_mask = (unsigned *)(cq + p.cq_off.ring_mask);
	ring.cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
}

/* Submits one operation and gives its result. */
static int go(int op, int fd, const void *addr, unsigned len, unsigned long off)
{
	unsigned tail = *ring.sq_tail, at = tail & *ring.sq_mask;
	struct io_uring_sqe *sqe = &ring.sqes[at];
	int res;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = op;
	sqe->fd = fd;
	sqe->addr = (unsigned long)addr;
	sqe->len = len;
	sqe->off = off;
	ring.sq_array[at] = at;
	__atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring.fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
		die("io_uring_enter");
	while (__atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) == *ring.cq_head)
		;
	res = ring.cqes[*ring.cq_head & *ring.cq_mask].res;
	__atomic_store_n(ring.cq_head, *ring.cq_head + 1, __ATOMIC_RELEASE);
	return res;
}

static void serve(int port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	int l = socket(AF_INET, SOCK_STREAM, 0), fd, n;
	char buf[64];

	if (bind(l, (void *)&a, sizeof(a)) || listen(l, 8))
		die("listen");
	printf("ready\n");
	fflush(stdout);
	while ((fd = go(IORING_OP_ACCEPT, l, NULL, 0, 0)) >= 0) {
		n = go(IORING_OP_RECV, fd, buf, sizeof(buf), 0);
		if (n > 0)
			go(IORING_OP_SEND, fd, buf, n, 0);
		go(IORING_OP_CLOSE, fd, NULL, 0, 0);
	}
	errno = -fd;
	die("accept");
}

static void show(int fd, const char *what, int (*name)(int, struct sockaddr *, socklen_t *), int port)
{
	struct sockaddr_in a;
	socklen_t len = sizeof(a);

	if (name(fd, (void *)&a, &len))
		die(what);
	printf("%s %s%s\n", what, inet_ntoa(a.sin_addr), port && ntohs(a.sin_port) != port ? " and another port" : "");
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = {.sin_family = AF_INET};
	char buf[64] = "";
	int fd, r;

	if (argc < 3)
		return 2;
	setup();
	if (!strcmp(argv[1], "serve"))
		serve(atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &a.sin_addr);
	a.sin_port = htons(atoi(argv[2]));
	fd = argc > 3 && !strcmp(argv[3], "ring") ? go(IORING_OP_SOCKET, AF_INET, NULL, 0, SOCK_STREAM)
						   : socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0)
		die("socket");
	r = go(IORING_OP_CONNECT, fd, &a, 0, sizeof(a));
	printf("connect %d\n", r);
	printf("send %d\n", go(IORING_OP_SEND, fd, "hello", 5, 0));
	printf("recv %d %s\n", go(IORING_OP_RECV, fd, buf, sizeof(buf) - 1, 0), buf);
	show(fd, "own", getsockname, 0);
	show(fd, "peer", getpeername, ntohs(a.sin_port));
	fd = socket(AF_INET, SOCK_STREAM, 0);
	a.sin_port = htons(9);
	printf("refused %d\n", go(IORING_OP_CONNECT, fd, &a, 0, sizeof(a)));
	return 0;
}

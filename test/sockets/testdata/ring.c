/* TCP through io_uring, by raw system calls: socket, connect, accept, send and receive. "ring serve
 * PORT" echoes one message a connection; "ring ADDRESS PORT plain" makes its socket with socket(),
 * "ring ADDRESS PORT ring" with IORING_OP_SOCKET, which no seccomp filter sees. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ring.h"

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

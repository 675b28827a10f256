/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What tests of the guest library have in common: how they fail, and a connection. */
#ifndef HEDDLE_TEST_PAIR_H
#define HEDDLE_TEST_PAIR_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			printf("%s:%d: %s, errno %d\n", __FILE__, __LINE__, #condition, errno);              \
			fflush(stdout);                                                                      \
			_exit(1);                                                                            \
		}                                                                                            \
	} while (0)

static void connected_pair(int fds[2])
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(a);
	int l = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(l >= 0 && bind(l, (void *)&a, sizeof(a)) == 0 && listen(l, 1) == 0 &&
	      getsockname(l, (void *)&a, &length) == 0);
	fds[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(fds[0], (void *)&a, sizeof(a)) == 0);
	fds[1] = accept(l, NULL, NULL);
	CHECK(fds[1] >= 0);
	close(l);
}

#endif

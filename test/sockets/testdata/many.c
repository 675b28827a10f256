/* Many connections at once. As a server: PROCESSES processes, each with a listener of its own at
 * PORT, that send back what they get. As a client: PROCESSES processes that each hold EACH
 * connections to ADDRESS:PORT; for every line on standard input they send a byte through a sample
 * of them and wait for it. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#define SAMPLE 40 /* one connection of so many is tried */

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	_exit(1);
}

static struct sockaddr_in address(const char *host, const char *port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};

	if (inet_pton(AF_INET, host, &a.sin_addr) != 1)
		die(host);
	return a;
}

static int listener(struct sockaddr_in *a)
{
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) ||
	    bind(fd, (struct sockaddr *)a, sizeof *a) || listen(fd, 4096))
		die("listen");
	return fd;
}

static void serve(int l, int ready)
{
	struct epoll_event e = {.events = EPOLLIN, .data.fd = l}, got[256];
	int ep = epoll_create1(0);
	char b[256];

	if (ep < 0 || epoll_ctl(ep, EPOLL_CTL_ADD, l, &e) || write(ready, "r", 1) != 1)
		die("epoll");
	for (;;) {
		int n = epoll_wait(ep, got, 256, -1);

		for (int i = 0; i < n; i++) {
			int fd = got[i].data.fd;

			if (fd == l) {
				while ((e.data.fd = accept4(l, NULL, NULL, SOCK_NONBLOCK)) >= 0)
					if (epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e))
						die("epoll_ctl");
				if (errno != EAGAIN)
					die("accept");
				continue;
			}
			ssize_t k = read(fd, b, sizeof b);
			if (k <= 0 || write(fd, b, k) != k)
				close(fd);
		}
	}
}

static void hold(struct sockaddr_in *a, int each, int commands, int done)
{
	int *fd = calloc(each, sizeof *fd);
	char c;

	for (int i = 0; i < each; i++) {
		fd[i] = socket(AF_INET, SOCK_STREAM, 0);
		if (fd[i] < 0)
			die("socket");
		if (connect(fd[i], (struct sockaddr *)a, sizeof *a))
			die("connect");
	}
	if (write(done, &each, sizeof each) != sizeof each)
		die("write");
	while (read(commands, &c, 1) == 1) {
		int ok = 0;

		for (int i = 0; i < each; i += SAMPLE) {
			if (write(fd[i], "x", 1) != 1 || read(fd[i], &c, 1) != 1 || c != 'x')
				die("echo");
			ok++;
		}
		if (write(done, &ok, sizeof ok) != sizeof ok)
			die("write");
	}
	_exit(0);
}

static int sum(int from, int processes)
{
	int total = 0, n;

	for (int i = 0; i < processes; i++) {
		if (read(from, &n, sizeof n) != sizeof n)
			die("a process ended");
		total += n;
	}
	return total;
}

int main(int argc, char **argv)
{
	int server = argc == 4, processes = atoi(argv[3]), done[2], commands[64][2];
	struct sockaddr_in a = server ? address("0.0.0.0", argv[2]) : address(argv[1], argv[2]);
	char line[16];

	if (processes < 1 || processes > 64 || pipe(done))
		die("arguments");
	for (int i = 0; i < processes; i++) {
		int l = server ? listener(&a) : -1;

		if (pipe(commands[i]))
			die("pipe");
		if (fork() == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			close(done[0]);
			close(commands[i][1]);
			if (server)
				serve(l, done[1]);
			hold(&a, atoi(argv[4]), commands[i][0], done[1]);
		}
		close(l);
	}
	close(done[1]);
	if (server) {
		for (int i = 0; i < processes; i++)
			if (read(done[0], line, 1) != 1)
				die("a process ended");
		puts("listening");
		fflush(stdout);
		pause();
	}
	printf("connected %d\n", sum(done[0], processes));
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		for (int i = 0; i < processes; i++)
			if (write(commands[i][1], "e", 1) != 1)
				die("write");
		printf("echoed %d\n", sum(done[0], processes));
		fflush(stdout);
	}
	return 0;
}

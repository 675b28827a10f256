/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What `peer crr` does (internal/bench/peer), as a dynamically linked program: crr -to ADDRESS:PORT
 * -duration 1s -cpu N [-callers N]. Each caller makes a connection, sends a byte there and back and
 * resets it, again and again. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define WARM_UP 200
#define SAMPLES 4000000

static struct sockaddr_in to;
static long duration; /* ns */
static int cpu, callers = 1;
static pthread_barrier_t begin;

struct caller {
	pthread_t thread;
	long count, room;
	int *sockets, *connects; /* ns */
};

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static long now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long once(long *has_socket, long *connected)
{
	struct linger reset = { 1, 0 };
	char byte = 1;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	*has_socket = now();
	if (fd < 0)
		fail("socket");
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)))
		fail("connect");
	*connected = now();
	if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
		fail("byte there and back");
	if (setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) || close(fd))
		fail("reset");
	return now();
}

static void *run(void *arg)
{
	struct caller *c = arg;
	long a, b, end, last;
	cpu_set_t set;
	int i;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		fail("pin");
	for (i = 0; i < WARM_UP; i++)
		once(&a, &b);
	pthread_barrier_wait(&begin); /* all are warm */
	pthread_barrier_wait(&begin); /* the processors are read */
	end = now() + duration;
	do {
		long start = now();

		last = once(&a, &b);
		if (c->count < c->room) {
			c->sockets[c->count] = a - start;
			c->connects[c->count++] = b - start;
		}
	} while (last < end);
	return NULL;
}

/* Seconds of all processors that were not idle, nor waiting for a disk, nor taken away. */
static double busy(long elapsed_since, long *at)
{
	long user, nice, sys, idle, wait, irq, soft, steal;
	FILE *f = fopen("/proc/stat", "r");

	if (!f || fscanf(f, "cpu %ld %ld %ld %ld %ld %ld %ld %ld", &user, &nice, &sys, &idle, &wait, &irq, &soft, &steal) != 8)
		fail("/proc/stat");
	fclose(f);
	*at = now();
	return (double)(*at - elapsed_since) / 1e9 * (double)sysconf(_SC_NPROCESSORS_ONLN) -
	       (double)(idle + wait + steal) / (double)sysconf(_SC_CLK_TCK);
}

static int smaller(const void *a, const void *b)
{
	return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b);
}

static double percentile(const int *sorted, long n, int p)
{
	return n ? sorted[n * p / 100 < n ? n * p / 100 : n - 1] / 1e3 : 0;
}

static void parse(int argc, char **argv)
{
	char *colon, *unit;
	double value;
	int i;

	for (i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "-to") && (colon = strrchr(argv[i + 1], ':'))) {
			*colon = 0;
			to.sin_family = AF_INET;
			to.sin_port = htons((unsigned short)atoi(colon + 1));
			if (inet_pton(AF_INET, argv[i + 1], &to.sin_addr) != 1)
				colon = NULL;
		} else if (!strcmp(argv[i], "-duration")) {
			value = strtod(argv[i + 1], &unit);
			duration = (long)(value * (strcmp(unit, "ms") ? 1e9 : 1e6));
		} else if (!strcmp(argv[i], "-cpu")) {
			cpu = atoi(argv[i + 1]);
		} else if (!strcmp(argv[i], "-callers")) {
			callers = atoi(argv[i + 1]);
		}
	}
	if (!to.sin_port || duration <= 0 || callers < 1 || callers > 1024) {
		fprintf(stderr, "usage: crr -to ADDRESS:PORT -duration 1s -cpu N [-callers N]\n");
		exit(2);
	}
}

int main(int argc, char **argv)
{
	struct caller *all;
	int *sockets, *connects, i;
	long count = 0, from, until;
	double before, after;

	parse(argc, argv);
	all = calloc((size_t)callers, sizeof(*all));
	sockets = malloc(SAMPLES * sizeof(int));
	connects = malloc(SAMPLES * sizeof(int));
	if (!all || !sockets || !connects || pthread_barrier_init(&begin, NULL, (unsigned)callers + 1))
		fail("prepare");
	for (i = 0; i < callers; i++) {
		all[i].room = SAMPLES / callers;
		all[i].sockets = sockets + i * all[i].room;
		all[i].connects = connects + i * all[i].room;
		if (pthread_create(&all[i].thread, NULL, run, &all[i]))
			fail("thread");
	}
	pthread_barrier_wait(&begin);
	before = busy(0, &from);
	pthread_barrier_wait(&begin);
	for (i = 0; i < callers; i++) {
		pthread_join(all[i].thread, NULL);
		memmove(sockets + count, all[i].sockets, (size_t)all[i].count * sizeof(int));
		memmove(connects + count, all[i].connects, (size_t)all[i].count * sizeof(int));
		count += all[i].count;
	}
	after = busy(0, &until);
	qsort(sockets, (size_t)count, sizeof(int), smaller);
	qsort(connects, (size_t)count, sizeof(int), smaller);
	printf("{\"callers\":%d,\"connections\":%ld,\"elapsed_s\":%.6f,\"busy_cpu_s\":%.6f,\"socket_p50_us\":%.3f,\"socket_connect_p50_us\":%.3f,\"socket_connect_p99_us\":%.3f}\n",
	       callers, count, (double)(until - from) / 1e9, after > before ? after - before : 0, percentile(sockets, count, 50),
	       percentile(connects, count, 50), percentile(connects, count, 99));
	return 0;
}

/* The lanes of clib/guest without its interposed calls: one process at each end of a connection,
 * which sends and receives at random, or one that writes nonsense where its peer reads.
 * lanes memory | edges | peeks | torn-peeks | closed | random SEED BYTES | hostile SEED
 *       | bench BYTES CHUNK lanes|tcp.
 * Prints "ok", what it measured, or what is wrong. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "guest/internal.h"
#include "testdata/pair.h"

void *next_of(const char *name, void *_Atomic *kept)
{
	(void)name;
	(void)kept;
	return NULL;
}

long ask_agent(unsigned long magic, long question)
{
	(void)magic;
	(void)question;
	return -ENOSYS;
}

bool borrowed(void)
{
	return false;
}

void end_io(int fd, struct connection *c, long sent, long received)
{
	(void)fd;
	(void)c;
	(void)sent;
	(void)received;
}

static uint64_t state;

static uint32_t random_below(uint32_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return n ? (uint32_t)(state >> 20) % n : 0;
}

static int make_memory(void)
{
	struct lanes head = {.magic = LANES_MAGIC, .version = LANES_VERSION, .capacity = LANES_CAPACITY};
	int fd = memfd_create("lanes", MFD_ALLOW_SEALING);

	CHECK(fd >= 0 && ftruncate(fd, LANES_SIZE) == 0 && write(fd, &head, sizeof(head)) == sizeof(head));
	CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
	return fd;
}

static uint8_t byte_at(uint64_t position, int role)
{
	return (uint8_t)(position * 131 + (position >> 9) + (uint64_t)role * 7);
}

struct one {
	struct connection *c;
	int fd, role;
	uint64_t total, sent, received;
	uint8_t buffer[300000];
};

/* Sends some, as a program would: by pieces, waiting or not. */
static void send_some(struct one *o)
{
	uint32_t n = random_below(random_below(8) ? 9000 : sizeof(o->buffer)) + 1, cut;
	struct iovec list[2];
	struct buffers b;
	long r;

	if (n > o->total - o->sent)
		n = (uint32_t)(o->total - o->sent);
	if (!n)
		return;
	for (uint32_t i = 0; i < n; i++)
		o->buffer[i] = byte_at(o->sent + i, o->role);
	cut = random_below(n);
	list[0] = (struct iovec){o->buffer, cut};
	list[1] = (struct iovec){o->buffer + cut, n - cut};
	CHECK(buffers_of(&b, list, 2));
	r = lanes_send(o->c, o->fd, &b, MSG_NOSIGNAL | MSG_DONTWAIT);
	CHECK(r > 0 || r == -EAGAIN);
	if (r > 0)
		o->sent += (uint64_t)r;
}

static void receive_some(struct one *o)
{
	uint32_t n = random_below(random_below(8) ? 9000 : sizeof(o->buffer)) + 1;
	int flags = MSG_DONTWAIT | (random_below(4) ? 0 : MSG_PEEK);
	struct pollfd p = {o->fd, POLLIN, 0};
	struct iovec list = {o->buffer, n};
	struct buffers b;
	long r, queued = lanes_readable(o->c, o->fd);

	/* What is there can be polled for, by whoever polls. */
	if (queued > 0)
		CHECK(poll(&p, 1, 5000) == 1);
	CHECK(buffers_of(&b, &list, 1));
	r = lanes_receive(o->c, o->fd, &b, flags);
	CHECK(r > 0 || r == -EAGAIN);
	CHECK(queued == 0 || r > 0);
	for (long i = 0; i < r; i++)
		CHECK(o->buffer[i] == byte_at(o->received + (uint64_t)i, !o->role));
	if (r > 0 && !(flags & MSG_PEEK))
		o->received += (uint64_t)r;
}

/* Something that an agent or a program does now and then. */
static void disturb(struct one *o)
{
	switch (random_below(60)) {
	case 0:
		atomic_store(&o->c->lanes->stop, random_below(2));
		break;
	case 1:
		lanes_settle(o->c, o->fd);
		break;
	case 2:
		atomic_fetch_add(&o->c->lanes->beat, 1);
		break;
	case 3:
		usleep(random_below(300));
		break;
	}
}

static void converse(struct one *o)
{
	struct iovec list = {o->buffer, 1};
	struct buffers b;

	while (o->sent < o->total || o->received < o->total) {
		struct pollfd p = {o->fd, (short)(POLLIN | (o->sent < o->total ? POLLOUT : 0)), 0};

		if (o->received == o->total)
			p.events = POLLOUT;
		CHECK(poll(&p, 1, 20000) == 1); /* else it was not told of bytes */
		disturb(o);
		if (o->received < o->total && random_below(2))
			receive_some(o);
		else
			send_some(o);
	}
	CHECK(shutdown(o->fd, SHUT_WR) == 0);
	buffers_of(&b, &list, 1);
	CHECK(lanes_receive(o->c, o->fd, &b, 0) == 0);
}

static struct one *start(int fd, int role, int memory, uint64_t total)
{
	static struct connection c[2];
	static struct one all[2];
	struct one *o = &all[role];

	*o = (struct one){.c = &c[role], .fd = fd, .role = role, .total = total};
	CHECK(attach(o->c, fd, role, memory, 0, 0));
	atomic_store(&o->c->descriptors, 1);
	attached(o->c);
	return o;
}

static int random_pair(uint64_t seed, uint64_t total)
{
	int fds[2], memory = make_memory(), status;
	pid_t child;

	connected_pair(fds);
	child = fork();
	state = seed * 2 + (child ? 1 : 2) * 0x9e3779b97f4a7c15UL;
	close(fds[child ? 1 : 0]);
	converse(start(fds[child ? 0 : 1], child ? 0 : 1, memory, total));
	if (!child)
		_exit(0);
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	return 0;
}

/* The peer of role 0 that keeps to the rules until it does not: wild counters, when the victim is
 * in a ring and believes them. */
static void be_hostile(struct lanes *lanes, int fd)
{
	struct lane *to = &lanes->lane[1], *from = &lanes->lane[0];
	static char bytes[1 << 16];

	atomic_store(&to->epoch, 1); /* no bytes by TCP: the ring is next */
	for (int i = 0; i < 10000; i++) {
		uint64_t wild = random_below(8) ? random_below(8u << 20)
		                                : (uint64_t)random_below(~0u) << random_below(34);

		atomic_store(&from->followed, atomic_load(&from->epoch));
		switch (random_below(random_below(4) ? 3 : 12)) {
		case 0:
			atomic_store(&to->produced,
			             random_below(2) ? wild : atomic_load(&to->consumed) + wild);
			break;
		case 1:
			atomic_store(&from->consumed,
			             random_below(2) ? wild : atomic_load(&from->produced) + wild);
			break;
		case 2:
			atomic_fetch_add(&to->stream, 1);
			if (send(fd, bytes, 1 + random_below(2), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
			    errno != EAGAIN)
				return;
			break;
		case 3:
			atomic_store(&to->epoch, random_below(6));
			break;
		case 4:
			atomic_store((_Atomic uint64_t *)((uint8_t *)lanes->lane + 8 * random_below(64)),
			             wild);
			break;
		case 5: /* zeros where there were counters */
			madvise(lanes, LANES_HEAD, MADV_REMOVE);
			break;
		default: /* what went by TCP, so that more goes by the ring */
			while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
				;
		}
	}
}

/* Calls of a side whose peer is hostile end, and give as many bytes as they say, or an error. */
static void suffer(struct one *o, uint8_t *buffer, size_t size)
{
	for (int i = 0; i < 2000 && !atomic_load(&o->c->sides->broken); i++) {
		struct iovec list = {buffer, random_below((uint32_t)size) + 1};
		size_t most = list.iov_len;
		struct buffers b;
		long r;

		buffers_of(&b, &list, 1);
		if (random_below(2))
			r = lanes_receive(o->c, o->fd, &b, MSG_DONTWAIT | (random_below(4) ? 0 : MSG_PEEK));
		else
			r = lanes_send(o->c, o->fd, &b, MSG_DONTWAIT | MSG_NOSIGNAL);
		CHECK(r <= (long)most && r >= -4095);
		CHECK(lanes_readable(o->c, o->fd) >= 0);
		if (r == 0 || (r < 0 && r != -EAGAIN))
			break;
	}
}

static int under_attack(uint64_t seed)
{
	size_t size = 4 * (size_t)LANES_CAPACITY; /* more than a ring has: wild counters lead out of it */
	uint8_t *buffer = malloc(size);
	int broken = 0;

	for (int round = 0; round < 40; round++) {
		int fds[2], memory = make_memory(), status;
		struct one *o;
		pid_t child;

		connected_pair(fds);
		o = start(fds[0], 0, memory, 0);
		atomic_store(&o->c->lanes->lane[0].attached, 1);
		child = fork();
		state = (seed * 64 + (uint64_t)round) * 2 + (child ? 1 : 2) * 0x9e3779b97f4a7c15UL;
		if (!child) {
			close(fds[0]);
			be_hostile(o->c->lanes, fds[1]);
			_exit(0);
		}
		close(fds[1]);
		suffer(o, buffer, size);
		broken += (int)atomic_load(&o->c->sides->broken);
		lanes_hand_over(o->c, o->fd);
		release(o->c);
		close(fds[0]);
		close(memory);
		kill(child, SIGKILL);
		CHECK(waitpid(child, &status, 0) == child);
	}
	CHECK(broken > 10); /* else it was no attack */
	free(buffer);
	return 0;
}

/* A peer that changes where its epoch ended while the reader looks at it: no more of TCP's bytes
 * come than there was room made for. */
static int torn_peeks(void)
{
	size_t size = 1 << 16;
	char *buffer = malloc(size);
	int fds[2], memory = make_memory(), status;
	struct lane *to;
	struct one *o;
	pid_t child;

	connected_pair(fds);
	o = start(fds[0], 0, memory, 0);
	to = &o->c->lanes->lane[1];
	atomic_store(&to->epoch, 1);
	atomic_store(&to->produced, 1);
	child = fork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (size_t n = 0; n < size / 2;)
			n += (size_t)send(fds[1], buffer, size / 4, 0);
		atomic_store(&to->ended[1].stream, 1);
		for (;;) {
			atomic_store(&to->epoch, 2);
			atomic_store(&to->ended[1].stream, size / 4);
			atomic_store(&to->ended[1].stream, 1);
		}
	}
	while (atomic_load(&to->epoch) != 2)
		sched_yield();
	for (int i = 0; i < 200000; i++) {
		struct iovec list = {buffer, size};
		struct buffers b;
		long r;

		buffers_of(&b, &list, 1);
		r = lanes_receive(o->c, o->fd, &b, MSG_DONTWAIT | MSG_PEEK);
		CHECK(r <= (long)size && r >= -4095);
	}
	kill(child, SIGKILL);
	CHECK(waitpid(child, &status, 0) == child);
	free(buffer);
	return 0;
}

/* Memory that somebody could take away is not used. */
static int bad_memory(void)
{
	static struct connection c;
	struct lanes head = {.magic = LANES_MAGIC, .version = LANES_VERSION, .capacity = LANES_CAPACITY};
	int fds[2], fd;

	connected_pair(fds);
	fd = memfd_create("lanes", MFD_ALLOW_SEALING);
	CHECK(ftruncate(fd, LANES_SIZE) == 0 && write(fd, &head, sizeof(head)) == sizeof(head));
	CHECK(!attach(&c, fds[0], 0, fd, 0, 0));
	CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
	CHECK(!attach(&c, fds[0], 0, fd, 1, 0)); /* counts that are not the kernel's */
	CHECK(!attach(&c, fds[0], 0, fd, 0, 1));
	CHECK(!attach(&c, 0, 0, fd, 0, 0)); /* no socket */
	CHECK(attach(&c, fds[0], 0, fd, 0, 0));
	head.capacity /= 2;
	CHECK(pwrite(fd, &head, sizeof(head), 0) == sizeof(head));
	CHECK(!attach(&c, fds[1], 1, fd, 0, 0));
	return 0;
}

static long send_bytes(struct one *o, size_t n)
{
	struct iovec list = {o->buffer, n};
	struct buffers b;

	CHECK(n <= sizeof(o->buffer) && buffers_of(&b, &list, 1));
	return lanes_send(o->c, o->fd, &b, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static long receive_with(struct one *o, size_t n, int flags)
{
	struct iovec list = {o->buffer, n};
	struct buffers b;

	buffers_of(&b, &list, 1);
	return lanes_receive(o->c, o->fd, &b, flags);
}

static long receive_bytes(struct one *o)
{
	return receive_with(o, sizeof(o->buffer), MSG_DONTWAIT);
}

static int edges_of(int fd, uint32_t events)
{
	struct epoll_event e = {.events = events | EPOLLET};
	int epoll = epoll_create1(EPOLL_CLOEXEC);

	CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) == 0);
	return epoll;
}

static bool edge(int epoll, int ms)
{
	struct epoll_event e;

	return epoll_wait(epoll, &e, 1, ms) == 1;
}

/* Programs that wait for edges take a call that gives, or takes, less than they wanted for the
 * last one: whoever is told no more of what is left waits for ever. */
static int edges(void)
{
	int fds[2], memory = make_memory(), queued = 1, epoll;
	struct one *from, *to;
	long n;

	connected_pair(fds);
	from = start(fds[0], 0, memory, 0);
	to = start(fds[1], 1, memory, 0);
	epoll = edges_of(to->fd, EPOLLIN);
	for (int tcp_first = 0; tcp_first < 2; tcp_first++) {
		atomic_store(&from->c->lanes->stop, (uint32_t)tcp_first);
		CHECK(send_bytes(from, 100) == 100);
		while (queued)
			CHECK(ioctl(from->fd, SIOCOUTQ, &queued) == 0);
		atomic_store(&from->c->lanes->stop, (uint32_t)!tcp_first);
		CHECK(send_bytes(from, 50) == 50);
		CHECK(edge(epoll, 5000));
		n = receive_bytes(to);
		CHECK(n == 150 || (n == 100 && edge(epoll, 1000) && receive_bytes(to) == 50));
		CHECK(receive_bytes(to) == -EAGAIN);
		queued = 1;
	}
	close(epoll);
	atomic_store(&from->c->lanes->stop, 0);
	fcntl(from->fd, F_SETFL, O_NONBLOCK);
	epoll = edges_of(from->fd, EPOLLOUT);
	CHECK(edge(epoll, 5000));
	do
		n = send_bytes(from, sizeof(from->buffer) - 1);
	while (n == sizeof(from->buffer) - 1);
	CHECK(!edge(epoll, 0)); /* of what was acknowledged meanwhile */
	while (receive_bytes(to) > 0)
		;
	CHECK(edge(epoll, 5000));
	return 0;
}

static struct one *sender;

/* Sends more once its peer has looked at what there is. */
static void *send_more(void *arg)
{
	while (atomic_load(&sender->c->out->armed) != 1)
		sched_yield();
	CHECK(send_bytes(sender, 50) == 50);
	return arg;
}

static void acknowledged(struct one *o)
{
	for (int queued = 1; queued;)
		CHECK(ioctl(o->fd, SIOCOUTQ, &queued) == 0);
}

/* Who looks at bytes and leaves them there sees all of them, is told of what comes next, and
 * waits for as many as it wants. */
static int peeks(void)
{
	int fds[2], memory = make_memory(), epoll;
	struct one *from, *to;
	pthread_t thread;

	connected_pair(fds);
	from = sender = start(fds[0], 0, memory, 0);
	to = start(fds[1], 1, memory, 0);
	epoll = edges_of(to->fd, EPOLLIN);
	CHECK(send_bytes(from, 100) == 100 && edge(epoll, 5000));
	CHECK(receive_with(to, 1000, MSG_DONTWAIT | MSG_PEEK) == 100);
	CHECK(send_bytes(from, 50) == 50 && edge(epoll, 5000));
	CHECK(receive_with(to, 1000, MSG_DONTWAIT | MSG_PEEK) == 150);
	atomic_store(&to->c->in->armed, 0); /* until it looks again */
	CHECK(pthread_create(&thread, NULL, send_more, NULL) == 0);
	CHECK(receive_with(to, 200, MSG_PEEK | MSG_WAITALL) == 200 && pthread_join(thread, NULL) == 0);

	atomic_store(&from->c->lanes->stop, 1); /* out of the ring */
	CHECK(send_bytes(from, 30) == 30);
	acknowledged(from);
	CHECK(receive_with(to, 1000, MSG_DONTWAIT | MSG_PEEK) == 230);
	CHECK(receive_with(to, 230, MSG_DONTWAIT) == 230);
	CHECK(send_bytes(from, 20) == 20);
	acknowledged(from);
	atomic_store(&from->c->lanes->stop, 0); /* and into it */
	CHECK(send_bytes(from, 40) == 40);
	CHECK(receive_with(to, 1000, MSG_DONTWAIT | MSG_PEEK) == 60);
	while (edge(epoll, 0))
		;
	CHECK(send_bytes(from, 40) == 40 && edge(epoll, 5000));
	CHECK(receive_with(to, 1000, MSG_DONTWAIT | MSG_PEEK) == 100);
	CHECK(receive_bytes(to) == 100 && receive_bytes(to) == -EAGAIN);
	return 0;
}

/* A peer that had taken all out of its ring and closed with a doorbell unread has closed in order,
 * also for an end to which no ring ever led. One that had taken the doorbells, too, and one that
 * left bytes of TCP's, has reset the connection. */
enum left { BELL, BELL_UNTOLD, NOTHING, BYTES };

static long closed_with(enum left left)
{
	int fds[2], memory = make_memory();
	struct linger abort = {1, 0};
	struct one *from, *to;

	connected_pair(fds);
	from = start(fds[0], 0, memory, 0);
	to = start(fds[1], 1, memory, 0);
	CHECK(send_bytes(from, 100) == 100 && receive_bytes(to) == 100);
	CHECK(receive_bytes(to) == -EAGAIN);
	if (left == BELL_UNTOLD)
		atomic_store(&to->c->in->taken, 0); /* as a library of before leaves it */
	if (left == BELL || left == BELL_UNTOLD) {
		from->c->sides->out.stream++;
		CHECK(send(from->fd, "", 1, 0) == 1);
	} else if (left == BYTES) {
		atomic_store(&from->c->lanes->stop, 1);
		CHECK(send_bytes(from, 100) == 100);
	} else {
		CHECK(setsockopt(to->fd, SOL_SOCKET, SO_LINGER, &abort, sizeof(abort)) == 0);
	}
	if (left != NOTHING)
		CHECK(poll(&(struct pollfd){to->fd, POLLIN, 0}, 1, 5000) == 1);
	lanes_settle(to->c, to->fd);
	close(to->fd);
	CHECK(poll(&(struct pollfd){from->fd, POLLIN, 0}, 1, 5000) == 1);
	return receive_bytes(from);
}

static int closed_in_order(void)
{
	CHECK(closed_with(BELL) == 0);
	CHECK(closed_with(BELL_UNTOLD) == 0);
	CHECK(closed_with(NOTHING) == -ECONNRESET);
	CHECK(closed_with(BYTES) == -ECONNRESET);
	return 0;
}

static double seconds(const struct timeval *t)
{
	return (double)t->tv_sec + (double)t->tv_usec / 1e6;
}

/* Sends BYTES by CHUNK: by lanes if memory is one, else by TCP. Prints Gb/s and processor seconds
 * a GB. */
static int bench(uint64_t total, size_t chunk, bool lanes) /* chunk: at most 1 MiB */
{
	static struct connection c[2];
	int fds[2], memory = make_memory(), status;
	struct timespec a, z;
	struct rusage own, children;
	struct buffers b;
	static char bytes[1 << 20];
	char one;
	struct iovec list = {bytes, chunk};
	double took, used;
	pid_t child;

	connected_pair(fds);
	child = fork();
	CHECK(attach(&c[!child], fds[!child], !child, memory, 0, 0));
	c[!child].descriptors = 1;
	attached(&c[!child]);
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (uint64_t left = total; left;) {
		long r;

		list.iov_len = left < chunk ? left : chunk;
		buffers_of(&b, &list, 1);
		if (child)
			r = lanes ? lanes_send(&c[0], fds[0], &b, 0) : send(fds[0], bytes, list.iov_len, 0);
		else
			r = lanes ? lanes_receive(&c[1], fds[1], &b, 0)
			          : recv(fds[1], bytes, list.iov_len, 0);
		CHECK(r > 0);
		left -= (uint64_t)r;
	}
	if (!child) {
		CHECK(send(fds[1], "", 1, 0) == 1);
		_exit(0);
	}
	CHECK(recv(fds[0], &one, 1, 0) == 1);
	clock_gettime(CLOCK_MONOTONIC, &z);
	CHECK(waitpid(child, &status, 0) == child);
	getrusage(RUSAGE_SELF, &own);
	getrusage(RUSAGE_CHILDREN, &children);
	took = (double)(z.tv_sec - a.tv_sec) + (double)(z.tv_nsec - a.tv_nsec) / 1e9;
	used = seconds(&own.ru_utime) + seconds(&own.ru_stime) + seconds(&children.ru_utime) +
	       seconds(&children.ru_stime);
	printf("%.1f Gb/s, %.3f processor s/GB\n", (double)total * 8 / took / 1e9,
	       used / ((double)total / 1e9));
	return 0;
}

int main(int argc, char **argv)
{
	int r = 2;

	alarm(120);
	if (argc == 4 && !strcmp(argv[1], "random"))
		r = random_pair(strtoul(argv[2], NULL, 0), strtoul(argv[3], NULL, 0));
	else if (argc == 3 && !strcmp(argv[1], "hostile"))
		r = under_attack(strtoul(argv[2], NULL, 0));
	else if (argc == 2 && !strcmp(argv[1], "memory"))
		r = bad_memory();
	else if (argc == 2 && !strcmp(argv[1], "edges"))
		r = edges();
	else if (argc == 2 && !strcmp(argv[1], "peeks"))
		r = peeks();
	else if (argc == 2 && !strcmp(argv[1], "torn-peeks"))
		r = torn_peeks();
	else if (argc == 2 && !strcmp(argv[1], "closed"))
		r = closed_in_order();
	else if (argc == 5 && !strcmp(argv[1], "bench"))
		return bench(strtoul(argv[2], NULL, 0), strtoul(argv[3], NULL, 0), !strcmp(argv[4], "lanes"));
	if (r == 0)
		puts("ok");
	return r;
}

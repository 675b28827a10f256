/* The guest library as a program's own calls, with both ends of a connection in one process, and an
 * agent that is a function here: what happens to what the library knows of a descriptor when its
 * process forks, a thread ends in a call, and so on.
 * table fork | raw-fork | tls | vfork | cancel | jump | closed | later | later-queues | died |
 * orphaned | orphaned-at-once | foreign-life | lost | lost-goes-on.
 * Prints "ok", or what is wrong. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "guest/queues.h"
#include "ring/ring.h"
#include "testdata/pair.h"
#include "testdata/region.h"

static int memory; /* of lanes */
static struct lanes *lanes;
static _Atomic int gate, waiting; /* an answer waits for the gate to be open */

void *next_of(const char *name, void *_Atomic *kept)
{
	(void)kept;
	return dlsym(RTLD_NEXT, name);
}

static bool by_queues, away;
static int asked;
static int life; /* the program's end of the region's socket */

long ask_agent(unsigned long magic, long question)
{
	CHECK(magic == QUEUES_ASK);
	if (away || !by_queues)
		return away ? -EAGAIN : -EOPNOTSUPP;
	if (question == (long)QUEUES_ASK_REGION)
		return life = make_region();
	stream_of_region()->generation = 1;
	stream_of_region()->state = QUEUES_STREAM_USED;
	return 0;
}

long ask_for_lanes(int fd, int role)
{
	(void)fd;
	(void)role;
	asked++;
	if (away || by_queues)
		return away ? -EAGAIN : -EOPNOTSUPP;
	atomic_fetch_add(&waiting, 1);
	while (atomic_load(&gate))
		sched_yield();
	atomic_fetch_sub(&waiting, 1);
	return dup(memory);
}

static void make_memory(void)
{
	struct lanes head = {.magic = LANES_MAGIC, .version = LANES_VERSION, .capacity = LANES_CAPACITY};

	memory = memfd_create("lanes", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	CHECK(memory >= 0 && ftruncate(memory, LANES_SIZE) == 0 &&
	      write(memory, &head, sizeof(head)) == sizeof(head) &&
	      fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
	lanes = mmap(NULL, LANES_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	CHECK(lanes != MAP_FAILED);
}

static void say(int from, int to, int times)
{
	char byte;

	while (times--)
		CHECK(write(from, "x", 1) == 1 && read(to, &byte, 1) == 1 && byte == 'x');
}

/* Gives a connection whose ends have lanes. */
static struct connection *with_lanes(int fds[2])
{
	struct connection *c;

	connected_pair(fds);
	say(fds[0], fds[1], 20);
	say(fds[1], fds[0], 20);
	CHECK(lanes->lane[0].attached == 1 && lanes->lane[1].attached == 1);
	c = use(fds[0]);
	CHECK(c);
	unuse(c);
	return c;
}

static void *ask(void *fd)
{
	say(*(int *)fd, ((int *)fd)[1], 17);
	return NULL;
}

/* A process forks while another thread asks: the child goes on by TCP, and so does the parent,
 * which the child would count nothing for. One that nobody tells of the fork goes on, too. */
static int fork_while_asking(bool told)
{
	int fds[2], status;
	pthread_t thread;
	pid_t child;
	char byte;

	connected_pair(fds);
	atomic_store(&gate, 1);
	CHECK(pthread_create(&thread, NULL, ask, fds) == 0);
	while (!atomic_load(&waiting))
		sched_yield();
	child = told ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (child == 0) {
		alarm(20); /* else it would wait for ever for a thread that it has not */
		_exit(recv(fds[0], &byte, 1, MSG_DONTWAIT) != -1 || errno != EAGAIN);
	}
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	atomic_store(&gate, 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(lanes->lane[1].attached == !told);
	CHECK((use(fds[0]) == NULL) == told);
	say(fds[0], fds[1], 100);
	say(fds[1], fds[0], 100);
	return 0;
}

/* Asks the kernel for its TLS on a connection, which it may not have. */
static int encrypt(int fd)
{
	char keys[40] = {0};
	int r = setsockopt(fd, 282 /* SOL_TLS */, 1 /* TLS_TX */, keys, sizeof(keys));

	return r == 0 || errno == ENOPROTOOPT || errno == EINVAL ? 0 : -errno;
}

/* TLS by the kernel: what the program sends from here on is the socket's alone, or the program
 * is told that it cannot be. */
static int tls(void)
{
	int fds[2];
	struct connection *c = with_lanes(fds);
	uint64_t before = c->out->produced;
	char bytes[10];

	/* Libraries ask for this whether they will use it or not. */
	CHECK(setsockopt(fds[0], IPPROTO_TCP, 31 /* TCP_ULP */, "tls", 3) == 0 || errno == ENOENT);
	CHECK(write(fds[0], "clear", 5) == 5 && read(fds[1], bytes, 10) == 5);
	CHECK(c->out->produced > before);
	CHECK(write(fds[1], "unread bytes", 10) == 10);
	CHECK(encrypt(fds[0]) == -EBUSY);
	CHECK(read(fds[0], bytes, 10) == 10);
	CHECK(encrypt(fds[0]) == 0);
	before = c->out->produced;
	CHECK(write(fds[0], "secret", 6) == 6 && read(fds[1], bytes, 10) > 0);
	CHECK(c->out->produced == before);
	/* One that has no lanes yet gets none. */
	make_memory();
	connected_pair(fds);
	CHECK(encrypt(fds[0]) == 0);
	say(fds[0], fds[1], 100);
	CHECK(!use(fds[0]));
	return 0;
}

static void *fork_into_own_memory(void *arg)
{
	struct connection *c = arg;
	struct direction *d = &c->sides->out;
	pid_t child = vfork();
	int status;

	if (child == 0) {
		executing();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && lock_direction(d));
	CHECK(atomic_load(&d->lock) == (uint32_t)gettid());
	unlock_direction(d);
	return NULL;
}

/* A thread of which a child of vfork() was the first to lock something locks as itself: the
 * child has ended, and others would take its locks. */
static int vforked(void)
{
	int fds[2];
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, fork_into_own_memory, with_lanes(fds)) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	return 0;
}

/* Waits until a thread of this process waits in the kernel. */
static void wait_until_asleep(pid_t thread)
{
	char path[64], line[256];
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
	do {
		sched_yield();
		fd = open(path, O_RDONLY);
		n = read(fd, line, sizeof(line) - 1);
		close(fd);
		CHECK(n > 0);
		line[n] = 0;
	} while (!strstr(line, ") S "));
}

static _Atomic pid_t asleep; /* the thread that will wait */

static void *receive_for_ever(void *fd)
{
	char byte;

	atomic_store(&asleep, gettid());
	read(*(int *)fd, &byte, 1);
	return NULL;
}

static void *send_for_ever(void *fd)
{
	static char bytes[1 << 20];

	atomic_store(&asleep, gettid());
	while (write(*(int *)fd, bytes, sizeof(bytes)) > 0)
		;
	return NULL;
}

static bool cancelled(void *(*f)(void *), int *fd)
{
	pthread_t thread;
	void *r;

	atomic_store(&asleep, 0);
	CHECK(pthread_create(&thread, NULL, f, fd) == 0);
	while (!atomic_load(&asleep))
		sched_yield();
	wait_until_asleep(atomic_load(&asleep));
	CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &r) == 0);
	return r == PTHREAD_CANCELED;
}

/* A thread that is cancelled in a call leaves nothing behind, whoever has the connection's
 * bytes. */
static int cancel(void)
{
	int fds[2];
	struct connection *c;

	connected_pair(fds);
	CHECK(cancelled(receive_for_ever, &fds[0]));
	close(fds[0]);
	close(fds[1]);
	c = with_lanes(fds); /* the same numbers, with no call in them */
	CHECK(cancelled(receive_for_ever, &fds[0]));
	CHECK(atomic_load(&c->users) == 1);
	CHECK(cancelled(send_for_ever, &fds[0]));
	CHECK(atomic_load(&c->users) == 1 && !atomic_load(&c->sides->out.native));
	CHECK(lock_direction(&c->sides->out));
	unlock_direction(&c->sides->out);
	close(fds[0]);
	CHECK(!atomic_load(&c->taken));
	return 0;
}

/* The service is told when the last descriptor is closed, though a call has not come back. */
static int closed(void)
{
	int fds[2];
	struct connection *c;
	pthread_t thread;

	by_queues = true;
	connected_pair(fds);
	while (!region)
		say(fds[0], fds[1], 1);
	c = use(fds[0]);
	CHECK(c && c->stream);
	unuse(c);
	CHECK(pthread_create(&thread, NULL, receive_for_ever, &fds[0]) == 0);
	while (!atomic_load(&asleep))
		sched_yield();
	wait_until_asleep(atomic_load(&asleep));
	close(dup(fds[0]));
	CHECK(atomic_load(ring_produced(&(struct ring_end){.base = (uint8_t *)region + JOBS_AT})) == 0);
	close(fds[0]);
	CHECK(atomic_load(ring_produced(&(struct ring_end){.base = (uint8_t *)region + JOBS_AT})) == 1);
	CHECK(((struct queues_nqe *)((uint8_t *)region + JOBS_AT + RING_SLOTS_OFFSET))->operation ==
	      QUEUES_CLOSE);
	CHECK(write(fds[1], "x", 1) == 1 && pthread_join(thread, NULL) == 0 && !atomic_load(&c->taken));
	return 0;
}

/* Gives a connection whose first end has a stream, and has sent so much in a row that what comes
 * next goes by the ring, which nobody empties. */
static struct connection *with_stream(int fds[2])
{
	struct connection *c;

	by_queues = true;
	connected_pair(fds);
	while (!region)
		CHECK(write(fds[0], "-", 1) == 1);
	c = use(fds[0]);
	CHECK(c && c->stream);
	unuse(c);
	for (int i = 0; i < 3; i++) /* with the one before, the first of a row */
		CHECK(write(fds[0], "-", 1) == 1);
	CHECK(stream_of_region()->out_produced == 0);
	return c;
}

/* The peer hears at once that the connection is over, and not that this was all. Of what was sent
 * only so much has come as "-" says, which went to the socket itself. */
static void check_reset(int peer)
{
	struct pollfd reset = {peer, 0, 0};
	char byte;
	ssize_t n;

	CHECK(poll(&reset, 1, 5000) == 1 && reset.revents & POLLHUP);
	while ((n = syscall(SYS_read, peer, &byte, 1)) > 0)
		CHECK(byte == '-');
	CHECK(n == -1 && errno == ECONNRESET);
}

static char *page; /* what a program sends, which is not there yet */

/* While a send copies, its service dies, and the agent finds its ring empty. */
static void die(int signal)
{
	(void)signal;
	CHECK(stream_of_region()->out_produced == stream_of_region()->out_consumed);
	region->ended = QUEUES_ENDED_DIED;
	CHECK(mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0);
	memcpy(page, "first", 5);
}

/* What goes into a ring that the agent has seen to be empty after its service died the service may
 * have sent still, and not have said so: it is not sent once more, and the connection is over. */
static int died(void)
{
	int fds[2];

	with_stream(fds);
	page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED && signal(SIGSEGV, die) != SIG_ERR);
	alarm(10); /* it would wait for ever for the service */
	CHECK(write(fds[0], page, 5) == 5 || errno == ECONNRESET);
	CHECK(region->ended == QUEUES_ENDED_DIED);
	check_reset(fds[1]);
	CHECK(send(fds[0], "second", 6, MSG_NOSIGNAL) == -1 && errno == ECONNRESET);
	CHECK(send(fds[0], "third", 5, MSG_NOSIGNAL) == -1 && (errno == EPIPE || errno == ECONNRESET));
	return 0;
}

static _Atomic int handled, sent; /* signals; the result of a send, 0 before there is one */

static void handle(int signal)
{
	(void)signal;
	atomic_fetch_add(&handled, 1);
}

static void *send_one(void *fd)
{
	atomic_store(&asleep, gettid());
	atomic_store(&sent, write(*(int *)fd, "x", 1) == 1 ? 1 : -errno);
	return NULL;
}

/* Has a thread wait for room in the ring. */
static pthread_t start_send(int *fd)
{
	pthread_t thread;

	atomic_store(&asleep, 0);
	atomic_store(&sent, 0);
	CHECK(pthread_create(&thread, NULL, send_one, fd) == 0);
	while (!atomic_load(&asleep))
		sched_yield();
	wait_until_asleep(atomic_load(&asleep));
	return thread;
}

/* A connection whose service has died with bytes in the ring, which no agent knows of, is over for
 * whoever waits for room, or does not wait; until then signals are as in a send of the socket. */
static int orphaned_stream(bool waits)
{
	static char bytes[QUEUES_CAPACITY_MIN];
	int fds[2];
	pthread_t thread;

	alarm(20);
	with_stream(fds);
	CHECK(write(fds[0], "x", 1) == 1 && send(fds[0], bytes, sizeof(bytes), MSG_DONTWAIT) > 0);
	CHECK(send(fds[0], "x", 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	CHECK(sigaction(SIGUSR1, &(struct sigaction){.sa_handler = handle, .sa_flags = SA_RESTART}, NULL) ==
	              0 &&
	      sigaction(SIGUSR2, &(struct sigaction){.sa_handler = handle}, NULL) == 0);
	if (waits) {
		thread = start_send(&fds[0]);
		CHECK(pthread_kill(thread, SIGUSR1) == 0);
		while (!atomic_load(&handled))
			sched_yield();
		wait_until_asleep(atomic_load(&asleep));
		CHECK(!atomic_load(&sent) && pthread_kill(thread, SIGUSR2) == 0);
		CHECK(pthread_join(thread, NULL) == 0 && atomic_load(&sent) == -EINTR);
		thread = start_send(&fds[0]);
		close(service);
		CHECK(pthread_join(thread, NULL) == 0 && atomic_load(&sent) == -ECONNRESET);
	} else {
		close(service);
		CHECK(send(fds[0], "x", 1, MSG_DONTWAIT) == -1 && errno == ECONNRESET);
	}
	check_reset(fds[1]);
	CHECK(send(fds[0], "x", 1, MSG_NOSIGNAL) == -1 && (errno == EPIPE || errno == ECONNRESET));
	return 0;
}

static bool no_room(int fd)
{
	return send(fd, "x", 1, MSG_DONTWAIT) == -1 && errno == EAGAIN;
}

/* A program closes, and uses for something else, a descriptor of the region's that it knows nothing
 * of: this says nothing about the service, and a connection with bytes in the ring lives on. */
static int foreign_life(void)
{
	static char bytes[QUEUES_CAPACITY_MIN];
	int fds[2], kept, ends[2];

	alarm(20);
	with_stream(fds);
	CHECK(write(fds[0], "x", 1) == 1 && send(fds[0], bytes, sizeof(bytes), MSG_DONTWAIT) > 0);
	kept = (int)syscall(SYS_dup, life);
	CHECK(kept >= 0 && no_room(fds[0]));
	CHECK(syscall(SYS_close, life) == 0 && no_room(fds[0]));
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
	CHECK(ends[0] == life || syscall(SYS_dup3, ends[0], life, 0) == life);
	syscall(SYS_close, ends[1]);
	CHECK(no_room(fds[0]));
	CHECK(!(stream_of_region()->state & QUEUES_STREAM_DEAD));
	/* What the service takes makes room as before. */
	stream_of_region()->out_consumed = stream_of_region()->out_produced;
	CHECK(send(fds[0], "x", 1, MSG_DONTWAIT) == 1);
	CHECK(send(fds[0], bytes, sizeof(bytes), MSG_DONTWAIT) > 0 && no_room(fds[0]));
	/* The region's own tells the truth still. */
	CHECK(syscall(SYS_dup3, kept, life, 0) == life && no_room(fds[0]));
	close(service);
	CHECK(send(fds[0], "x", 1, MSG_DONTWAIT) == -1 && errno == ECONNRESET);
	return 0;
}

/* A program that closes a connection, or goes on with it, before the agent has cut it, which has
 * told of the end of its bytes, resets it. */
static int lost(bool goes_on)
{
	int fds[2];

	with_stream(fds);
	CHECK(write(fds[0], "x", 1) == 1 && stream_of_region()->out_produced == 1);
	stream_of_region()->error = ECONNRESET;
	stream_of_region()->state |= QUEUES_STREAM_DEAD;
	CHECK(write(fds[0], "x", 1) == -1 && errno == ECONNRESET);
	if (goes_on)
		CHECK(send(fds[0], "hole", 4, MSG_NOSIGNAL) == -1);
	else
		close(fds[0]);
	check_reset(fds[1]);
	return 0;
}

/* A connection whose agent is away asks again, more and more seldom, and has lanes once it is
 * there. */
static int later(void)
{
	int fds[2], once;

	away = true;
	connected_pair(fds);
	say(fds[0], fds[1], 500);
	CHECK(asked > 4 && asked < 14);
	away = false;
	once = asked;
	say(fds[0], fds[1], 1100);
	CHECK(asked == once + 2);
	CHECK(lanes->lane[0].attached == 1 && lanes->lane[1].attached == 1);
	return 0;
}

/* So with queues, of which a process has a region only once it has been told of one. */
static int later_by_queues(void)
{
	int fds[2];
	struct connection *c;

	away = by_queues = true;
	connected_pair(fds);
	say(fds[0], fds[1], 500);
	CHECK(!region);
	away = false;
	for (int i = 0; i < 600; i++) { /* nothing goes by the ring, which nobody empties */
		say(fds[0], fds[1], 1);
		say(fds[1], fds[0], 1);
	}
	c = use(fds[0]);
	CHECK(region && c && c->stream);
	return 0;
}

static sigjmp_buf before_call;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(before_call, 1);
}

static void *interrupt(void *thread)
{
	wait_until_asleep(getpid());
	CHECK(pthread_kill(*(pthread_t *)thread, SIGUSR1) == 0);
	return NULL;
}

/* So does one out of whose call the handler of a signal jumps. */
static int jump_out(void)
{
	int fds[2];
	struct connection *c = with_lanes(fds);
	pthread_t self = pthread_self(), thread;
	char byte;

	CHECK(signal(SIGUSR1, jump) != SIG_ERR);
	if (!sigsetjmp(before_call, 1)) {
		CHECK(pthread_create(&thread, NULL, interrupt, &self) == 0);
		read(fds[0], &byte, 1);
		CHECK(!"it came back");
	}
	CHECK(atomic_load(&c->users) == 1);
	return 0;
}

int main(int argc, char **argv)
{
	const char *what = argc == 2 ? argv[1] : "";
	int r = 2;

	alarm(120);
	make_memory();
	if (!strcmp(what, "fork"))
		r = fork_while_asking(true);
	else if (!strcmp(what, "raw-fork"))
		r = fork_while_asking(false);
	else if (!strcmp(what, "tls"))
		r = tls();
	else if (!strcmp(what, "vfork"))
		r = vforked();
	else if (!strcmp(what, "cancel"))
		r = cancel();
	else if (!strcmp(what, "later"))
		r = later();
	else if (!strcmp(what, "later-queues"))
		r = later_by_queues();
	else if (!strcmp(what, "closed"))
		r = closed();
	else if (!strcmp(what, "died"))
		r = died();
	else if (!strcmp(what, "orphaned"))
		r = orphaned_stream(true);
	else if (!strcmp(what, "orphaned-at-once"))
		r = orphaned_stream(false);
	else if (!strcmp(what, "foreign-life"))
		r = foreign_life();
	else if (!strncmp(what, "lost", 4))
		r = lost(what[4]);
	else if (!strcmp(what, "jump"))
		r = jump_out();
	if (r == 0)
		puts("ok");
	return r;
}

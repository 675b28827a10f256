/* Reads and sets every socket option of four levels on TCP sockets in every state, and prints what
 * happened: one line for each family, state, level and option. "sockopts server PORT" is the peer
 * of the connected ones. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define OPTIONS 101
#define ROOM    512

static const char *states[] = {"new", "bound", "listening", "connected", "accepted", "closed by peer"};
enum { NEW, BOUND, LISTENING, CONNECTED, ACCEPTED, CLOSED, STATES };

static const struct {
	const char *name;
	int number;
} levels[] = {{"socket", SOL_SOCKET}, {"ip", IPPROTO_IP}, {"tcp", IPPROTO_TCP}, {"ipv6", IPPROTO_IPV6}};

static struct sockaddr_in peer;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void reset(int fd)
{
	struct linger now = {1, 0};

	setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
	close(fd);
}

static socklen_t fill(struct sockaddr_storage *ss, int family, struct in_addr addr, int port)
{
	struct sockaddr_in *sin = (void *)ss;
	struct sockaddr_in6 *sin6 = (void *)ss;

	memset(ss, 0, sizeof(*ss));
	ss->ss_family = family;
	if (family == AF_INET) {
		sin->sin_addr = addr;
		sin->sin_port = htons(port);
		return sizeof(*sin);
	}
	sin6->sin6_port = htons(port);
	if (addr.s_addr) {
		sin6->sin6_addr.s6_addr[10] = sin6->sin6_addr.s6_addr[11] = 0xff;
		memcpy(&sin6->sin6_addr.s6_addr[12], &addr, 4);
	}
	return sizeof(*sin6);
}

/* A connection to the peer, which closes it at once if closing. */
static int connected(int family, int closing)
{
	struct sockaddr_storage ss;
	socklen_t len = fill(&ss, family, peer.sin_addr, ntohs(peer.sin_port));
	int fd = socket(family, SOCK_STREAM, 0);
	char c = closing ? 'c' : 'k';

	if (fd < 0 || connect(fd, (void *)&ss, len))
		die("connect to the peer");
	if (send(fd, &c, 1, 0) != 1 || recv(fd, &c, 1, 0) != !closing)
		die("talk to the peer");
	return fd;
}

/* A connection that this process accepted from itself, over its own loopback. */
static int accepted(int family, int *client)
{
	struct sockaddr_storage ss;
	struct in_addr any = {0}, loopback = {htonl(INADDR_LOOPBACK)};
	socklen_t len = fill(&ss, family, any, 0);
	int l = socket(family, SOCK_STREAM, 0), fd;

	if (l < 0 || bind(l, (void *)&ss, len) || listen(l, 1) || getsockname(l, (void *)&ss, &len))
		die("listen");
	len = fill(&ss, family, loopback, ntohs(((struct sockaddr_in *)&ss)->sin_port));
	*client = socket(family, SOCK_STREAM, 0);
	if (*client < 0 || connect(*client, (void *)&ss, len))
		die("connect to itself");
	fd = accept(l, NULL, NULL);
	if (fd < 0)
		die("accept");
	close(l);
	return fd;
}

static int make(int family, int state, int *other)
{
	struct sockaddr_storage ss;
	struct in_addr any = {0};
	socklen_t len = fill(&ss, family, any, 0);
	int fd;

	*other = -1;
	if (state == CONNECTED || state == CLOSED)
		return connected(family, state == CLOSED);
	if (state == ACCEPTED)
		return accepted(family, other);
	fd = socket(family, SOCK_STREAM, 0);
	if (fd < 0)
		die("socket");
	if (state >= BOUND && bind(fd, (void *)&ss, len))
		die("bind");
	if (state == LISTENING && listen(fd, 5))
		die("listen");
	return fd;
}

static void print_value(const unsigned char *value, socklen_t len)
{
	printf("%u:", len);
	for (socklen_t i = 0; i < len && i < 32; i++)
		printf("%02x", value[i]);
}

static socklen_t get(int fd, int level, int name, unsigned char *value, socklen_t room)
{
	socklen_t len = room;

	memset(value, 0, ROOM);
	if (getsockopt(fd, level, name, value, &len)) {
		printf(" get%u=E%d", room, errno);
		return 0;
	}
	printf(" get%u=", room);
	print_value(value, len);
	return len;
}

static void set(int fd, int level, int name, const char *what, const void *value, socklen_t len)
{
	printf(" %s=%d", what, setsockopt(fd, level, name, value, len) ? errno : 0);
}

static void look_at(int family, int state, int l, int name)
{
	unsigned char value[ROOM], again[ROOM];
	int fd, other, number[] = {0, 1, -1, 1000}, level = levels[l].number;
	const char *names[] = {"set0", "set1", "set-1", "set1000"};
	socklen_t len;

	printf("ipv%d/%s/%s/%d", family == AF_INET ? 4 : 6, states[state], levels[l].name, name);
	fd = make(family, state, &other);
	len = get(fd, level, name, value, 256);
	get(fd, level, name, again, 1);
	set(fd, level, name, "same", value, len);
	set(fd, level, name, "short", &number[1], 1);
	set(fd, level, name, "empty", &number[1], 0);
	reset(fd);
	if (other >= 0)
		reset(other);
	fd = make(family, state, &other);
	for (int i = 0; i < 4; i++) {
		set(fd, level, name, names[i], &number[i], sizeof(int));
		get(fd, level, name, again, 4);
	}
	printf("\n");
	reset(fd);
	if (other >= 0)
		reset(other);
}

static void serve(int port)
{
	struct sockaddr_storage ss;
	struct in_addr any = {0};
	socklen_t len = fill(&ss, AF_INET6, any, port);
	int l = socket(AF_INET6, SOCK_STREAM, 0), fd;
	char c;

	if (l < 0 || bind(l, (void *)&ss, len) || listen(l, 128))
		die("listen");
	printf("ready\n");
	fflush(stdout);
	signal(SIGCHLD, SIG_IGN);
	/* A process each: some options keep the client's RST from arriving. */
	while ((fd = accept(l, NULL, NULL)) >= 0) {
		if (fork() == 0) {
			alarm(5);
			if (recv(fd, &c, 1, 0) == 1 && c == 'k' && send(fd, &c, 1, 0) == 1)
				while (recv(fd, &c, 1, 0) > 0)
					;
			_exit(0);
		}
		close(fd);
	}
	die("accept");
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	if (!strcmp(argv[1], "server"))
		serve(atoi(argv[2]));
	peer.sin_family = AF_INET;
	peer.sin_port = htons(atoi(argv[2]));
	if (inet_pton(AF_INET, argv[1], &peer.sin_addr) != 1)
		return 2;
	for (int family = AF_INET; family; family = family == AF_INET ? AF_INET6 : 0)
		for (int state = 0; state < STATES; state++)
			for (unsigned l = 0; l < sizeof(levels) / sizeof(levels[0]); l++)
				for (int name = 0; name < OPTIONS; name++)
					look_at(family, state, l, name);
	return 0;
}

/* Looks for what it must not see: "options PEER PORT NEEDLE...": connects to PEER, which echoes,
 * and searches whatever the kernel puts into its memory for the needles (bytes in hexadecimal):
 * socket options of every level and number, on a connected socket, an accepted one and a listener;
 * the error queue, with timestamps asked for in every way; and control messages. A call that fails
 * may have written all the same. Prints one line for each find, and "done". */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ROOM    4096
#define NEEDLES 16
#define NAMES   300

static struct {
	unsigned char bytes[32];
	size_t len;
	const char *text;
} needles[NEEDLES];
static int n_needles;
static struct sockaddr_in peer;

static const int levels[] = {SOL_SOCKET, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_ICMP, IPPROTO_UDP, IPPROTO_RAW,
                             IPPROTO_ICMPV6, 132 /* SCTP */, 136 /* UDPLITE */, 263 /* packet */, 270 /* netlink */,
                             280 /* CAIF, ALG */, 281, 282 /* TLS */, 283 /* XDP */, 284 /* MPTCP */, 285, 286, 287};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void search(const char *where, int a, int b, const unsigned char *p, size_t len)
{
	for (int i = 0; i < n_needles; i++)
		if (memmem(p, len, needles[i].bytes, needles[i].len))
			printf("found %s in %s %d %d\n", needles[i].text, where, a, b);
}

static void read_options(const char *which, int fd)
{
	unsigned char room[ROOM];

	for (size_t l = 0; l < sizeof(levels) / sizeof(levels[0]); l++)
		for (int name = -2; name < NAMES; name++) {
			socklen_t len = sizeof(room);

			memset(room, 0, sizeof(room));
			getsockopt(fd, levels[l], name, room, &len);
			search(which, levels[l], name, room, sizeof(room));
		}
}

static int try_connect(int family)
{
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = peer.sin_port};
	int fd = socket(family, SOCK_STREAM, 0), err;

	six.sin6_addr.s6_addr[10] = six.sin6_addr.s6_addr[11] = 0xff;
	memcpy(&six.sin6_addr.s6_addr[12], &peer.sin_addr, 4);
	err = family == AF_INET ? connect(fd, (void *)&peer, sizeof(peer)) : connect(fd, (void *)&six, sizeof(six));
	if (fd < 0 || err)
		die("connect to the peer");
	return fd;
}

/* Sends a byte, with a control message that asks for timestamps if flags, and waits for its
 * echo. */
static void echo(int fd, unsigned flags)
{
	char c = 'x', control[CMSG_SPACE(4)] = {0};
	struct iovec iov = {&c, 1};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};

	if (flags) {
		struct cmsghdr *h = (void *)control;

		m.msg_control = control;
		m.msg_controllen = sizeof(control);
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SO_TIMESTAMPING;
		h->cmsg_len = CMSG_LEN(4);
		memcpy(CMSG_DATA(h), &flags, 4);
	}
	if (sendmsg(fd, &m, 0) != 1 || recv(fd, &c, 1, 0) != 1)
		die("echo");
}

/* Searches what the error queue holds. A timestamp may come a moment after the echo. */
static int read_errors(const char *what, int a, int fd)
{
	struct pollfd p = {.fd = fd};
	int n = 0;

	while (poll(&p, 1, n ? 0 : 200) > 0) {
		unsigned char data[ROOM] = {0}, control[ROOM] = {0}, name[128] = {0};
		struct iovec iov = {data, sizeof(data)};
		struct msghdr m = {name, sizeof(name), &iov, 1, control, sizeof(control), 0};

		if (recvmsg(fd, &m, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
			break;
		n++;
		search(what, a, 0, data, sizeof(data));
		search(what, a, 1, control, sizeof(control));
		search(what, a, 2, name, sizeof(name));
	}
	return n;
}

static void timestamps(int family)
{
	unsigned record = SOF_TIMESTAMPING_TX_SOFTWARE | SOF_TIMESTAMPING_TX_SCHED | SOF_TIMESTAMPING_TX_ACK;
	unsigned report = SOF_TIMESTAMPING_SOFTWARE, n = 0;
	unsigned settings[] = {0, record | report, record | report | SOF_TIMESTAMPING_OPT_CMSG,
	                       record | report | SOF_TIMESTAMPING_OPT_ID | SOF_TIMESTAMPING_OPT_CMSG | SOF_TIMESTAMPING_OPT_PKTINFO |
	                               SOF_TIMESTAMPING_RX_SOFTWARE};
	char value[5000] = {0};

	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
		int fd = try_connect(family), on = 1;

		for (int name = 1; name < 100; name++) { /* IP_RECV..., IP_PKTINFO and what else asks for something */
			if (family == AF_INET && name != 15)
				setsockopt(fd, IPPROTO_IP, name, &on, sizeof(on));
			if (family == AF_INET6 && name != IPV6_ADDRFORM && name != IPV6_V6ONLY)
				setsockopt(fd, IPPROTO_IPV6, name, &on, sizeof(on));
		}
		memcpy(value, &settings[i], 4);
		setsockopt(fd, SOL_SOCKET, i % 2 ? SO_TIMESTAMPING : 65, value, i == 2 ? sizeof(value) : 4);
		echo(fd, 0);
		n += read_errors("error queue", i, fd);
		echo(fd, record);
		n += read_errors("error queue by control message", i, fd);
		read_options("connected with everything on", fd);
		close(fd);
	}
	if (!n)
		printf("no timestamps came: what was looked for was not there\n");
}

static void listener(int family)
{
	struct sockaddr_storage ss = {.ss_family = family};
	socklen_t len = sizeof(ss);
	int l = socket(family, SOCK_STREAM, 0), c, a, two = 2;

	setsockopt(l, IPPROTO_TCP, TCP_SAVE_SYN, &two, sizeof(two));
	if (l < 0 || bind(l, (void *)&ss, family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6)) || listen(l, 5) ||
	    getsockname(l, (void *)&ss, &len))
		die("listen");
	read_options("listener", l);
	c = socket(family, SOCK_STREAM, 0);
	if (connect(c, (void *)&ss, len))
		die("connect to itself");
	a = accept(l, NULL, NULL);
	read_options("accepted", a);
	close(a);
	close(c);
	close(l);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 3)
		return 2;
	peer.sin_family = AF_INET;
	peer.sin_port = htons(atoi(argv[2]));
	if (inet_pton(AF_INET, argv[1], &peer.sin_addr) != 1)
		return 2;
	for (int i = 3; i < argc && n_needles < NEEDLES; i++, n_needles++) {
		needles[n_needles].text = argv[i];
		for (size_t k = 0; argv[i][2 * k] && k < sizeof(needles[0].bytes); k++)
			if (sscanf(argv[i] + 2 * k, "%2hhx", &needles[n_needles].bytes[needles[n_needles].len++]) != 1)
				return 2;
	}
	for (int family = AF_INET; family; family = family == AF_INET ? AF_INET6 : 0) {
		int fd = try_connect(family);

		read_options("connected", fd);
		close(fd);
		listener(family);
		timestamps(family);
	}
	printf("done\n");
	return 0;
}

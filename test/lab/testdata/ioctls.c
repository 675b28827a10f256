/* Makes every ioctl of 0x8900-0x89ff and 0x8b00-0x8bff on files of many kinds, with many arguments,
 * and prints what came of it; what no file knows (ENOTTY) is only counted. With "race" it makes
 * some while other threads change what file the descriptor is, and prints the names of devices it
 * was told; with "names" it asks for all. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/route.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define IPPROTO_MPTCP_ 262
#define SIZE 4096

static unsigned char *area; /* one page that can be used, then one that cannot */
static unsigned char *other;

static int compat; /* calls are made as 32-bit programs make them */

static int compat_call(int fd, unsigned int cmd, void *arg)
{
	int got = -ENOSYS;

#ifdef __x86_64__
	__asm__ volatile("int $0x80" : "=a"(got) : "a"(54), "b"(fd), "c"(cmd), "d"((unsigned)(uintptr_t)arg) : "memory", "r8", "r9", "r10", "r11");
#endif
	return got < 0 ? got : 0;
}

static int call(int fd, unsigned int cmd, void *arg)
{
	if (compat)
		return compat_call(fd, cmd, arg);
	/* What is in the upper halves does not count; libc would not put it there. */
	return syscall(SYS_ioctl, (unsigned long)fd | 0xabcdUL << 32, (unsigned long)cmd | 0x1234UL << 32, arg) < 0 ? -errno : 0;
}

/* Addresses of the container, which are not the same in each. */
static unsigned char own4[4], own_mac[6];

static void find_own(void)
{
	struct ifaddrs *all, *a;

	if (getifaddrs(&all))
		return;
	for (a = all; a; a = a->ifa_next) {
		if (strcmp(a->ifa_name, "eth0") || !a->ifa_addr)
			continue;
		if (a->ifa_addr->sa_family == AF_INET)
			memcpy(own4, &((struct sockaddr_in *)a->ifa_addr)->sin_addr, sizeof(own4));
		if (a->ifa_addr->sa_family == AF_PACKET)
			memcpy(own_mac, ((struct sockaddr_ll *)a->ifa_addr)->sll_addr, sizeof(own_mac));
	}
	freeifaddrs(all);
}

static unsigned hash(const unsigned char *p, int n)
{
	unsigned h = 2166136261u;
	int skip;

	for (; n > 0; n -= skip, p += skip) {
		skip = n >= 6 && !memcmp(p, own_mac, 6) && *p ? 6 : n >= 4 && !memcmp(p, own4, 4) && *p ? 4 : 1;
		h = (h ^ (skip > 1 ? (unsigned)skip : *p)) * 16777619u;
	}
	return h;
}

static int same_netns(int fd)
{
	struct stat a, b;

	return fstat(fd, &a) == 0 && stat("/proc/self/ns/net", &b) == 0 && a.st_ino == b.st_ino;
}

struct filling {
	const char *name;
	const char *device; /* NULL: nothing is filled in */
	int room;           /* bytes before memory ends; 0: a null pointer, -1: an address of the kernel's */
};

static const struct filling fillings[] = {
	{"zero", "", SIZE}, {"lo", "lo", SIZE},	  {"eth0", "eth0", SIZE}, {"alias", "eth0:7", SIZE}, {"none", "nodev0", SIZE},
	{"long", "a name that is longer than a device's can be", SIZE},
	{"short", "lo", 20}, {"ifreq", "lo", 40}, {"null", "", 0},	  {"kernel", "", -1},
};

static unsigned char *fill(const struct filling *f)
{
	unsigned char *p = f->room > 0 ? area + SIZE - f->room : (unsigned char *)(f->room ? 0xffff800000000000UL : 0);

	if (f->room > 0) {
		memset(area, 0, SIZE);
		memcpy(p, f->device, strnlen(f->device, f->room));
	}
	return p;
}

/* all tries everything; with reduced 1 some of the fillings, with 2 one, with 3 some of the
 * requests. */
static void all(const char *kind, int fd, int reduced)
{
	int first[] = {0x8900, 0x8b00}, unknown = 0, i;
	unsigned int cmd;

	for (unsigned f = 0; f < sizeof(fillings) / sizeof(*fillings); f++) {
		if ((reduced && f % 4) || (reduced > 1 && f))
			continue;
		for (i = 0; i < 2; i++) {
			for (cmd = first[i]; cmd < (unsigned)first[i] + 256; cmd++) {
				unsigned char *p = fill(&fillings[f]);
				int got;

				/* The kernel knows none of the wireless ones, or all. */
				if ((reduced > 2 || (f && i)) && cmd % 16)
					continue;
				got = call(fd, cmd, p);

				if (cmd == SIOCGSKNS && got == 0)
					continue; /* netns_of */
				if (got == -ENOTTY)
					unknown++;
				else
					printf("%s %s %#x: %s %08x\n", kind, fillings[f].name, cmd, got ? strerrorname_np(-got) : "ok", hash(area, SIZE));
			}
		}
	}
	printf("%s: %d unknown\n", kind, unknown);
}

static void list(const char *kind, int fd)
{
	int sizes[] = {0, 1, 39, 40, 79, 80, 4096, 1 << 20, 0x7fffffff, -1, -40};

	for (unsigned i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		for (int where = 0; where < 3; where++) {
			struct ifconf c = {.ifc_len = sizes[i], .ifc_buf = where == 0 ? (char *)other : where == 1 ? NULL : (char *)16};
			int got;

			memset(other, 0, SIZE);
			got = call(fd, SIOCGIFCONF, &c);
			printf("%s list %d %d: %s %d %08x\n", kind, sizes[i], where, got ? strerrorname_np(-got) : "ok", c.ifc_len, hash(other, SIZE));
			for (int k = 0; where == 0 && !got && k < c.ifc_len / (int)sizeof(struct ifreq); k++) {
				struct ifreq *r = (struct ifreq *)other + k;

				printf("  %.16s %s\n", r->ifr_name, inet_ntoa(((struct sockaddr_in *)&r->ifr_addr)->sin_addr));
			}
		}
	}
}

static void special(const char *kind, int fd)
{
	int owners[] = {0, getpid(), -getpgrp(), 1 << 30, -(1 << 30), (int)0x80000000}, back;
	unsigned tools[] = {ETHTOOL_GDRVINFO, ETHTOOL_GLINK, ETHTOOL_GSET, ETHTOOL_GTSO, ETHTOOL_GSSET_INFO, ETHTOOL_GFEATURES, ETHTOOL_SGRO, 0, 9999};
	struct rtentry route = {};
	struct ifreq r = {};
	int got;

	for (unsigned i = 0; i < sizeof(owners) / sizeof(*owners); i++) {
		for (unsigned set = 0x8901; set <= 0x8902; set++) {
			got = call(fd, set, &owners[i]);
			back = 12345;
			call(fd, set + 2, &back);
			printf("%s owner %u %#x: %d, %s\n", kind, i, set, got, back == 0 ? "none" : back == getpid() ? "self" : back == -getpgrp() ? "group" : "other");
			got = fcntl(fd, F_SETOWN, i % 2 ? getpid() : 0);
			got = call(fd, set + 2, &back);
			printf("  %d %d\n", got, back == (i % 2 ? getpid() : 0));
		}
	}
	for (unsigned i = 0; i < sizeof(tools) / sizeof(*tools); i++) {
		for (int end = 0; end < 2; end++) {
			unsigned char *data = end ? area + SIZE - 8 : other;

			memset(other, 0, SIZE);
			memset(area, 0, SIZE);
			memcpy(data, &tools[i], 4);
			strcpy(r.ifr_name, "eth0");
			r.ifr_data = (char *)data;
			got = call(fd, SIOCETHTOOL, &r);
			printf("%s ethtool %#x %d: %s %08x %08x %d\n", kind, tools[i], end, got ? strerrorname_np(-got) : "ok", hash(other, SIZE), hash(area, SIZE),
			       r.ifr_data == (char *)data);
		}
	}
	((struct sockaddr_in *)&route.rt_dst)->sin_family = AF_INET;
	((struct sockaddr_in *)&route.rt_dst)->sin_addr.s_addr = htonl(0xc6336400); /* 198.51.100.0 */
	((struct sockaddr_in *)&route.rt_genmask)->sin_addr.s_addr = htonl(0xffffff00);
	route.rt_flags = RTF_UP;
	strcpy((char *)other, "lo");
	for (int where = 0; where < 3; where++) {
		route.rt_dev = where == 0 ? (char *)other : where == 1 ? "nodev0 and more than 15 bytes" : (char *)16;
		for (unsigned cmd = SIOCADDRT; cmd <= SIOCDELRT; cmd++) {
			got = call(fd, cmd, &route);
			printf("%s route %d %#x: %s\n", kind, where, cmd, got ? strerrorname_np(-got) : "ok");
		}
	}
	got = syscall(SYS_ioctl, fd, SIOCGSKNS, 0);
	printf("%s netns_of: %s\n", kind, got < 0 ? strerrorname_np(errno) : same_netns(got) && fcntl(got, F_GETFD) == FD_CLOEXEC ? "own" : "other");
	if (got >= 0)
		close(got);
}

static void sockets(void)
{
	struct {
		const char *name;
		int domain, type, protocol;
	} kinds[] = {
		{"tcp4", AF_INET, SOCK_STREAM, 0}, {"tcp6", AF_INET6, SOCK_STREAM, 0},	  {"mptcp", AF_INET, SOCK_STREAM, IPPROTO_MPTCP_},
		{"udp4", AF_INET, SOCK_DGRAM, 0},  {"udp6", AF_INET6, SOCK_DGRAM, 0},	  {"unix", AF_UNIX, SOCK_STREAM, 0},
		{"raw", AF_INET, SOCK_RAW, 1},	   {"netlink", AF_NETLINK, SOCK_RAW, 0}, {"packet", AF_PACKET, SOCK_DGRAM, 0},
	};
	int pair[2], fd;

	for (unsigned i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
		fd = socket(kinds[i].domain, kinds[i].type, kinds[i].protocol);
		if (fd < 0) {
			printf("%s: %s\n", kinds[i].name, strerrorname_np(errno));
			continue;
		}
		special(kinds[i].name, fd);
		list(kinds[i].name, fd);
		all(kinds[i].name, fd, i == 0 ? 0 : i == 1 || i == 3 ? 1 : 2);
		close(fd);
	}
	if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0)
		all("pair", pair[0], 2);
}

static void files(void)
{
	int pair[2];

	if (pipe(pair) == 0)
		all("pipe", pair[1], 2);
	all("file", open("/proc/self/exe", O_RDONLY), 2);
	all("path", open("/", O_PATH), 2);
	all("event", eventfd(0, 0), 2);
	all("closed", 1000, 2);
	all("negative", -1, 3);
}

static int swapped;
static volatile int stop;

static void *swap(void *arg)
{
	int tcp = socket(AF_INET, SOCK_STREAM, 0), own[] = {socket(AF_INET, SOCK_DGRAM, 0), open("/dev/null", O_RDONLY), socket(AF_UNIX, SOCK_STREAM, 0)};

	(void)arg;
	for (unsigned i = 0; !stop; i++) {
		dup2(own[i % 3], swapped);
		dup2(tcp, swapped);
	}
	return NULL;
}

static void *change(void *arg)
{
	while (!stop) { /* the request and its pointers, while the other thread is in the call */
		memcpy(arg, "lo\0\0", 4);
		memcpy(arg, "eth0", 4);
	}
	return NULL;
}

/* names prints every device that a socket of either kind shows, by each way of making the call. */
static void names(void)
{
	int fds[] = {socket(AF_INET, SOCK_STREAM, 0), socket(AF_INET6, SOCK_STREAM, 0), socket(AF_INET, SOCK_DGRAM, 0)};
	struct ifreq *r = (void *)other;

	for (int i = 0; i < 6; i++) {
		compat = i >= 3;
		for (int k = 1; k < 64; k++) {
			memset(r, 0, sizeof(*r));
			r->ifr_ifindex = k;
			if (call(fds[i % 3], SIOCGIFNAME, r) == 0)
				printf("device %.16s\n", r->ifr_name);
		}
	}
}

/* show prints a device's name: everyone's for so many calls, after that those only that the
 * container does not have. */
static void show(const char *name, int everyone)
{
	if (everyone || (strcmp(name, "lo") && strcmp(name, "eth0")))
		printf("device %.16s\n", name);
}

/* race makes so many calls, and goes on for a second or two: those that nobody traps are over
 * before the other threads have begun. */
static void race(int calls)
{
	struct ifreq *r = (void *)other;
	pthread_t threads[2];
	time_t end = time(NULL) + 2;

	swapped = socket(AF_INET, SOCK_DGRAM, 0);
	pthread_create(&threads[0], NULL, swap, NULL);
	pthread_create(&threads[1], NULL, change, area);
	for (int i = 0; i < calls || time(NULL) < end; i++) {
		memset(r, 0, sizeof(*r));
		r->ifr_ifindex = i % 32 + 1;
		if (call(swapped, SIOCGIFNAME, r) == 0)
			show(r->ifr_name, i < calls);
		strcpy(r->ifr_name, "heddle-vx0");
		if (call(swapped, SIOCGIFHWADDR, r) == 0)
			show(r->ifr_name, i < calls);
		call(swapped, SIOCGIFHWADDR, area);
	}
	stop = 1;
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
}

int main(int argc, char **argv)
{
	/* Below 4 GiB, for compat_call, and above where the kernel may put the heap: up to 1 GiB behind
	 * the program. */
	area = mmap((void *)0x60000000, 2 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	other = mmap((void *)0x70000000, 512 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (area == MAP_FAILED || other == MAP_FAILED || mprotect(area + SIZE, SIZE, PROT_NONE)) {
		perror("mmap");
		return 1;
	}
	find_own();
	if (argc > 2 && strcmp(argv[1], "race") == 0) {
		race(atoi(argv[2]));
	} else if (argc > 1 && strcmp(argv[1], "names") == 0) {
		names();
	} else {
		sockets();
		files();
	}
	puts("end");
	return 0;
}

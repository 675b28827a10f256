// A program of another C library than the pool's: many sockets, then one connection to itself. It
// says whether the pool is in it.
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// A loop that outlasts the time after which a process has a pool.
#define SOCKETS 5000

static int fail(const char *what)
{
	perror(what);
	return 1;
}

static int is_tcp(int fd)
{
	int protocol = 0;
	socklen_t length = sizeof protocol;
	return !getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) && protocol == IPPROTO_TCP;
}

static int has_library(const char *name)
{
	char line[512];
	int found = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		found |= strstr(line, name) != NULL;
	if (maps)
		fclose(maps);
	return found;
}

int main(void)
{
	for (int i = 0; i < SOCKETS; i++) {
		int fd = socket(AF_INET, SOCK_STREAM, 0);
		if (fd < 0 || !is_tcp(fd))
			return fail("socket");
		close(fd);
	}
	int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof at;
	if (bind(listener, (struct sockaddr *)&at, length) || listen(listener, 1) ||
	    getsockname(listener, (struct sockaddr *)&at, &length))
		return fail("listen");
	if (connect(client, (struct sockaddr *)&at, length))
		return fail("connect");
	int server = accept(listener, NULL, NULL);
	char got[4] = "";
	if (write(client, "abc", 3) != 3 || read(server, got, 3) != 3 || strcmp(got, "abc"))
		return fail("read");
	printf("pool %d, musl %d\n", has_library("heddle-pool"), has_library("linux-musl"));
	return 0;
}

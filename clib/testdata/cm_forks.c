/* Children that use RDMA-CM, forked while other threads of their parent are in the middle of it. */

#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <pthread.h>
#include <unistd.h>

#define THREADS  4
#define CHILDREN 1000
/* Of a child that waits for a lock that nobody releases. */
#define SECONDS  20

static atomic_bool ends;

static void must(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	exit(1);
}

static void use(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;

	must(channel != NULL, "channel");
	must(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0, "id");
	must(rdma_destroy_id(id) == 0, "destroy id");
	rdma_destroy_event_channel(channel);
}

static void *busy(void *unused)
{
	while (!ends)
		use();
	return unused;
}

int main(void)
{
	pthread_t threads[THREADS];
	int status;

	use();
	for (int i = 0; i < THREADS; i++)
		must(pthread_create(&threads[i], NULL, busy, NULL) == 0, "thread");
	for (int n = 0; n < CHILDREN; n++) {
		pid_t child = fork();

		must(child >= 0, "fork");
		if (!child) {
			alarm(SECONDS);
			struct rdma_event_channel *channel = rdma_create_event_channel();

			_exit(channel ? 0 : 1);
		}
		must(waitpid(child, &status, 0) == child, "wait");
		if (status) {
			fprintf(stderr, "child %d: status %#x\n", n, status);
			exit(1);
		}
	}
	ends = true;
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(threads[i], NULL) == 0, "join");
	return 0;
}

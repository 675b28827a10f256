/* A thread that is cancelled in read() runs what its own functions are to do at their end, also
 * behind a library that is preloaded. Prints "ok". */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static int ended, fds[2];

static void end(int *number)
{
	ended = *number;
}

static void *receive(void *arg)
{
	__attribute__((cleanup(end))) int number = 1;
	char byte;

	return read(fds[0], &byte, 1) == 1 ? arg : NULL;
}

int main(void)
{
	pthread_t thread;
	void *r;

	alarm(60);
	if (pipe(fds) || pthread_create(&thread, NULL, receive, NULL) || pthread_cancel(thread) ||
	    pthread_join(thread, &r))
		return 1;
	puts(r != PTHREAD_CANCELED ? "not cancelled" : ended ? "ok" : "nothing was done at the end");
	return 0;
}

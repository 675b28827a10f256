/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Asks the agent for the lanes of a connection, by a socket() that is trapped: the kernel takes
 * three of its arguments, the agent looks at the others. */

#define _GNU_SOURCE
#include <dlfcn.h>

#include "guest/internal.h"
#include "trap/call.h"

/* Gives what the agent answers, or -errno. One that does not know the question gives a socket. */
long ask_agent(unsigned long magic, long question)
{
	long r;
	int tries = 0;

	do
		r = trapped_call(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0, (long)magic, question,
		                 (long)~magic);
	while (r == -EINTR && ++tries < 16);
	return r;
}

/* Gives a file, or -errno. */
long ask_for_lanes(int fd, int role)
{
	return ask_agent(LANES_ASK, (long)role << 32 | fd);
}

extern void *dlsym(void *, const char *) __attribute__((weak));

/* NULL under a C library whose dlsym is in a library of its own that the program has not: what asks
 * for it then makes the system call. */
void *next_of(const char *name, void *_Atomic *kept)
{
	void *f = atomic_load_explicit(kept, memory_order_relaxed);

	if (!f && dlsym) {
		f = dlsym(RTLD_NEXT, name);
		atomic_store_explicit(kept, f, memory_order_relaxed);
	}
	return f;
}

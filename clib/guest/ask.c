/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Asks the agent for the lanes of a connection, by a socket() that is trapped: the kernel takes
 * three of its arguments, the agent looks at the others. */

#define _GNU_SOURCE
#include <dlfcn.h>

#include "guest/internal.h"

/* The registers of the last three arguments are cleared after the call: the program's next trapped
 * call must not have them. */
static long trapped_socket(long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall\n\txorl %%r10d, %%r10d\n\txorl %%r8d, %%r8d\n\txorl %%r9d, %%r9d"
	                 : "=a"(result), "+r"(r10), "+r"(r8), "+r"(r9)
	                 : "a"(SYS_socket), "D"(AF_INET), "S"(SOCK_STREAM | SOCK_CLOEXEC), "d"(0)
	                 : "rcx", "r11", "memory", "cc");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = SYS_socket;
	register long x0 __asm__("x0") = AF_INET;
	register long x1 __asm__("x1") = SOCK_STREAM | SOCK_CLOEXEC;
	register long x2 __asm__("x2") = 0;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0\n\tmov x3, xzr\n\tmov x4, xzr\n\tmov x5, xzr"
	                 : "+r"(x0), "+r"(x3), "+r"(x4), "+r"(x5)
	                 : "r"(x8), "r"(x1), "r"(x2)
	                 : "memory", "cc");
	return x0;
#else
#error "no lanes for this architecture"
#endif
}

/* Gives what the agent answers, or -errno. One that does not know the question gives a socket. */
long ask_agent(unsigned long magic, long question)
{
	long r;
	int tries = 0;

	do
		r = trapped_socket((long)magic, question, (long)~magic);
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

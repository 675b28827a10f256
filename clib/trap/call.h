/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* System calls that the agent traps, of which the kernel takes fewer arguments than it does. */
#ifndef HEDDLE_TRAP_CALL_H
#define HEDDLE_TRAP_CALL_H

/* Clears the registers of the last three arguments after the call: the program's next trapped call
 * must not have them. */
static inline long trapped_call(long n, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall\n\txorl %%r10d, %%r10d\n\txorl %%r8d, %%r8d\n\txorl %%r9d, %%r9d"
	                 : "=a"(result), "+r"(r10), "+r"(r8), "+r"(r9)
	                 : "a"(n), "D"(a), "S"(b), "d"(c)
	                 : "rcx", "r11", "memory", "cc");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0\n\tmov x3, xzr\n\tmov x4, xzr\n\tmov x5, xzr"
	                 : "+r"(x0), "+r"(x3), "+r"(x4), "+r"(x5)
	                 : "r"(x8), "r"(x1), "r"(x2)
	                 : "memory", "cc");
	return x0;
#else
#error "no calls for this architecture"
#endif
}

#endif

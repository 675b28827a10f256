/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Socket options. The socket lives in the node's namespace, so what the kernel would do to it there
 * is asked first: an allow-list. What is not passed on is one of
 *
 *   kept      the program's wish is noted in the tag and read back; the kernel's own setting is
 *             Heddle's
 *   denied    EPERM: it would reach the node, or show the underlay
 *   unknown   the answer the kernel has for options that it does not know
 *
 * A get hook runs when the kernel has answered already, into the program's memory: it can change an
 * answer, not hide one. So what must not be seen has to be prevented when it is set.
 *
 * ep is NULL for sockets that outlive their endpoint. */
#ifndef HEDDLE_SOCK_SOCKOPT_H
#define HEDDLE_SOCK_SOCKOPT_H

#include "include/kernel.h"

#define OPTVAL_PAGE   4096
#define IFNAMSIZ_     16
#define SOL_NETFILTER 64 /* first of 64 options of IP and IPv6 level that are netfilter's */

/* What set_*_level decide. */
enum sockopt_verdict {
	SOCKOPT_DENY,
	SOCKOPT_PASS,
	SOCKOPT_UNKNOWN,
	SOCKOPT_DONE, /* answered: the kernel need not see it */
	SOCKOPT_FAIL, /* answered, with an errno that is set */
};

static __always_inline int fail_sockopt(int err)
{
	bpf_set_retval(-err);
	return SOCKOPT_FAIL;
}

#endif

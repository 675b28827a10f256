/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* RDMA-CM: what librdmacm opens as /dev/infiniband/rdma_cm and writes commands to. The descriptor
 * that it gets is a socket on which the router says that events are there; the commands go over a
 * connection of its own. */
#ifndef HEDDLE_VERBS_CM_H
#define HEDDLE_VERBS_CM_H

#include <stdbool.h>
#include <stddef.h>

struct stat;

/* cm.c: open(), write(), fstat() and close() of librdmacm. Each returns what the call of that name
 * does, with errno; what is not about the device goes to the kernel. */
int cm_open(const char *path, int flags, int mode);
long cm_write(int fd, const void *bytes, size_t length);
int cm_fstat(int fd, struct stat *status);
int cm_close(int fd);
/* What a child of fork() needs is whole in it: to be called around fork(). */
void cm_fork_prepare(void);
void cm_fork_done(void);

/* cm_hook.c */
/* Has librdmacm call these, if the process has it. It opens the device after it has asked for the
 * list of devices. */
void cm_hook(void);

#endif

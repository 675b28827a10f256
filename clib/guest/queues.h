/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What queues.c does for connections whose bytes the service of queues sends:
 * docs/protocols/stack-queues.md. */
#ifndef HEDDLE_GUEST_QUEUES_H
#define HEDDLE_GUEST_QUEUES_H

#include "guest/internal.h"
#include "stack/queues.h"

/* What the program's socket() asks the agent with, as its fourth and sixth argument; the fifth is
 * the question: QUEUES_ASK_REGION, or a descriptor, and the number of the region above that. */
#define QUEUES_ASK        0xa35b91d0c24e7f68UL
#define QUEUES_ASK_REGION 65536UL
#define QUEUES_ASK_BITS   17

/* Gives a connection a stream, if the agent has one for it: 0, or -errno, -EAGAIN if it may
 * later. */
long queue_attach(struct connection *c, int fd);
/* In a process that was forked: it has no region. */
void queue_forked(void);
/* Before the process forks, or its connection becomes another's: no more bytes go by the ring. */
void queue_leave(struct connection *c);
void queue_release(struct connection *c);

/* As those of lanes. */
long queue_send(struct connection *c, int fd, struct buffers *b, int flags);
long queue_receive(struct connection *c, int fd, struct buffers *b, int flags);
long queue_native(struct connection *c, int fd, long (*f)(void *), void *arg);
bool queue_hand_over(struct connection *c, int fd);
/* Has all bytes from here on go by the socket itself, once the ring is empty. */
void queue_finish(struct connection *c, int fd);
/* Before a descriptor is closed. */
void queue_settle(struct connection *c, int fd);
long queue_shutdown(struct connection *c, int fd, int how);
/* The error that the kernel has told the service alone; 0: none. It is told once. */
int queue_error(struct connection *c);

#endif

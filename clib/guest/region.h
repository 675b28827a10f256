/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The region of queues that this process has. */
#ifndef HEDDLE_GUEST_REGION_H
#define HEDDLE_GUEST_REGION_H

#include "guest/queues.h"

bool region_exists(void);
/* 0 if there is one, or the agent gives one; else -errno, -EAGAIN if it may later. */
long region_ready(void);
/* Asks for a stream for a descriptor: its number, or -errno. */
long region_ask(int fd);
/* Where a stream lies; false: it has no such number. */
bool region_stream(uint32_t number, struct queues_stream **words, uint8_t **ring);
struct queues_header *region_header(void);
uint32_t region_capacity(void);
/* Pushes a job and rings. False: there is no service any more. */
bool region_push(const struct queues_nqe *nqe);
bool region_lives(void);
/* Whether its service is known to be gone, and with it whatever was in rings. */
bool region_died(void);
void region_forked(void);
/* Whether descriptors that the program is about to close, or to use for something else, are the
 * region's, which it knows nothing of. */
bool region_has(unsigned first, unsigned last);
/* Before that: closes the others. Connections have left. */
void region_give_up(unsigned first, unsigned last);

#endif

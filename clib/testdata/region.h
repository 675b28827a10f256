/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A region of queues as the service makes it, for tests of the guest library that play it. */
#ifndef HEDDLE_TEST_REGION_H
#define HEDDLE_TEST_REGION_H

#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "guest/queues.h"
#include "testdata/pair.h"

/* It has one stream. */
enum { SLOTS = 16, JOBS_AT = 1024, COMPLETIONS_AT = 2432, STREAMS_AT = 3840, BYTES_AT = 4096 };
static struct queues_header *region;
static int service; /* the service's end of its socket */

static struct queues_stream *stream_of_region(void)
{
	return (struct queues_stream *)((uint8_t *)region + STREAMS_AT);
}

static void make_ring(uint64_t at)
{
	static const struct {
		char magic[8];
		uint32_t version, slot_size, capacity;
	} head = {{'H', 'D', 'L', 'R', 'I', 'N', 'G', 0}, 1, 64, SLOTS};

	memcpy((uint8_t *)region + at, &head, 20);
}

/* Gives the socket on which it is told of. */
static int make_region(void)
{
	struct queues_header head = {.magic = QUEUES_MAGIC,
	                             .version = QUEUES_VERSION,
	                             .flags = QUEUES_EDGES,
	                             .size = BYTES_AT + 2 * QUEUES_CAPACITY_MIN,
	                             .slots = SLOTS,
	                             .streams = 1,
	                             .capacity = QUEUES_CAPACITY_MIN,
	                             .jobs_at = JOBS_AT,
	                             .completions_at = COMPLETIONS_AT,
	                             .streams_at = STREAMS_AT,
	                             .bytes_at = BYTES_AT};
	struct queues_made made = {.head = {.type = QUEUES_MADE, .region = 1}, .size = head.size};
	int fds[3] = {memfd_create("region", MFD_ALLOW_SEALING), eventfd(0, 0), eventfd(0, 0)}, ends[2];
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(fds))];
	} control = {.head = {CMSG_LEN(sizeof(fds)), SOL_SOCKET, SCM_RIGHTS}};
	struct msghdr m = {.msg_iov = &(struct iovec){&made, sizeof(made)},
	                   .msg_iovlen = 1,
	                   .msg_control = &control,
	                   .msg_controllen = sizeof(control)};

	CHECK(ftruncate(fds[0], (off_t)head.size) == 0 &&
	      fcntl(fds[0], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
	region = mmap(NULL, head.size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	CHECK(region != MAP_FAILED);
	memcpy(region, &head, 128);
	make_ring(JOBS_AT);
	make_ring(COMPLETIONS_AT);
	memcpy(CMSG_DATA(&control.head), fds, sizeof(fds));
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
	CHECK(sendmsg(ends[0], &m, 0) == sizeof(made));
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	service = ends[0];
	return ends[1];
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The other process of c_peer.rs: sends back each slot that comes, by clib/ring/ring.h. Arguments:
 * the descriptors of the memory, of its ringing and of its waiting end; the memory's length, the
 * rings' capacity, the offsets of the ring to read and of the one to write, of the doorbell to ring
 * and of the one to sleep in; the number of slots. Ends with 0, or with the line where it
 * failed. */

#include <stdlib.h>
#include <sys/epoll.h>

#include "ring/ring.h"

#define BATCH 5
#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition))                                                                  \
			exit(__LINE__);                                                            \
	} while (0)

static struct ring_producer producer;
static struct ring_consumer consumer;
static uint8_t *memory;
static size_t ring_at, sleep_at;
static int ring_fd, wait_fd;

static int has_work(int for_room)
{
	uint8_t slot[RING_SLOT_SIZE];

	return for_room ? ring_room(&producer, 1) > 0 : ring_peek(&consumer, slot, 1) > 0;
}

static void sleep_until_work(int for_room)
{
	_Atomic uint32_t *asleep = (_Atomic uint32_t *)(memory + sleep_at);
	struct epoll_event event;

	atomic_store_explicit(asleep, 1, memory_order_relaxed);
	atomic_thread_fence(memory_order_seq_cst);
	if (!has_work(for_room))
		CHECK(epoll_wait(wait_fd, &event, 1, 60000) == 1);
	atomic_store_explicit(asleep, 0, memory_order_relaxed);
}

static void send_back(const uint8_t *slots, uint32_t count)
{
	while (count > 0) {
		uint32_t room = ring_room(&producer, count);
		uint32_t now = room < count ? room : count;

		for (uint32_t i = 0; i < now; i++)
			memcpy(ring_free_slot(&producer, i), slots + i * RING_SLOT_SIZE, RING_SLOT_SIZE);
		ring_push(&producer, now);
		ring_doorbell(memory + ring_at, ring_fd);
		slots += now * RING_SLOT_SIZE;
		count -= now;
		if (count > 0)
			sleep_until_work(1);
		CHECK(!producer.end.broken);
	}
}

int main(int count, char **words)
{
	CHECK(count == 11);
	int fd = atoi(words[1]);
	size_t length = strtoul(words[4], NULL, 10);
	uint32_t capacity = (uint32_t)atoi(words[5]);
	unsigned long left = strtoul(words[10], NULL, 10);

	ring_fd = atoi(words[2]);
	wait_fd = atoi(words[3]);
	ring_at = strtoul(words[8], NULL, 10);
	sleep_at = strtoul(words[9], NULL, 10);
	CHECK(ring_map(fd, length + 1) == NULL && errno == EPROTO);
	memory = ring_map(fd, length);
	CHECK(memory);
	CHECK(!ring_consumer_attach(&consumer, memory, length, strtoul(words[6], NULL, 10), 2 * capacity));
	CHECK(ring_consumer_attach(&consumer, memory, length, strtoul(words[6], NULL, 10), capacity));
	CHECK(ring_producer_attach(&producer, memory, length, strtoul(words[7], NULL, 10), capacity));
	while (left > 0) {
		uint8_t slots[BATCH * RING_SLOT_SIZE];
		uint32_t got = ring_peek(&consumer, slots, BATCH);

		CHECK(!consumer.end.broken);
		if (got == 0) {
			sleep_until_work(0);
			continue;
		}
		ring_pop(&consumer, got);
		send_back(slots, got);
		left -= got;
	}
	return 0;
}

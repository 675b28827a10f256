/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Rings in sealed shared memory, version 1: the peer's side of docs/protocols/shared-rings.md in C.
 * The crate rust/shared-ring is the reference; rust/shared-ring/tests/c_peer.rs runs the two
 * against each other.
 * A producer, a consumer and a ringer each have one owner: whoever calls serializes the calls. */
#ifndef HEDDLE_RING_H
#define HEDDLE_RING_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define RING_SLOT_SIZE    64
#define RING_SLOTS_OFFSET 384
#define RING_ALIGNMENT    128
#define RING_CAPACITY_MAX (1u << 20)

/* Constants that older headers lack. */
#define RING_GET_SEALS   1034
#define RING_SIZE_SEALS  (2 | 4)    /* F_SEAL_SHRINK, F_SEAL_GROW */
#define RING_WRITE_SEALS (8 | 16)   /* F_SEAL_WRITE, F_SEAL_FUTURE_WRITE */
#define RING_TMPFS       0x01021994 /* TMPFS_MAGIC */

/* Bytes that a ring of this many slots takes. */
static inline size_t ring_size(uint32_t capacity)
{
	return RING_SLOTS_OFFSET + (size_t)capacity * RING_SLOT_SIZE;
}

/* Maps memory that the peer has made, after checking that nobody can change its size any more and
 * that it has `length` bytes: in the place of what is mapped at `place`, unless that is NULL.
 * Returns NULL with errno: EPROTO if the peer does not keep to the rules. The descriptor stays the
 * caller's. */
static inline void *ring_map_at(void *place, int fd, size_t length)
{
	int flags = MAP_SHARED | (place ? MAP_FIXED : 0);
	struct stat status;
	struct statfs system;
	long seals = syscall(SYS_fcntl, fd, RING_GET_SEALS, 0);

	if (seals < 0 || (seals & RING_SIZE_SEALS) != RING_SIZE_SEALS || (seals & RING_WRITE_SEALS) ||
	    syscall(SYS_fstatfs, fd, &system) < 0 || system.f_type != RING_TMPFS ||
	    /* Asked after the seals: from here on no answer can change. */
	    syscall(SYS_fstat, fd, &status) < 0 || (uint64_t)status.st_size != length) {
		errno = EPROTO;
		return NULL;
	}
	void *base = (void *)syscall(SYS_mmap, place, length, PROT_READ | PROT_WRITE, flags, fd, 0L);
	return base == MAP_FAILED ? NULL : base;
}

static inline void *ring_map(int fd, size_t length)
{
	return ring_map_at(NULL, fd, length);
}

static inline void ring_unmap(void *base, size_t length)
{
	syscall(SYS_munmap, base, length);
}

/* What both sides of a ring keep in memory of their own. */
struct ring_end {
	uint8_t *base;     /* of the ring in shared memory */
	uint32_t capacity; /* slots */
	uint32_t own;      /* this side's index */
	uint32_t peer;     /* the other's, as it was read last */
	bool broken;       /* the peer does not keep to the rules: the ring is dead */
};

struct ring_producer {
	struct ring_end end;
};

struct ring_consumer {
	struct ring_end end;
};

static inline _Atomic uint32_t *ring_produced(const struct ring_end *end)
{
	return (_Atomic uint32_t *)(end->base + 128);
}

static inline _Atomic uint32_t *ring_consumed(const struct ring_end *end)
{
	return (_Atomic uint32_t *)(end->base + 256);
}

/* Takes a side of the ring at `offset`, whose place and capacity are known from elsewhere. False if
 * that is no ring of this size and version in `length` bytes, or if this side of it was used
 * before. */
static inline bool ring_attach(struct ring_end *end, void *memory, size_t length, size_t offset,
                               uint32_t capacity)
{
	uint8_t *base = (uint8_t *)memory + offset;
	struct {
		uint8_t magic[8];
		uint32_t version, slot_size, capacity;
	} head;

	if (capacity == 0 || capacity > RING_CAPACITY_MAX || (capacity & (capacity - 1)) ||
	    offset % RING_ALIGNMENT || offset > length || length - offset < ring_size(capacity))
		return false;
	memcpy(&head, base, 20);
	if (memcmp(head.magic, "HDLRING", 8) || head.version != 1 || head.slot_size != RING_SLOT_SIZE ||
	    head.capacity != capacity)
		return false;
	*end = (struct ring_end){.base = base, .capacity = capacity};
	return true;
}

static inline bool ring_producer_attach(struct ring_producer *p, void *memory, size_t length, size_t offset,
                                        uint32_t capacity)
{
	return ring_attach(&p->end, memory, length, offset, capacity) &&
	       atomic_load_explicit(ring_produced(&p->end), memory_order_relaxed) == 0;
}

static inline bool ring_consumer_attach(struct ring_consumer *c, void *memory, size_t length, size_t offset,
                                        uint32_t capacity)
{
	return ring_attach(&c->end, memory, length, offset, capacity) &&
	       atomic_load_explicit(ring_consumed(&c->end), memory_order_relaxed) == 0;
}

/* Free slots, at least `want` of them if there are so many: the peer's index is read again only if
 * the last one leaves fewer. */
static inline uint32_t ring_room(struct ring_producer *p, uint32_t want)
{
	struct ring_end *end = &p->end;
	uint32_t room = end->capacity - (end->own - end->peer);

	if (room >= want || end->broken)
		return end->broken ? 0 : room;
	uint32_t value = atomic_load_explicit(ring_consumed(end), memory_order_acquire);
	if (end->own - value > end->own - end->peer) {
		end->broken = true;
		return 0;
	}
	end->peer = value;
	return end->capacity - (end->own - value);
}

/* Where the slot lies that is `ahead` behind the last one pushed: it has to be free. The peer may
 * write to it at any time. */
static inline void *ring_free_slot(const struct ring_producer *p, uint32_t ahead)
{
	return p->end.base + RING_SLOTS_OFFSET +
	       (size_t)((p->end.own + ahead) & (p->end.capacity - 1)) * RING_SLOT_SIZE;
}

/* Shows the next `count` slots to the consumer. */
static inline void ring_push(struct ring_producer *p, uint32_t count)
{
	p->end.own += count;
	atomic_store_explicit(ring_produced(&p->end), p->end.own, memory_order_release);
}

/* Copies at most `count` slots to memory of this side and returns how many. The caller frees them
 * by ring_pop. */
static inline uint32_t ring_peek(struct ring_consumer *c, void *slots, uint32_t count)
{
	struct ring_end *end = &c->end;

	if (end->peer - end->own < count && !end->broken) {
		uint32_t most = end->own + end->capacity;
		uint32_t value = atomic_load_explicit(ring_produced(end), memory_order_acquire);
		if (most - value > most - end->peer)
			end->broken = true;
		else
			end->peer = value;
	}
	if (end->broken)
		return 0;
	if (count > end->peer - end->own)
		count = end->peer - end->own;
	for (uint32_t i = 0; i < count; i++) {
		size_t at = (end->own + i) & (end->capacity - 1);
		memcpy((uint8_t *)slots + (size_t)i * RING_SLOT_SIZE,
		       end->base + RING_SLOTS_OFFSET + at * RING_SLOT_SIZE, RING_SLOT_SIZE);
	}
	return count;
}

/* Gives slots back to the producer. */
static inline void ring_pop(struct ring_consumer *c, uint32_t count)
{
	c->end.own += count;
	atomic_store_explicit(ring_consumed(&c->end), c->end.own, memory_order_release);
}

/* Wakes the peer if it sleeps in the doorbell, or serves others and does not look here: after each
 * batch of ring_push or ring_pop. */
static inline void ring_doorbell(void *word, int eventfd)
{
	_Atomic uint32_t *asleep = word;
	uint32_t yes = 1;
	uint64_t one = 1;

	atomic_thread_fence(memory_order_seq_cst);
	if (atomic_load_explicit(asleep, memory_order_relaxed) == 1 &&
	    atomic_compare_exchange_strong_explicit(asleep, &yes, 0, memory_order_relaxed,
	                                            memory_order_relaxed))
		syscall(SYS_write, eventfd, &one, sizeof(one)); /* EAGAIN: it has rings enough */
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Zero copy: pages of registered buffers become memory that the router has mapped, and pages of the
 * program's own again. */
#ifndef HEDDLE_VERBS_REMAP_H
#define HEDDLE_VERBS_REMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct context;
struct part;

/* Bytes that are registered: the member of a memory region by which it is known here. */
struct registration {
	struct registration *next;
	struct context *context;
	struct part *part; /* the mapped part of them, or NULL */
	uintptr_t at, end;
};

/* Notes bytes that are about to be registered, having first made whole pages of them memory that
 * the router has mapped, if that can be. `memory` is its handle then, else 0, and `offset` where
 * the first byte lies from its start, modulo 2^64. */
void remap_begin(struct context *c, struct registration *r, void *at, size_t length, uint32_t *memory,
                 uint64_t *offset);
/* The router has forgotten the registration, or has never had it. */
void remap_end(struct registration *r);
/* The context is about to be closed: so are its registrations. */
void remap_close(struct context *c);

/* pages.c: what mappings are, and how they are exchanged. */

/* Which mappings a range is to consist of. */
struct wanted {
	bool is_private;        /* private memory without a file, to be read and written */
	uint64_t device, inode; /* else a shared mapping of this file, */
	uintptr_t base;         /* which begins here */
};

/* Part of a range that is as it was wanted. */
struct run {
	uintptr_t at, end;
	int protection;
};

/* Finds such parts of a range, in order and at most `most`; -1 if that cannot be known. */
int pages_find(uintptr_t at, uintptr_t end, const struct wanted *wanted, struct run *runs, int most);
/* Whether the program keeps pages from being swapped. True if that cannot be known. */
bool pages_are_locked(void);
/* Makes a userfaultfd of this process out of an open /dev/userfaultfd, or -1. */
int pages_userfaultfd(int device);

/* Puts `window`, a mapping of as many pages, in the place of a range, with the range's content and
 * without losing what other threads write meanwhile. `file` at `offset` is what the window is of,
 * or -1 where that does not matter. The content is read at `from`. Returns how many bytes of the
 * range have become the window's, from its start on: all, if nothing fails. */
size_t pages_exchange(int userfaultfd, uintptr_t at, uintptr_t from, size_t length, uint8_t *window,
                      int file);
/* Copies pages to such as are all zero; pages that are zero stay as they are there. */
void pages_copy(uint8_t *to, const uint8_t *from, size_t length);

#endif

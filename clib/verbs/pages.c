/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Mappings of this process: what they are, and how one is put in the place of another while threads
 * write to it. System calls only: nothing here may wait for a lock of the C library, which a thread
 * that waits for a page may have. */

#define _GNU_SOURCE /* MREMAP_FIXED */
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "verbs/internal.h"
#include "verbs/remap.h"

/* Writers wait for the copy of so many bytes at most: half a millisecond. */
#define PIECE (1UL << 20)
#define PAGE  4096UL
#define PAGES (PIECE / PAGE)

/* Constants that older headers lack. */
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#define WP_UNPOPULATED (1 << 13) /* UFFD_FEATURE_WP_UNPOPULATED */
#define POPULATE_WRITE 23        /* MADV_POPULATE_WRITE */

/* A text of /proc that is read through a small buffer. */
struct text {
	long fd;
	uint32_t have, at;
	char buffer[1024];
};

static bool text_open(struct text *t, const char *path)
{
	t->have = t->at = 0;
	t->fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0L);
	return t->fd >= 0;
}

/* The next byte, or 0 at the end. */
static char text_next(struct text *t)
{
	if (t->at == t->have) {
		long got = syscall(SYS_read, t->fd, t->buffer, sizeof(t->buffer));

		t->at = 0;
		t->have = got > 0 ? (uint32_t)got : 0;
		if (!t->have)
			return 0;
	}
	return t->buffer[t->at++];
}

/* Reads a number up to the byte that follows it, which is read, too. */
static uint64_t text_number(struct text *t, unsigned int base)
{
	uint64_t n = 0;

	for (;;) {
		char c = text_next(t);
		unsigned int digit = c >= '0' && c <= '9'   ? (unsigned int)(c - '0')
		                     : c >= 'a' && c <= 'f' ? (unsigned int)(c - 'a') + 10
		                                            : 99;
		if (digit >= base)
			return n;
		n = n * base + digit;
	}
}

struct mapping {
	uintptr_t from, to;
	char permissions[4];
	uint64_t offset, device, inode;
	char name; /* its first byte, 0 if it has none */
	char kind; /* of "[heap]", "[anon:...", "[stack]" the byte after the bracket */
};

/* Reads a line of /proc/self/maps; false at the end. */
static bool next_mapping(struct text *t, struct mapping *m)
{
	char c;

	m->from = text_number(t, 16);
	m->to = text_number(t, 16);
	for (int i = 0; i < 4; i++)
		m->permissions[i] = text_next(t);
	text_next(t);
	m->offset = text_number(t, 16);
	m->device = text_number(t, 16) << 20;
	m->device |= text_number(t, 16);
	m->inode = text_number(t, 10);
	do
		c = text_next(t);
	while (c == ' ');
	m->name = c == '\n' ? 0 : c;
	m->kind = m->name ? text_next(t) : 0;
	if (m->kind == '\n')
		m->kind = 0;
	else
		while (c && c != '\n')
			c = text_next(t);
	return m->to != 0;
}

static bool is_wanted(const struct mapping *m, const struct wanted *w)
{
	if (!w->is_private)
		return m->permissions[3] == 's' && m->device == w->device && m->inode == w->inode &&
		       m->from - w->base == m->offset;
	/* Not a stack: it grows. */
	return !memcmp(m->permissions, "rw-p", 4) && !m->inode && !m->device &&
	       (!m->name || (m->name == '[' && (m->kind == 'h' || m->kind == 'a')));
}

static int protection_of(const struct mapping *m)
{
	return (m->permissions[0] == 'r' ? PROT_READ : 0) | (m->permissions[1] == 'w' ? PROT_WRITE : 0) |
	       (m->permissions[2] == 'x' ? PROT_EXEC : 0);
}

int pages_find(uintptr_t at, uintptr_t end, const struct wanted *wanted, struct run *runs, int most)
{
	struct text t;
	struct mapping m;
	int found = 0;

	if (!text_open(&t, "/proc/self/maps"))
		return -1;
	while (next_mapping(&t, &m) && m.from < end && found < most) {
		if (m.to <= at || !is_wanted(&m, wanted))
			continue;
		struct run run = {m.from > at ? m.from : at, m.to < end ? m.to : end, protection_of(&m)};
		struct run *last = found ? &runs[found - 1] : NULL;

		if (last && last->end == run.at && last->protection == run.protection)
			last->end = run.end;
		else
			runs[found++] = run;
	}
	close_fd((int)t.fd);
	return found;
}

bool pages_are_locked(void)
{
	static const char name[] = "VmLck:";
	struct text t;
	uint32_t same = 0;
	uint64_t kilobytes;
	char c;

	if (!text_open(&t, "/proc/self/status"))
		return true;
	while (same < sizeof(name) - 1 && (c = text_next(&t)))
		same = c == name[same] ? same + 1 : c == name[0] ? 1 : 0;
	if (same < sizeof(name) - 1) {
		close_fd((int)t.fd);
		return true;
	}
	do
		c = text_next(&t);
	while (c == ' ' || c == '\t');
	kilobytes = c != '0';
	close_fd((int)t.fd);
	return kilobytes != 0;
}

/* Before Linux 6.4 pages that are not there cannot be protected: they are made first. A program
 * that gives some back (MADV_DONTNEED) between the two may not do that with registered memory. */
static bool populates;

static int userfaultfd_with(int device, uint64_t features)
{
	struct uffdio_api api = {.api = UFFD_API, .features = features};
	/* Without UFFD_USER_MODE_ONLY: read() into the pages waits, too, and does not fail. */
	int fd = (int)syscall(SYS_ioctl, device, USERFAULTFD_IOC_NEW, (long)(O_CLOEXEC | O_NONBLOCK));

	if (fd >= 0 && syscall(SYS_ioctl, fd, UFFDIO_API, &api) < 0) {
		close_fd(fd);
		fd = -1;
	}
	return fd;
}

int pages_userfaultfd(int device)
{
	const uint64_t features = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
	int fd = userfaultfd_with(device, features | WP_UNPOPULATED);

	populates = fd < 0;
	return fd < 0 ? userfaultfd_with(device, features) : fd;
}

static bool is_zero(const uint64_t *page)
{
	for (size_t i = 0; i < PAGE / 8; i += 8)
		if (page[i] | page[i + 1] | page[i + 2] | page[i + 3] | page[i + 4] | page[i + 5] |
		    page[i + 6] | page[i + 7])
			return false;
	return true;
}

void pages_copy(uint8_t *to, const uint8_t *from, size_t length)
{
	for (size_t done = 0; done < length; done += PAGE)
		if (!is_zero((const uint64_t *)(from + done)))
			memcpy(to + done, from + done, PAGE);
}

/* Whether all pages of a range are there. Only a hint: then the window's pages are made at once,
 * and charged to this program. Others stay holes if they are zero. */
static bool is_populated(uintptr_t at, size_t length)
{
	uint8_t there[PAGES];

	if (syscall(SYS_mincore, at, length, there) < 0)
		return false;
	for (size_t i = 0; i < length / PAGE; i++)
		if (!(there[i] & 1))
			return false;
	return true;
}

static bool exchange_piece(int userfaultfd, uintptr_t at, uintptr_t from, size_t length, uint8_t *window,
                           int file, size_t offset)
{
	struct uffdio_range range = {at, length};
	struct uffdio_register watch = {.range = range, .mode = UFFDIO_REGISTER_MODE_WP};
	struct uffdio_writeprotect protect = {.range = range, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
	bool done = false;

	if (is_populated(from, length))
		syscall(SYS_madvise, window, length, POPULATE_WRITE);
	if (populates && syscall(SYS_madvise, at, length, POPULATE_WRITE) < 0)
		return false;
	if (syscall(SYS_ioctl, userfaultfd, UFFDIO_REGISTER, &watch) < 0)
		return false;
	if (syscall(SYS_ioctl, userfaultfd, UFFDIO_WRITEPROTECT, &protect) == 0) {
		/* From here on whoever writes waits until it is woken, and then writes to what is
		 * there. */
		pages_copy(window, (const uint8_t *)from, length);
		done = syscall(SYS_mremap, window, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, at) ==
		       (long)at;
		/* Out of memory in the middle, the old pages may be gone. */
		if (!done && file >= 0)
			done = syscall(SYS_mmap, at, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
			               file, offset) == (long)at &&
			       syscall(SYS_madvise, at, length, MADV_DONTFORK) == 0;
	}
	if (!done)
		syscall(SYS_ioctl, userfaultfd, UFFDIO_UNREGISTER, &range);
	syscall(SYS_ioctl, userfaultfd, UFFDIO_WAKE, &range);
	return done;
}

size_t pages_exchange(int userfaultfd, uintptr_t at, uintptr_t from, size_t length, uint8_t *window, int file)
{
	for (size_t done = 0; done < length;) {
		size_t piece = length - done < PIECE ? length - done : PIECE;

		if (!exchange_piece(userfaultfd, at + done, from + done, piece, window + done, file, done))
			return done;
		done += piece;
	}
	return length;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The image's own librdmacm speaks to the kernel by open() and write(). Its calls of these are to
 * come here, and nobody else's. Exporting functions of these names does not do: the C library is in
 * front of this one in the order in which the loader looks for names, unless somebody preloads it,
 * and what a program preloads (librspreload) has such functions as well. So the addresses are
 * changed where librdmacm has them, in its table for calls into other libraries. */

#define _GNU_SOURCE /* dl_iterate_phdr */
#include <elf.h>
#include <link.h>
#include <sys/auxv.h>
#include <sys/mman.h>

#include "verbs/cm.h"
#include "verbs/internal.h"

#define LIBRARY "librdmacm.so.1"

#if defined(__x86_64__)
#define IS_CALL(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_CALL(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#error "unknown machine"
#endif

/* open() has its mode only if it creates a file, which librdmacm does not. */
static int hook_open(const char *path, int flags, int mode)
{
	return cm_open(path, flags, mode);
}

/* Until version 2.33 of the C library fstat() was this. */
static int hook_fxstat(int version, int fd, struct stat *status)
{
	(void)version;
	return cm_fstat(fd, status);
}

static const struct hook {
	const char *name;
	void *function;
} hooks[] = {
        {"open", hook_open}, {"open64", hook_open}, {"write", cm_write},       {"close", cm_close},
        {"fstat", cm_fstat}, {"fstat64", cm_fstat}, {"__fxstat", hook_fxstat}, {"__fxstat64", hook_fxstat},
};

static bool is_equal(const char *a, const char *b)
{
	size_t length = strlen(b);

	return strlen(a) == length && !memcmp(a, b, length);
}

/* What of a loaded library its table of relocations needs. */
struct loaded {
	uintptr_t base;
	const char *strings;
	const ElfW(Sym) * symbols;
	const ElfW(Rela) * relocations[2]; /* of calls, and others */
	size_t sizes[2];
	const char *name;
	uintptr_t read_only, read_only_end; /* after relocation */
};

static void read_dynamic(struct loaded *l, const ElfW(Dyn) * d)
{
	size_t name = 0;

	for (; d->d_tag != DT_NULL; d++) {
		/* The C library has made addresses of offsets; others have not. */
		uintptr_t at = d->d_un.d_ptr < l->base ? l->base + d->d_un.d_ptr : d->d_un.d_ptr;

		switch (d->d_tag) {
		case DT_STRTAB:
			l->strings = (const char *)at;
			break;
		case DT_SYMTAB:
			l->symbols = (const ElfW(Sym) *)at;
			break;
		case DT_JMPREL:
			l->relocations[0] = (const ElfW(Rela) *)at;
			break;
		case DT_PLTRELSZ:
			l->sizes[0] = d->d_un.d_val;
			break;
		case DT_RELA:
			l->relocations[1] = (const ElfW(Rela) *)at;
			break;
		case DT_RELASZ:
			l->sizes[1] = d->d_un.d_val;
			break;
		case DT_SONAME:
			name = d->d_un.d_val;
			break;
		}
	}
	l->name = l->strings && name ? l->strings + name : "";
}

/* Writes an address that may be in memory which was made read-only after relocation. */
static void write_address(const struct loaded *l, void **slot, void *value)
{
	uintptr_t page = getauxval(AT_PAGESZ), at = (uintptr_t)slot & ~(page - 1);
	bool is_read_only = (uintptr_t)slot >= l->read_only && (uintptr_t)slot < l->read_only_end;

	if (is_read_only && syscall(SYS_mprotect, at, page, PROT_READ | PROT_WRITE) < 0)
		return; /* as if there were no device */
	atomic_store((_Atomic(void *) *)slot, value);
	if (is_read_only)
		syscall(SYS_mprotect, at, page, PROT_READ);
}

static void hook_calls(const struct loaded *l, const ElfW(Rela) * r, size_t size)
{
	for (const ElfW(Rela) *end = r + size / sizeof(*r); r && r < end; r++) {
		if (!IS_CALL(ELF64_R_TYPE(r->r_info)))
			continue;
		const char *name = l->strings + l->symbols[ELF64_R_SYM(r->r_info)].st_name;
		for (size_t i = 0; i < sizeof(hooks) / sizeof(hooks[0]); i++)
			if (is_equal(name, hooks[i].name))
				write_address(l, (void **)(l->base + r->r_offset), hooks[i].function);
	}
}

static int hook_library(struct dl_phdr_info *info, size_t size, void *unused)
{
	struct loaded l = {.base = info->dlpi_addr};
	const ElfW(Dyn) *dynamic = NULL;

	(void)size, (void)unused;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];

		if (p->p_type == PT_DYNAMIC)
			dynamic = (const ElfW(Dyn) *)(l.base + p->p_vaddr);
		if (p->p_type == PT_GNU_RELRO) {
			uintptr_t page = getauxval(AT_PAGESZ);

			l.read_only = (l.base + p->p_vaddr) & ~(page - 1);
			l.read_only_end = (l.base + p->p_vaddr + p->p_memsz) & ~(page - 1);
		}
	}
	if (!dynamic)
		return 0;
	read_dynamic(&l, dynamic);
	if (!is_equal(l.name, LIBRARY) || !l.symbols)
		return 0;
	hook_calls(&l, l.relocations[0], l.sizes[0]);
	hook_calls(&l, l.relocations[1], l.sizes[1]);
	return 1;
}

static struct {
	struct lock lock; /* as that of the channels: taken before it */
	bool is_watched;  /* fork() is */
	/* From fork()'s first handler to its last: they may have been registered in the middle. */
	bool forks;
	uint64_t fork_mask;
} hook;

static void fork_prepare(void)
{
	uint64_t mask = lock_take_masked(&hook.lock);

	hook.forks = true;
	hook.fork_mask = mask;
	cm_fork_prepare();
}

static void fork_done(void)
{
	if (!hook.forks)
		return;
	hook.forks = false;
	cm_fork_done();
	lock_release_masked(&hook.lock, hook.fork_mask);
}

void cm_hook(void)
{
	uint64_t mask = lock_take_masked(&hook.lock);

	if (!hook.is_watched && __register_atfork)
		hook.is_watched = __register_atfork(fork_prepare, fork_done, fork_done, NULL) == 0;
	/* Each time: a library may be loaded later, or unloaded and loaded elsewhere. */
	dl_iterate_phdr(hook_library, NULL);
	lock_release_masked(&hook.lock, mask);
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The calls by which processes begin, and become other programs, which may know nothing of this
 * library: what they get of connections is TCP's before. */

#define _GNU_SOURCE
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>

#include "guest/internal.h"

extern char **environ;

static int fails(long r)
{
	errno = (int)-r;
	return -1;
}

PUBLIC pid_t fork(void)
{
	pid_t (*next)(void) = NEXT(fork), child;

	forking();
	child = next ? next() : (pid_t)fails(-ENOSYS);
	if (child == 0)
		forked();
	else
		fork_done();
	return child;
}

/* What forks within the C library (daemon(), forkpty()) asks those that were registered. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));

__attribute__((constructor)) static void ask_for_forks(void)
{
	if (__register_atfork)
		__register_atfork(forking, fork_done, forked, NULL);
}

#define EXECUTE(name, ...)                                                                                   \
	({                                                                                                   \
		__typeof__(&name) next_ = NEXT(name);                                                        \
		long r_ = next_ ? executing() : -ENOSYS;                                                     \
		r_ ? fails(r_) : next_(__VA_ARGS__);                                                         \
	})

PUBLIC int execve(const char *path, char *const args[], char *const env[])
{
	return EXECUTE(execve, path, args, env);
}

PUBLIC int execv(const char *path, char *const args[])
{
	return EXECUTE(execv, path, args);
}

PUBLIC int execvp(const char *file, char *const args[])
{
	return EXECUTE(execvp, file, args);
}

PUBLIC int execvpe(const char *file, char *const args[], char *const env[])
{
	return EXECUTE(execvpe, file, args, env);
}

PUBLIC int fexecve(int fd, char *const args[], char *const env[])
{
	return EXECUTE(fexecve, fd, args, env);
}

/* Makes a list of arguments, of which the first is there, on the stack. */
#define LIST(first, args)                                                                                    \
	({                                                                                                   \
		va_list counted_;                                                                            \
		size_t n_ = 2;                                                                               \
		va_copy(counted_, args);                                                                     \
		while (va_arg(counted_, char *))                                                             \
			n_++;                                                                                \
		va_end(counted_);                                                                            \
		char **list_ = __builtin_alloca(n_ * sizeof(char *));                                        \
		list_[0] = (char *)(first);                                                                  \
		for (size_t i_ = 1; i_ < n_; i_++)                                                           \
			list_[i_] = va_arg(args, char *);                                                    \
		list_;                                                                                       \
	})

PUBLIC int execl(const char *path, const char *first, ...)
{
	va_list args;

	va_start(args, first);
	return execv(path, LIST(first, args));
}

PUBLIC int execlp(const char *file, const char *first, ...)
{
	va_list args;

	va_start(args, first);
	return execvp(file, LIST(first, args));
}

PUBLIC int execle(const char *path, const char *first, ...)
{
	va_list args;
	char **list;

	va_start(args, first);
	list = LIST(first, args);
	return execve(path, list, va_arg(args, char **));
}

PUBLIC int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const args[], char *const env[])
{
	__typeof__(&posix_spawn) next = NEXT(posix_spawn);

	if (!next)
		return ENOSYS;
	if (executing())
		return EBUSY;
	return next(pid, path, actions, attributes, args, env);
}

PUBLIC int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *attributes, char *const args[], char *const env[])
{
	__typeof__(&posix_spawnp) next = NEXT(posix_spawnp);

	if (!next)
		return ENOSYS;
	if (executing())
		return EBUSY;
	return next(pid, file, actions, attributes, args, env);
}

PUBLIC int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int fd, int to)
{
	__typeof__(&posix_spawn_file_actions_adddup2) next = NEXT(posix_spawn_file_actions_adddup2);

	if (!next)
		return ENOSYS;
	return handing_over(fd) ? EBUSY : next(actions, fd, to);
}

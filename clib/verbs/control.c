/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Requests to the router: docs/protocols/verbs-control.md. System calls are made by number, so that
 * libraries which a program preloads for its own sockets, librspreload among them, do not see this
 * one. */

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "verbs/internal.h"

/* A reply takes microseconds. Later than this the router is as good as gone. */
#define REPLY_SECONDS 10

int control_connect(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = CONTROL_SOCKET};
	int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	/* A full queue of connections is waited for as long as for a reply. */
	struct timeval limit = {.tv_sec = REPLY_SECONDS};
	syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	if (syscall(SYS_connect, fd, &address, sizeof(address)) < 0) {
		int error = errno;

		close_fd(fd);
		errno = error;
		return -1;
	}
	return fd;
}

static bool take_descriptors(struct msghdr *message, int *fds, int count)
{
	int got = 0;

	for (struct cmsghdr *h = CMSG_FIRSTHDR(message); h; h = CMSG_NXTHDR(message, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		int here = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		for (int i = 0; i < here; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
			if (got < count)
				fds[got] = fd;
			else
				close_fd(fd);
			got++;
		}
	}
	if (got == count && !(message->msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
		return true;
	for (int i = 0; i < got && i < count; i++)
		close_fd(fds[i]);
	return false;
}

static void drop_room(const int *room, int count)
{
	for (int i = 0; i < count; i++)
		close_fd(room[i]);
}

/* Takes as many descriptors as a reply will bring. A program that has none left is told so before
 * anything is asked for: a reply without them would be the end of its device. None is in the place
 * of a closed standard stream, to which another thread may write: EINVAL is a limit below. */
static int hold_room(const struct context *c, int *room, int count)
{
	for (int i = 0; i < count; i++) {
		room[i] = (int)syscall(SYS_fcntl, c->control, F_DUPFD_CLOEXEC, 3L);
		if (room[i] < 0) {
			int error = errno == EINVAL ? EMFILE : errno;

			drop_room(room, i);
			return error;
		}
	}
	return 0;
}

/* Waits for the reply's message and returns its length, or -1: then the router is not to be relied
 * upon any more. Its descriptors take the place of those in `room`. */
static long receive_reply(struct context *c, void *reply, size_t length, int *fds, int *fd_count,
                          const int *room)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(VERBS_DESCRIPTORS_MAX * sizeof(int))];
	} control;
	struct iovec part = {reply, length};
	struct msghdr message = {.msg_iov = &part,
	                         .msg_iovlen = 1,
	                         .msg_control = &control,
	                         .msg_controllen = sizeof(control)};
	struct timespec limit = {.tv_sec = REPLY_SECONDS};
	struct pollfd wait = {.fd = c->control, .events = POLLIN};
	long got;

	/* The kernel writes to `limit` what is left of it, so that signals do not make the wait
	 * longer. */
	do
		got = syscall(SYS_ppoll, &wait, 1L, &limit, NULL, 0L);
	while (got < 0 && errno == EINTR);
	drop_room(room, *fd_count);
	if (got <= 0)
		return -1;
	do
		got = syscall(SYS_recvmsg, c->control, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	while (got < 0 && errno == EINTR);
	if (got < (long)sizeof(struct verbs_reply) || ((struct verbs_reply *)reply)->error)
		*fd_count = 0;
	if (!take_descriptors(&message, fds, *fd_count)) {
		/* A security module may keep the node's device from the program, which does without. */
		if (got <= 0 || ((struct verbs_reply *)reply)->command != VERBS_OPEN_USERFAULTFD)
			return -1;
		fds[0] = -1;
	}
	return got > 0 ? got : -1;
}

/* Returns 0, the router's errno, that of a lack of descriptors, or -1 if the router does not keep
 * to the protocol. The reply has at least `least` bytes and at most `*reply_length`, which becomes
 * what it has. */
static int exchange(struct context *c, struct verbs_request *request, size_t request_length,
                    struct verbs_reply *reply, size_t least, size_t *reply_length, int *fds, int fd_count)
{
	int room[VERBS_DESCRIPTORS_MAX];
	int error = hold_room(c, room, fd_count);
	long sent, got;

	if (error)
		return error;
	do
		sent = syscall(SYS_sendto, c->control, request, request_length, MSG_NOSIGNAL, NULL, 0L);
	while (sent < 0 && errno == EINTR);
	if (sent != (long)request_length) {
		drop_room(room, fd_count);
		return -1;
	}
	got = receive_reply(c, reply, *reply_length, fds, &fd_count, room);
	if (got < 0)
		return -1;
	if (got >= (long)sizeof(*reply) && reply->command == request->command && reply->tag == request->tag &&
	    reply->error >= 0 && reply->error < 4096 && (reply->error || got >= (long)least)) {
		*reply_length = (size_t)got;
		return reply->error;
	}
	for (int i = 0; i < fd_count; i++)
		close_fd(fds[i]);
	return -1;
}

void control_give_up(struct context *c)
{
	atomic_store(&c->gone, true);
	/* A router that is there drops what the context has, and those who wait for events are
	 * told. */
	syscall(SYS_shutdown, c->control, SHUT_RDWR);
}

static int request_reply(struct context *c, enum verbs_command command, void *request, size_t request_length,
                         void *reply, size_t least, size_t *reply_length, int *fds, int fd_count)
{
	struct verbs_request *head = request;
	int error = -1;

	lock_take(&c->control_lock);
	*head = (struct verbs_request){.command = command, .tag = ++c->tag};
	if (!is_gone(c))
		error = exchange(c, head, request_length, reply, least, reply_length, fds, fd_count);
	if (error < 0) {
		control_give_up(c);
		error = EIO;
	}
	lock_release(&c->control_lock);
	return error;
}

int control_request(struct context *c, enum verbs_command command, void *request, size_t request_length,
                    void *reply, size_t reply_length, int *fds, int fd_count)
{
	size_t got = reply_length;

	return request_reply(c, command, request, request_length, reply, reply_length, &got, fds, fd_count);
}

int control_request_up_to(struct context *c, enum verbs_command command, void *request, size_t request_length,
                          void *reply, size_t least, size_t *reply_length)
{
	return request_reply(c, command, request, request_length, reply, least, reply_length, NULL, 0);
}

int control_object(struct context *c, enum verbs_command command, uint32_t object)
{
	struct verbs_object_request request = {.object = object};
	struct verbs_reply reply;

	return control_request(c, command, &request, sizeof(request), &reply, sizeof(reply), NULL, 0);
}

int control_destroy(struct context *c, enum verbs_command command, uint32_t object)
{
	int error = control_object(c, command, object);

	return error && is_gone(c) ? 0 : error;
}

bool control_is_gone(struct context *c)
{
	struct pollfd look = {.fd = c->control};
	struct timespec now = {0};

	if (!is_gone(c) && syscall(SYS_ppoll, &look, 1L, &now, NULL, 0L) > 0 &&
	    look.revents & (POLLHUP | POLLERR | POLLNVAL))
		atomic_store(&c->gone, true);
	return is_gone(c);
}

int memory_map(struct memory *m, int fd, uint64_t length)
{
	int error = 0;

	m->length = length;
	m->base = ring_map(fd, length);
	if (!m->base)
		error = errno;
	close_fd(fd);
	return error;
}

void memory_unmap(struct memory *m)
{
	if (m->base)
		ring_unmap(m->base, m->length);
	m->base = NULL;
}

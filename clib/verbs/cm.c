/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Event channels of RDMA-CM: docs/protocols/verbs-control.md. A channel has a descriptor, which
 * librdmacm and the program know, and a connection to the router, which they do not. System calls
 * are made by number, so that what a program preloads does not see them. */

#include <fcntl.h>
#include <rdma/rdma_user_cm.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "verbs/cm.h"
#include "verbs/internal.h"

#define DEVICE      "/dev/infiniband/rdma_cm"
#define OPTION_MAX  64
#define COMMAND_MAX 512 /* bytes of the longest command */
#define DRAINED     1   /* bits of verbs_rdma_cm_reply.drained: this channel */
#define DRAINED_OLD 2   /* the one that a moved id had before */

struct channel_cm {
	struct context *connection; /* only its control connection is used */
	struct lock lock;           /* a command, and the event messages that go with it */
	int events;                 /* the descriptor */
	struct stat identity;       /* of that */
	long process;               /* that has opened it */
	uint32_t users;             /* guarded by `lock` of the table */
};

static struct {
	struct lock lock;      /* taken with all signals blocked, and by fork() */
	struct table channels; /* by descriptor + 1 */
	uint64_t fork_mask;    /* while it forks */
} all;

void cm_fork_prepare(void)
{
	uint64_t mask = lock_take_masked(&all.lock);

	all.fork_mask = mask;
}

void cm_fork_done(void)
{
	lock_release_masked(&all.lock, all.fork_mask);
}

static void free_channel(struct channel_cm *ch)
{
	close_fd(ch->connection->control);
	free(ch->connection);
	free(ch);
}

/* Drops a reference. The lock of the table is held. */
static void put(struct channel_cm *ch)
{
	if (--ch->users == 0)
		free_channel(ch);
}

static void release(struct channel_cm *ch)
{
	uint64_t mask = lock_take_masked(&all.lock);

	put(ch);
	lock_release_masked(&all.lock, mask);
}

static void forget(int fd)
{
	struct channel_cm *ch = table_find(&all.channels, (uint32_t)fd + 1);

	if (!ch)
		return;
	table_remove(&all.channels, (uint32_t)fd + 1);
	put(ch);
}

/* Finds the channel of a descriptor and takes a reference. A descriptor that was closed behind our
 * back, and is another file's by now, is none. */
static struct channel_cm *find(int fd)
{
	struct channel_cm *ch;
	struct stat now;
	uint64_t mask;

	if (fd < 0)
		return NULL;
	mask = lock_take_masked(&all.lock);
	ch = table_find(&all.channels, (uint32_t)fd + 1);
	if (ch && (syscall(SYS_fstat, fd, &now) < 0 || now.st_ino != ch->identity.st_ino ||
	           now.st_dev != ch->identity.st_dev)) {
		forget(fd);
		ch = NULL;
	}
	if (ch)
		ch->users++;
	lock_release_masked(&all.lock, mask);
	return ch;
}

static int greet(struct channel_cm *ch)
{
	struct verbs_hello_request request = {.version = VERBS_VERSION, .kind = VERBS_KIND_RDMA_CM};
	struct context *c = ch->connection;
	int error = control_request(c, VERBS_HELLO, &request, sizeof(request), &c->hello, sizeof(c->hello),
	                            &ch->events, 1);

	if (error)
		return error;
	return syscall(SYS_fstat, ch->events, &ch->identity) < 0 ? errno : 0;
}

static int open_channel(int flags)
{
	struct channel_cm *ch = calloc(1, sizeof(*ch));
	int error = ENOMEM, fd;
	uint64_t mask;

	if (!ch)
		goto failed;
	ch->events = -1;
	ch->users = 1;
	ch->process = syscall(SYS_getpid);
	ch->connection = calloc(1, sizeof(*ch->connection));
	if (!ch->connection) {
		free(ch);
		goto failed;
	}
	ch->connection->control = control_connect();
	error = ch->connection->control < 0 ? errno : greet(ch);
	if (!error && flags & O_NONBLOCK)
		syscall(SYS_fcntl, ch->events, F_SETFL, O_NONBLOCK);
	if (!error) {
		fd = ch->events;
		mask = lock_take_masked(&all.lock);
		forget(fd);
		error = table_insert(&all.channels, (uint32_t)fd + 1, ch);
		lock_release_masked(&all.lock, mask);
		if (!error)
			return fd;
	}
	close_fd(ch->events);
	free_channel(ch);
failed:
	errno = error;
	return -1;
}

int cm_open(const char *path, int flags, int mode)
{
	if (strlen(path) == sizeof(DEVICE) - 1 && !memcmp(path, DEVICE, sizeof(DEVICE)))
		return open_channel(flags);
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int cm_close(int fd)
{
	struct channel_cm *ch = find(fd);

	if (ch) {
		uint64_t mask = lock_take_masked(&all.lock);

		if (table_find(&all.channels, (uint32_t)fd + 1) == ch)
			forget(fd);
		put(ch);
		lock_release_masked(&all.lock, mask);
	}
	return (int)syscall(SYS_close, fd);
}

/* The number that the kernel's own device has on this machine, or 0: librdmacm may have been told
 * it by the kernel, and compares. */
static dev_t device_number(void)
{
	char text[32] = {0};
	unsigned int number[2] = {0}, i = 0;

	if (ibv_read_sysfs_file(ibv_get_sysfs_path(), "class/misc/rdma_cm/dev", text, sizeof(text) - 1) < 0)
		return 0;
	for (const char *c = text; *c; c++) {
		if (*c >= '0' && *c <= '9')
			number[i] = number[i] * 10 + (unsigned int)(*c - '0');
		else if (i++ == 1 || *c != ':')
			break;
	}
	return makedev(number[0], number[1]);
}

int cm_fstat(int fd, struct stat *status)
{
	long result = syscall(SYS_fstat, fd, status);
	struct channel_cm *ch = result < 0 ? NULL : find(fd);

	if (ch) {
		/* What was opened is a character device. */
		status->st_mode = S_IFCHR | 0666;
		status->st_rdev = device_number();
		release(ch);
	}
	return (int)result;
}

/* Where a command has the address for its response, or -1. */
static long response_at(uint32_t command)
{
	switch (command) {
	case RDMA_USER_CM_CMD_CREATE_ID:
		return offsetof(struct rdma_ucm_create_id, response);
	case RDMA_USER_CM_CMD_DESTROY_ID:
	case RDMA_USER_CM_CMD_LEAVE_MCAST:
		return offsetof(struct rdma_ucm_destroy_id, response);
	case RDMA_USER_CM_CMD_JOIN_IP_MCAST:
		return offsetof(struct rdma_ucm_join_ip_mcast, response);
	case RDMA_USER_CM_CMD_QUERY_ROUTE:
	case RDMA_USER_CM_CMD_QUERY:
		return offsetof(struct rdma_ucm_query, response);
	case RDMA_USER_CM_CMD_INIT_QP_ATTR:
		return offsetof(struct rdma_ucm_init_qp_attr, response);
	case RDMA_USER_CM_CMD_GET_EVENT:
		return offsetof(struct rdma_ucm_get_event, response);
	case RDMA_USER_CM_CMD_MIGRATE_ID:
		return offsetof(struct rdma_ucm_migrate_id, response);
	default:
		return -1;
	}
}

struct command {
	struct verbs_rdma_cm_request request;
	uint8_t bytes[COMMAND_MAX + OPTION_MAX];
};

struct response {
	struct verbs_rdma_cm_reply reply;
	uint8_t bytes[VERBS_MESSAGE_MAX - sizeof(struct verbs_rdma_cm_reply)];
};

static void take_event_message(struct channel_cm *ch)
{
	uint8_t message[16];

	syscall(SYS_recvfrom, ch->events, message, sizeof(message), MSG_DONTWAIT, NULL, NULL);
}

/* Sends a command, which is told again with the next tag, and takes the response. */
static int ask(struct channel_cm *ch, struct channel_cm *old, struct command *q, struct response *a)
{
	size_t length = sizeof(q->request) + q->request.length;
	size_t got = sizeof(*a);
	int error;

	lock_take(&ch->lock);
	error = control_request_up_to(ch->connection, VERBS_RDMA_CM, q, length, a, sizeof(a->reply), &got);
	if (!error &&
	    (a->reply.length != got - sizeof(a->reply) || a->reply.length > q->request.response_max)) {
		control_give_up(ch->connection);
		error = EIO;
	}
	if (!error && a->reply.drained & DRAINED)
		take_event_message(ch);
	if (!error && old && a->reply.drained & DRAINED_OLD)
		take_event_message(old);
	lock_release(&ch->lock);
	return error;
}

/* Waits until an event is there or the router has ended, as the descriptor's flags say. recv() of
 * the C library, because a thread can be cancelled in it, as it can in write(). Returns 0 or an
 * errno. */
static int wait_for_event(struct channel_cm *ch)
{
	uint8_t byte;
	long got = recv(ch->events, &byte, sizeof(byte), MSG_PEEK);

	if (got == 0)
		control_give_up(ch->connection);
	return got < 0 ? errno : 0;
}

/* Copies the value of an option behind the command. Returns 0 or an errno. */
static int add_option(struct command *q)
{
	struct rdma_ucm_set_option option;
	struct rdma_ucm_cmd_hdr head;

	memcpy(&head, q->bytes, sizeof(head));
	if (head.in < sizeof(option) || q->request.length != sizeof(head) + head.in)
		return EINVAL;
	memcpy(&option, q->bytes + sizeof(head), sizeof(option));
	if (option.optlen > OPTION_MAX)
		return EINVAL;
	memcpy(q->bytes + q->request.length, (const void *)(uintptr_t)option.optval, option.optlen);
	q->request.length += option.optlen;
	return 0;
}

/* Does what a command says. Returns 0 or an errno. */
static int command(struct channel_cm *ch, struct rdma_ucm_cmd_hdr head, struct command *q)
{
	const uint8_t *fields = q->bytes + sizeof(head);
	struct channel_cm *old = NULL;
	struct rdma_ucm_migrate_id migrate;
	long at = response_at(head.cmd);
	uint64_t response = 0;
	struct response a;
	int error = 0;

	/* A child has its parent's descriptors, but the connection's order is the parent's. */
	if (ch->process != syscall(SYS_getpid))
		return EIO;
	if (at >= 0 && head.in < (size_t)at + sizeof(response))
		return EINVAL;
	if (at >= 0)
		memcpy(&response, fields + at, sizeof(response));
	if (head.cmd == RDMA_USER_CM_CMD_SET_OPTION)
		error = add_option(q);
	if (head.cmd == RDMA_USER_CM_CMD_MIGRATE_ID && head.in >= sizeof(migrate)) {
		memcpy(&migrate, fields, sizeof(migrate));
		old = find((int)migrate.fd);
		if (!old)
			return EINVAL;
	}
	q->request.response_max = at < 0 ? 0 : head.out;
	while (!error) {
		error = ask(ch, old, q, &a);
		if (error != EAGAIN || head.cmd != RDMA_USER_CM_CMD_GET_EVENT)
			break;
		error = wait_for_event(ch);
	}
	if (old)
		release(old);
	if (!error)
		memcpy((void *)(uintptr_t)response, a.bytes, a.reply.length);
	return error;
}

long cm_write(int fd, const void *bytes, size_t length)
{
	struct channel_cm *ch = find(fd);
	struct rdma_ucm_cmd_hdr head;
	struct command q;
	int error = EINVAL;

	if (!ch)
		return syscall(SYS_write, fd, bytes, length);
	if (length >= sizeof(head) && length <= COMMAND_MAX) {
		memcpy(&head, bytes, sizeof(head));
		if (head.in + sizeof(head) <= length) {
			q.request = (struct verbs_rdma_cm_request){.length = (uint32_t)length};
			memcpy(q.bytes, bytes, length);
			error = command(ch, head, &q);
		}
	}
	release(ch);
	if (error) {
		errno = error;
		return -1;
	}
	return (long)length;
}

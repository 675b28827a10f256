/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A libibverbs with a card that does and says what a test wants, which is for the router to load.
 * LIAR is the test's folder: by the socket `log` the card tells of what it is asked for, by
 * `events` it is told what events to report, and by `cq`, once for each completion queue, what
 * completions; into the file `modified` it writes a line for each change of a queue pair, and each
 * look at its port. It connects when it is opened: later the router may not. LIAR_LIE names what
 * else it lies about. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <infiniband/verbs.h>

/* What the card was asked for; liar.rs has it, too. */
struct asked {
	uint64_t id;
	uint64_t address;
	uint32_t what; /* 0 a receive request, else the opcode of a send request and 1 */
	uint32_t length;
};

/* What it is to say: a completion, before which it writes `length` bytes to an address. */
struct said {
	struct ibv_wc wc;
	uint64_t address;
	uint64_t length; /* 0: the completion comes `address` times */
	char bytes[4096];
};

static struct ibv_context context;
static struct ibv_cq *made[2]; /* by cq_sockets */
static int log_socket, modified, cq_sockets[2], cqs, numbers;

/* What the kernel says of the card is in the test's folder. */
int open64(const char *path, int flags, ...)
{
	static const char card[] = "/sys/class/infiniband/liar/";
	char own[256];
	va_list rest;
	mode_t mode;

	va_start(rest, flags);
	mode = va_arg(rest, mode_t);
	va_end(rest);
	if (!strncmp(path, card, sizeof(card) - 1)) {
		snprintf(own, sizeof(own), "%s/card/%s", getenv("LIAR"), path + sizeof(card) - 1);
		path = own;
	}
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static int lies(const char *name)
{
	const char *lie = getenv("LIAR_LIE");
	return lie && !strcmp(lie, name);
}

static int join(const char *name)
{
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(to.sun_path, sizeof(to.sun_path), "%s/%s", getenv("LIAR"), name);
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)))
		abort();
	return fd;
}

static int tell(uint64_t id, uint32_t what, const struct ibv_sge *sge, int count)
{
	struct asked asked = {.id = id, .what = what};

	if (count > 0) {
		asked.address = sge->addr;
		asked.length = sge->length;
	}
	return send(log_socket, &asked, sizeof(asked), MSG_NOSIGNAL) < 0 ? errno : 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	(void)qp, (void)bad;
	return tell(wr->wr_id, wr->opcode + 1, wr->sg_list, wr->num_sge);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	static int receives;

	(void)qp, (void)bad;
	if (lies("receive") && ++receives > 16)
		return ENOMEM;
	return tell(wr->wr_id, 0, wr->sg_list, wr->num_sge);
}

static int poll_cq(struct ibv_cq *cq, int room, struct ibv_wc *wc)
{
	static struct said last[2];
	static uint64_t left[2];
	int own = cq == made[1], got = 0;
	struct said *said = &last[own];

	while (got < room) {
		if (left[own] == 0) {
			if (recv(cq->channel->fd, said, sizeof(*said), MSG_DONTWAIT) <= 0)
				break;
			memcpy((void *)said->address, said->bytes, said->length);
			left[own] = said->length == 0 && said->address > 0 ? said->address : 1;
		}
		left[own]--;
		wc[got++] = said->wc;
	}
	return got == 0 && lies("count") ? 1000 : got;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited)
{
	(void)cq, (void)solicited;
	return 0;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	static struct ibv_device device, *list[] = {&device, NULL};

	*count = lies("list") ? 1000 : 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	(void)list;
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	(void)device;
	return lies("name") ? NULL : "liar";
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	char path[256];

	context.device = device;
	context.ops.poll_cq = poll_cq;
	context.ops.req_notify_cq = req_notify_cq;
	context.ops.post_send = post_send;
	context.ops.post_recv = post_recv;
	log_socket = join("log");
	snprintf(path, sizeof(path), "%s/modified", getenv("LIAR"));
	modified = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	context.async_fd = join("events");
	cq_sockets[0] = join("cq");
	cq_sockets[1] = join("cq");
	return &context;
}

int ibv_close_device(struct ibv_context *ctx)
{
	return close(ctx->async_fd) | close(log_socket);
}

int ibv_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
	(void)ctx;
	memset(attr, 0, sizeof(*attr));
	attr->max_qp = lies("limits") ? -1 : 1024;
	attr->max_cqe = lies("limits") ? -1 : 1 << 16;
	attr->max_qp_rd_atom = lies("limits") ? -1 : 16;
	return 0;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	static const char look[] = "0x0: port\n";
	struct ibv_port_attr *attr = (void *)compat;

	(void)ctx, (void)port;
	if (write(modified, look, sizeof(look) - 1) < 0)
		return EIO;
	attr->state = IBV_PORT_ACTIVE;
	attr->active_mtu = lies("limits") ? 200 : IBV_MTU_4096;
	return 0;
}

int ibv_get_async_event(struct ibv_context *ctx, struct ibv_async_event *event)
{
	static struct ibv_qp qp;
	uint32_t said[2]; /* type, number of a queue pair, or of a completion queue from 1 on; 0: none */

	if (recv(ctx->async_fd, said, sizeof(said), MSG_DONTWAIT) != sizeof(said)) {
		errno = EAGAIN;
		return -1;
	}
	qp.qp_num = said[1];
	event->event_type = said[0];
	event->element.qp = said[1] ? &qp : NULL;
	if (said[0] == IBV_EVENT_CQ_ERR && (said[1] == 1 || said[1] == 2))
		event->element.cq = made[said[1] - 1];
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *ctx)
{
	(void)ctx;
	return calloc(1, sizeof(struct ibv_pd));
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

#undef ibv_reg_mr_iova
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access)
{
	struct ibv_mr *mr = calloc(1, sizeof(*mr));

	(void)pd, (void)address, (void)length, (void)iova, (void)access;
	mr->lkey = mr->rkey = lies("keys") ? 0x1234 : 0x10000 + ++numbers;
	return mr;
}

/* A kernel waits for peers that have begun to write to it. */
int ibv_dereg_mr(struct ibv_mr *mr)
{
	char byte;

	if (lies("pinned"))
		recv(log_socket, &byte, 1, 0);
	free(mr);
	return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ctx)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));

	(void)ctx;
	if (cqs == 2)
		abort();
	channel->fd = cq_sockets[cqs++];
	return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *ctx, int cqe, void *user, struct ibv_comp_channel *channel,
                             int vector)
{
	struct ibv_cq *cq = calloc(1, sizeof(*cq));

	(void)ctx, (void)cqe, (void)user, (void)vector;
	cq->channel = channel;
	made[cqs - 1] = cq;
	return cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	free(cq);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user)
{
	(void)channel, (void)cq, (void)user;
	return lies("notices") ? 0 : -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	(void)cq, (void)count;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp = calloc(1, sizeof(*qp));

	(void)pd, (void)attr;
	qp->qp_num = lies("number") ? 0x1000000 : lies("numbers") ? 0x77 : 0x100 + (unsigned int)++numbers;
	return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	const struct ibv_ah_attr *ah = &attr->ah_attr;
	char line[256];
	int n = sprintf(line, "%#x:", qp->qp_num);

	if (mask & IBV_QP_STATE)
		n += sprintf(line + n, " state %d", attr->qp_state);
	if (mask & IBV_QP_AV)
		n += sprintf(line + n, " class %d level %d rate %d", ah->grh.traffic_class, ah->sl,
		             ah->static_rate);
	if (mask & IBV_QP_ACCESS_FLAGS)
		n += sprintf(line + n, " access %d", (int)attr->qp_access_flags);
	if (mask & IBV_QP_MIN_RNR_TIMER)
		n += sprintf(line + n, " rnr %d", attr->min_rnr_timer);
	line[n++] = '\n';
	return write(modified, line, (size_t)n) == n ? 0 : EIO;
}

/* A kernel waits for packets that a network device has: until the test lets them go. */
int ibv_destroy_qp(struct ibv_qp *qp)
{
	char byte;

	if (lies("stuck"))
		recv(log_socket, &byte, 1, 0);
	free(qp);
	return 0;
}

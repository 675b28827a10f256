/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The list of devices, which has at most one, and its contexts. */

#include "verbs/cm.h"
#include "verbs/internal.h"
#include "verbs/remap.h"

/* What programs look for in /sys is not there; the names are those a kernel's device would have. */
static struct ibv_device heddle0 = {
        .node_type = IBV_NODE_CA,
        .transport_type = IBV_TRANSPORT_IB,
        .name = DEVICE_NAME,
        .dev_name = "uverbs0",
        .dev_path = "/sys/class/infiniband_verbs/uverbs0",
        .ibdev_path = "/sys/class/infiniband/" DEVICE_NAME,
};

VERSION_1_1(ibv_get_device_list);
PUBLIC struct ibv_device **ibv_get_device_list(int *count)
{
	int fd = control_connect();
	struct ibv_device **list;

	cm_hook();
	if (count)
		*count = 0;
	if (fd < 0 && errno == ENOENT) {
		/* As where the kernel has no RDMA. */
		errno = ENOSYS;
		return NULL;
	}
	list = calloc(2, sizeof(struct ibv_device *));
	if (!list) {
		close_fd(fd);
		errno = ENOMEM;
		return NULL;
	}
	if (fd < 0)
		return list; /* there is no router now: a list without a device */
	close_fd(fd);
	list[0] = &heddle0;
	if (count)
		*count = 1;
	return list;
}

VERSION_1_1(ibv_free_device_list);
PUBLIC void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

VERSION_1_1(ibv_get_device_name);
PUBLIC const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

PUBLIC int ibv_get_device_index(struct ibv_device *device)
{
	(void)device;
	return -1; /* only the kernel's devices have one */
}

VERSION_1_1(ibv_get_device_guid);
PUBLIC __be64 ibv_get_device_guid(struct ibv_device *device)
{
	struct ibv_context *context = ibv_open_device(device);
	__be64 guid = 0;

	if (context) {
		guid = context_of(context)->hello.node_guid;
		ibv_close_device(context);
	}
	return guid;
}

static const struct ibv_context_ops context_ops = {
        .poll_cq = poll_cq,
        .req_notify_cq = req_notify_cq,
        .post_send = post_send,
        .post_recv = post_recv,
        .post_srq_recv = post_srq_recv,
};

static void init_context(struct context *c, int async_fd)
{
	struct verbs_context *v = &c->verbs;

	/* An operation that is not set answers EOPNOTSUPP in the functions of verbs.h. */
	v->sz = sizeof(*v);
	v->query_port = query_port;
	v->query_device_ex = query_device_ex;
	v->query_rt_values = query_rt_values;
	v->create_cq_ex = create_cq_ex;
	v->create_qp_ex = create_qp_ex;
	v->context.device = &heddle0;
	v->context.ops = context_ops;
	v->context.cmd_fd = c->control;
	v->context.async_fd = async_fd;
	v->context.num_comp_vectors = 1;
	v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
}

/* Shows the router that it has the memory of this process open, and not that of a program which
 * took its place. */
static int show_memory(struct context *c)
{
	struct verbs_show_memory_request request = {.address = (uintptr_t)c->shared};
	struct verbs_reply reply;

	return control_request(c, VERBS_SHOW_MEMORY, &request, sizeof(request), &reply, sizeof(reply), NULL,
	                       0);
}

/* The port's table: the container's addresses, then what peers without Heddle are reached by. */
static int fill_gids(struct context *c)
{
	struct verbs_plain_request request = {0};
	struct verbs_query_outside_reply reply;
	uint32_t count = c->hello.gid_count;
	int error;

	if (count > sizeof(c->hello.gid) / sizeof(c->hello.gid[0]))
		return EPROTO;
	memcpy(c->gid, c->hello.gid, sizeof(c->hello.gid));
	c->gid_count = count;
	if (!(c->hello.features & VERBS_FEATURE_OUTSIDE))
		return 0;
	error = control_request(c, VERBS_QUERY_OUTSIDE, &request, sizeof(request), &reply, sizeof(reply),
	                        NULL, 0);
	if (error)
		return error == EOPNOTSUPP ? 0 : error; /* it has gone meanwhile */
	memcpy(c->gid[c->gid_count++], reply.gid, sizeof(reply.gid));
	return 0;
}

static int say_hello(struct context *c)
{
	struct verbs_hello_request request = {.version = VERBS_VERSION, .kind = VERBS_KIND_DEVICE};
	struct memory shared = {0};
	int fds[3] = {-1, -1, -1};
	int error;

	error = control_request(c, VERBS_HELLO, &request, sizeof(request), &c->hello, sizeof(c->hello), fds,
	                        3);
	if (error)
		return error;
	error = memory_map(&shared, fds[0], c->hello.context_size);
	if (!error && (c->hello.version != VERBS_VERSION || shared.length < VERBS_CONTEXT_SIZE))
		error = EPROTO;
	if (error) {
		memory_unmap(&shared);
		close_fd(fds[1]);
		close_fd(fds[2]);
		return error;
	}
	c->shared = shared.base;
	c->doorbell = fds[1];
	nap_begin(c);
	init_context(c, fds[2]);
	error = show_memory(c);
	if (!error)
		error = fill_gids(c);
	if (error) {
		close_fd(fds[1]);
		close_fd(fds[2]);
	}
	return error;
}

static void free_context(struct context *c)
{
	if (c->shared)
		ring_unmap(c->shared, c->hello.context_size);
	table_free(&c->cqs);
	table_free(&c->qps);
	table_free(&c->srqs);
	close_fd(c->control);
	free(c);
}

VERSION_1_1(ibv_open_device);
PUBLIC struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct context *c = calloc(1, sizeof(*c));
	int error;

	(void)device;
	if (!c) {
		errno = ENOMEM;
		return NULL;
	}
	c->doorbell = -1;
	c->process = syscall(SYS_getpid);
	c->control = control_connect();
	error = c->control < 0 ? errno : say_hello(c);
	if (error) {
		free_context(c);
		errno = error;
		return NULL;
	}
	return &c->verbs.context;
}

VERSION_1_1(ibv_close_device);
PUBLIC int ibv_close_device(struct ibv_context *context)
{
	struct context *c = context_of(context);

	remap_close(c);
	close_fd(c->doorbell);
	close_fd(context->async_fd);
	free_context(c);
	return 0;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the device is and what it can do. Numbers that the router enforces come from the router. */

#include <fcntl.h>
#include <stdio.h>
#include <time.h>

#include "verbs/internal.h"
#include "verbs/private_versions.h"

#define PORT              1
#define DEFAULT_PKEY      0xffff
#define PORT_IP_BASED_GID (1u << 26)
/* 4x at 25 Gb/s: about what one thread of a node copies. Programs choose between devices by it;
 * nothing is limited to it. */
#define WIDTH_4X          2
#define SPEED_EDR         32
#define PHYSICAL_LINK_UP  5
#define PHYSICAL_DISABLED 3
/* The number of RoCE v2 in sysfs. */
#define SYSFS_ROCE_V2     1

VERSION_1_1(ibv_query_device);
PUBLIC int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	const struct verbs_hello_reply *h = &context_of(context)->hello;

	*attr = (struct ibv_device_attr){
	        .fw_ver = "heddle-1",
	        .node_guid = h->node_guid,
	        .sys_image_guid = h->node_guid,
	        .max_mr_size = h->max_mr_size,
	        .page_size_cap = 0xfffff000,
	        .vendor_part_id = VERBS_VERSION,
	        .max_qp = (int)h->max_qp,
	        .max_qp_wr = (int)(h->max_send_wr < h->max_recv_wr ? h->max_send_wr : h->max_recv_wr),
	        .device_cap_flags = IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN,
	        .max_sge = (int)h->max_sge,
	        .max_sge_rd = (int)h->max_sge,
	        .max_cq = (int)h->max_cq,
	        .max_cqe = (int)h->max_cqe,
	        .max_mr = (int)h->max_mr,
	        .max_pd = (int)h->max_pd,
	        .max_qp_rd_atom = (int)h->max_rd_atomic,
	        .max_res_rd_atom = (int)(h->max_rd_atomic * h->max_qp),
	        .max_qp_init_rd_atom = (int)h->max_rd_atomic,
	        .atomic_cap = IBV_ATOMIC_HCA,
	        .max_mcast_grp = (int)h->max_mcast_grp,
	        .max_mcast_qp_attach = (int)h->max_mcast_grp,
	        .max_total_mcast_qp_attach = (int)h->max_mcast_grp,
	        .max_ah = (int)h->max_ah,
	        .max_srq = (int)h->max_srq,
	        .max_srq_wr = (int)h->max_srq_wr,
	        .max_srq_sge = (int)h->max_srq_sge,
	        .max_pkeys = 1,
	        .phys_port_cnt = 1,
	};
	return 0;
}

/* Programs of other versions have shorter or longer structs. */
static void copy_attr(void *to, size_t to_length, const void *from, size_t from_length)
{
	memset(to, 0, to_length);
	memcpy(to, from, to_length < from_length ? to_length : from_length);
}

int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                    struct ibv_device_attr_ex *attr, size_t length)
{
	struct ibv_device_attr_ex all = {
	        .completion_timestamp_mask = UINT64_MAX,
	        .hca_core_clock = 1000000, /* kHz: timestamps are nanoseconds */
	};

	if (input && input->comp_mask)
		return EINVAL;
	if (length < sizeof(all.orig_attr))
		return EINVAL;
	ibv_query_device(context, &all.orig_attr);
	all.phys_port_cnt_ex = all.orig_attr.phys_port_cnt;
	copy_attr(attr, length, &all, sizeof(all));
	return 0;
}

int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	if (values->comp_mask & ~(uint32_t)IBV_VALUES_MASK_RAW_CLOCK)
		return EOPNOTSUPP;
	if (values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK &&
	    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &values->raw_clock) < 0)
		return errno;
	return 0;
}

int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t length)
{
	struct context *c = context_of(context);
	bool up = !control_is_gone(c);
	struct ibv_port_attr all = {
	        .state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
	        .max_mtu = c->hello.mtu,
	        .active_mtu = c->hello.mtu,
	        .gid_tbl_len = (int)c->gid_count,
	        .port_cap_flags = IBV_PORT_CM_SUP | PORT_IP_BASED_GID,
	        .max_msg_sz = c->hello.max_msg_size,
	        .pkey_tbl_len = 1,
	        .max_vl_num = 1,
	        .active_width = WIDTH_4X,
	        .active_speed = SPEED_EDR,
	        .phys_state = up ? PHYSICAL_LINK_UP : PHYSICAL_DISABLED,
	        .link_layer = IBV_LINK_LAYER_ETHERNET,
	};

	if (port != PORT)
		return EINVAL;
	copy_attr(attr, length, &all, sizeof(all));
	return 0;
}

VERSION_1_1(ibv_query_port);
PUBLIC int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	/* Older programs have the struct without its last member. */
	return query_port(context, port, (struct ibv_port_attr *)attr,
	                  offsetof(struct ibv_port_attr, port_cap_flags2));
}

/* Whether there is such an entry in the port's table of GIDs. */
static bool has_gid(const struct context *c, uint32_t port, uint32_t index)
{
	static const uint8_t none[16];

	return port == PORT && index < c->gid_count && memcmp(c->gid[index], none, sizeof(none));
}

VERSION_1_1(ibv_query_gid);
PUBLIC int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (index < 0 || !has_gid(context_of(context), port, (uint32_t)index)) {
		errno = EINVAL;
		return -1;
	}
	memcpy(gid->raw, context_of(context)->gid[index], sizeof(gid->raw));
	return 0;
}

PUBLIC int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                             struct ibv_gid_entry *entry, uint32_t flags, size_t length)
{
	struct ibv_gid_entry all = {.gid_index = index, .port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2};

	if (flags)
		return EOPNOTSUPP;
	if (port != PORT)
		return EINVAL;
	if (!has_gid(context_of(context), port, index))
		return ENODATA;
	memcpy(all.gid.raw, context_of(context)->gid[index], sizeof(all.gid.raw));
	copy_attr(entry, length, &all, sizeof(all));
	return 0;
}

PUBLIC ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max,
                                    uint32_t flags, size_t length)
{
	ssize_t count = 0;

	if (flags)
		return -EOPNOTSUPP;
	for (uint32_t i = 0; i < context_of(context)->gid_count; i++) {
		if (!has_gid(context_of(context), PORT, i))
			continue;
		if ((size_t)count == max)
			return -EINVAL;
		struct ibv_gid_entry *entry =
		        (struct ibv_gid_entry *)((uint8_t *)entries + (size_t)count++ * length);
		_ibv_query_gid_ex(context, PORT, i, entry, 0, length);
	}
	return count;
}

/* Private; ibv_devinfo calls it. */
static int query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, int *type)
{
	if (!has_gid(context_of(context), port, index)) {
		errno = EINVAL;
		return -1;
	}
	*type = SYSFS_ROCE_V2;
	return 0;
}

#define QUERY_GID_TYPE(node)                                                                                 \
	PUBLIC extern __typeof__(query_gid_type) node##_gid_type __attribute__((alias("query_gid_type")));   \
	__asm__(".symver " #node "_gid_type,ibv_query_gid_type@" NODE_##node);
FOR_EACH_PRIVATE_VERSION(QUERY_GID_TYPE)

VERSION_1_1(ibv_query_pkey);
PUBLIC int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != PORT || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = DEFAULT_PKEY;
	return 0;
}

PUBLIC int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	(void)context;
	if (port != PORT || pkey != DEFAULT_PKEY) {
		errno = EINVAL;
		return -1;
	}
	return 0;
}

PUBLIC const char *ibv_get_sysfs_path(void)
{
	return "/sys";
}

PUBLIC int ibv_read_sysfs_file(const char *dir, const char *name, char *text, size_t size)
{
	char path[4096];
	size_t folder = strlen(dir), file = strlen(name);
	long fd, got;

	if (folder + file + 2 > sizeof(path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	memcpy(path, dir, folder);
	path[folder] = '/';
	memcpy(path + folder + 1, name, file + 1);
	fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	got = syscall(SYS_read, (int)fd, text, size);
	close_fd((int)fd);
	if (got > 0 && text[got - 1] == '\n')
		text[--got] = 0;
	else if (got >= 0 && (size_t)got < size)
		text[got] = 0;
	return (int)got;
}

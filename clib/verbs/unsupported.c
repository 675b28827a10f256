/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the library exports and does not do. Programs are linked with BIND_NOW, and libraries of
 * cards' drivers are loaded with them, so every name has to be there. docs/howto/rdma.md lists the
 * first table; clib/verbs_test.go compares.
 * Nothing here includes verbs.h: the functions have no parameters, because they look at none. */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#include "verbs/private_versions.h"

#define PUBLIC __attribute__((visibility("default")))

#define ERROR   int, answer_error   /* returns EOPNOTSUPP */
#define FAILURE int, answer_failure /* returns -1, errno is EOPNOTSUPP */
#define NOTHING void *, answer_null /* returns NULL, errno is EOPNOTSUPP */
#define SILENT  void, answer_nothing

static int answer_error(void)
{
	return EOPNOTSUPP;
}

__attribute__((used)) static int answer_failure(void)
{
	errno = EOPNOTSUPP;
	return -1;
}

__attribute__((used)) static void *answer_null(void)
{
	errno = EOPNOTSUPP;
	return NULL;
}

__attribute__((used)) static void answer_nothing(void)
{
}

/* Functions of the API of today. */
#define PUBLIC_NAMES(ROW)                                                                                    \
	ROW(ibv_import_device, NOTHING)                                                                      \
	ROW(ibv_import_dm, NOTHING)                                                                          \
	ROW(ibv_import_mr, NOTHING)                                                                          \
	ROW(ibv_import_pd, NOTHING)                                                                          \
	ROW(ibv_reg_dmabuf_mr, NOTHING)                                                                      \
	ROW(ibv_resolve_eth_l2_from_gid, ERROR)                                                              \
	ROW(ibv_unimport_dm, SILENT)                                                                         \
	ROW(ibv_unimport_mr, SILENT)                                                                         \
	ROW(ibv_unimport_pd, SILENT)

/* The API of version 1.0 of libibverbs, whose structures were others. No program of the last ten
 * years has it. */
#define OLD_NAMES(ROW)                                                                                       \
	ROW(ibv_ack_async_event, SILENT)                                                                     \
	ROW(ibv_ack_cq_events, SILENT)                                                                       \
	ROW(ibv_alloc_pd, NOTHING)                                                                           \
	ROW(ibv_attach_mcast, ERROR)                                                                         \
	ROW(ibv_close_device, ERROR)                                                                         \
	ROW(ibv_create_ah, NOTHING)                                                                          \
	ROW(ibv_create_cq, NOTHING)                                                                          \
	ROW(ibv_create_qp, NOTHING)                                                                          \
	ROW(ibv_create_srq, NOTHING)                                                                         \
	ROW(ibv_dealloc_pd, ERROR)                                                                           \
	ROW(ibv_dereg_mr, ERROR)                                                                             \
	ROW(ibv_destroy_ah, ERROR)                                                                           \
	ROW(ibv_destroy_cq, ERROR)                                                                           \
	ROW(ibv_destroy_qp, ERROR)                                                                           \
	ROW(ibv_destroy_srq, ERROR)                                                                          \
	ROW(ibv_detach_mcast, ERROR)                                                                         \
	ROW(ibv_free_device_list, SILENT)                                                                    \
	ROW(ibv_get_async_event, FAILURE)                                                                    \
	ROW(ibv_get_cq_event, FAILURE)                                                                       \
	ROW(ibv_get_device_guid, ERROR)                                                                      \
	ROW(ibv_get_device_list, NOTHING)                                                                    \
	ROW(ibv_get_device_name, NOTHING)                                                                    \
	ROW(ibv_modify_qp, ERROR)                                                                            \
	ROW(ibv_modify_srq, ERROR)                                                                           \
	ROW(ibv_open_device, NOTHING)                                                                        \
	ROW(ibv_query_device, ERROR)                                                                         \
	ROW(ibv_query_gid, FAILURE)                                                                          \
	ROW(ibv_query_pkey, FAILURE)                                                                         \
	ROW(ibv_query_port, ERROR)                                                                           \
	ROW(ibv_query_qp, ERROR)                                                                             \
	ROW(ibv_query_srq, ERROR)                                                                            \
	ROW(ibv_reg_mr, NOTHING)                                                                             \
	ROW(ibv_resize_cq, ERROR)

/* What cards' drivers call. Their devices are not in a container, so nothing calls these. */
#define PRIVATE_NAMES(ROW)                                                                                   \
	ROW(_verbs_init_and_alloc_context, NOTHING)                                                          \
	ROW(execute_ioctl, ERROR)                                                                            \
	ROW(ibv_cmd_advise_mr, ERROR)                                                                        \
	ROW(ibv_cmd_alloc_dm, ERROR)                                                                         \
	ROW(ibv_cmd_alloc_mw, ERROR)                                                                         \
	ROW(ibv_cmd_alloc_pd, ERROR)                                                                         \
	ROW(ibv_cmd_attach_mcast, ERROR)                                                                     \
	ROW(ibv_cmd_close_xrcd, ERROR)                                                                       \
	ROW(ibv_cmd_create_ah, ERROR)                                                                        \
	ROW(ibv_cmd_create_counters, ERROR)                                                                  \
	ROW(ibv_cmd_create_cq, ERROR)                                                                        \
	ROW(ibv_cmd_create_cq_ex, ERROR)                                                                     \
	ROW(ibv_cmd_create_flow, ERROR)                                                                      \
	ROW(ibv_cmd_create_flow_action_esp, ERROR)                                                           \
	ROW(ibv_cmd_create_qp, ERROR)                                                                        \
	ROW(ibv_cmd_create_qp_ex, ERROR)                                                                     \
	ROW(ibv_cmd_create_qp_ex2, ERROR)                                                                    \
	ROW(ibv_cmd_create_rwq_ind_table, ERROR)                                                             \
	ROW(ibv_cmd_create_srq, ERROR)                                                                       \
	ROW(ibv_cmd_create_srq_ex, ERROR)                                                                    \
	ROW(ibv_cmd_create_wq, ERROR)                                                                        \
	ROW(ibv_cmd_dealloc_mw, ERROR)                                                                       \
	ROW(ibv_cmd_dealloc_pd, ERROR)                                                                       \
	ROW(ibv_cmd_dereg_mr, ERROR)                                                                         \
	ROW(ibv_cmd_destroy_ah, ERROR)                                                                       \
	ROW(ibv_cmd_destroy_counters, ERROR)                                                                 \
	ROW(ibv_cmd_destroy_cq, ERROR)                                                                       \
	ROW(ibv_cmd_destroy_flow, ERROR)                                                                     \
	ROW(ibv_cmd_destroy_flow_action, ERROR)                                                              \
	ROW(ibv_cmd_destroy_qp, ERROR)                                                                       \
	ROW(ibv_cmd_destroy_rwq_ind_table, ERROR)                                                            \
	ROW(ibv_cmd_destroy_srq, ERROR)                                                                      \
	ROW(ibv_cmd_destroy_wq, ERROR)                                                                       \
	ROW(ibv_cmd_detach_mcast, ERROR)                                                                     \
	ROW(ibv_cmd_free_dm, ERROR)                                                                          \
	ROW(ibv_cmd_get_context, ERROR)                                                                      \
	ROW(ibv_cmd_modify_cq, ERROR)                                                                        \
	ROW(ibv_cmd_modify_flow_action_esp, ERROR)                                                           \
	ROW(ibv_cmd_modify_qp, ERROR)                                                                        \
	ROW(ibv_cmd_modify_qp_ex, ERROR)                                                                     \
	ROW(ibv_cmd_modify_srq, ERROR)                                                                       \
	ROW(ibv_cmd_modify_wq, ERROR)                                                                        \
	ROW(ibv_cmd_open_qp, ERROR)                                                                          \
	ROW(ibv_cmd_open_xrcd, ERROR)                                                                        \
	ROW(ibv_cmd_poll_cq, ERROR)                                                                          \
	ROW(ibv_cmd_post_recv, ERROR)                                                                        \
	ROW(ibv_cmd_post_send, ERROR)                                                                        \
	ROW(ibv_cmd_post_srq_recv, ERROR)                                                                    \
	ROW(ibv_cmd_query_context, ERROR)                                                                    \
	ROW(ibv_cmd_query_device_any, ERROR)                                                                 \
	ROW(ibv_cmd_query_mr, ERROR)                                                                         \
	ROW(ibv_cmd_query_port, ERROR)                                                                       \
	ROW(ibv_cmd_query_qp, ERROR)                                                                         \
	ROW(ibv_cmd_query_srq, ERROR)                                                                        \
	ROW(ibv_cmd_read_counters, ERROR)                                                                    \
	ROW(ibv_cmd_reg_dm_mr, ERROR)                                                                        \
	ROW(ibv_cmd_reg_dmabuf_mr, ERROR)                                                                    \
	ROW(ibv_cmd_reg_mr, ERROR)                                                                           \
	ROW(ibv_cmd_req_notify_cq, ERROR)                                                                    \
	ROW(ibv_cmd_rereg_mr, ERROR)                                                                         \
	ROW(ibv_cmd_resize_cq, ERROR)                                                                        \
	ROW(verbs_init_cq, ERROR)                                                                            \
	ROW(verbs_open_device, NOTHING)                                                                      \
	ROW(verbs_set_ops, SILENT)                                                                           \
	ROW(verbs_uninit_context, SILENT)

#define DEFINE_(name, type, answer) PUBLIC type name(void) __attribute__((alias(#answer)));
#define DEFINE(name, ...)           DEFINE_(name, __VA_ARGS__)

/* The same under another version: symbols with a version need a name of their own each. */
#define VERSIONED_(name, node, type, answer)                                                                 \
	PUBLIC type node##_##name(void) __attribute__((alias(#answer)));                                     \
	__asm__(".symver " #node "_" #name "," #name "@" NODE_##node);
#define VERSIONED(name, node, ...) VERSIONED_(name, node, __VA_ARGS__)

#define NODE_old              "IBVERBS_1.0"
#define NODE_driver           "IBVERBS_1.1"
#define DEFINE_OLD(name, ...) VERSIONED(name, old, __VA_ARGS__)

PUBLIC_NAMES(DEFINE)
OLD_NAMES(DEFINE_OLD)

VERSIONED(ibv_register_driver, driver, SILENT)

/* The number of attributes that a command has: none. */
PUBLIC unsigned int __ioctl_final_num_attrs(void)
{
	return 0;
}

/* A driver sets it so that objects of a device that is gone can be destroyed; nobody reads it
 * here. */
PUBLIC bool verbs_allow_disassociate_destroy;

/* Each release of rdma-core may have its own name for the private version; its drivers ask for that
 * one. */
#define FOR_NODE(node)                                                                                       \
	PUBLIC extern bool node##_verbs_allow_disassociate_destroy                                           \
	        __attribute__((alias("verbs_allow_disassociate_destroy")));                                  \
	__asm__(".symver " #node                                                                             \
	        "_verbs_allow_disassociate_destroy,verbs_allow_disassociate_destroy@" NODE_##node);          \
	PUBLIC unsigned int node##___ioctl_final_num_attrs(void)                                             \
	        __attribute__((alias("__ioctl_final_num_attrs")));                                           \
	__asm__(".symver " #node "___ioctl_final_num_attrs,__ioctl_final_num_attrs@" NODE_##node);           \
	VERSIONED(__verbs_log, node, SILENT)                                                                 \
	VERSIONED(verbs_register_##node, node, SILENT)                                                       \
	VERSIONED(ibv_read_ibdev_sysfs_file, node, FAILURE)

#define ROW_34(name, ...) VERSIONED(name, driver_34, __VA_ARGS__)
PRIVATE_NAMES(ROW_34)
FOR_NODE(driver_34)

#define ROW_22(name, ...) VERSIONED(name, driver_22, __VA_ARGS__)
FOR_NODE(driver_22)
PRIVATE_NAMES(ROW_22)

#define ROW_25(name, ...) VERSIONED(name, driver_25, __VA_ARGS__)
FOR_NODE(driver_25)
PRIVATE_NAMES(ROW_25)

#define ROW_33(name, ...) VERSIONED(name, driver_33, __VA_ARGS__)
FOR_NODE(driver_33)
PRIVATE_NAMES(ROW_33)

#define ROW_57(name, ...) VERSIONED(name, driver_57, __VA_ARGS__)
FOR_NODE(driver_57)
PRIVATE_NAMES(ROW_57)

#define ROW_59(name, ...) VERSIONED(name, driver_59, __VA_ARGS__)
FOR_NODE(driver_59)
PRIVATE_NAMES(ROW_59)

#define ROW_64(name, ...) VERSIONED(name, driver_64, __VA_ARGS__)
FOR_NODE(driver_64)
PRIVATE_NAMES(ROW_64)

#define ROW_65(name, ...) VERSIONED(name, driver_65, __VA_ARGS__)
FOR_NODE(driver_65)
PRIVATE_NAMES(ROW_65)

/* Names that came later than Debian 12. */
#define LATER_NAMES(ROW)                                                                                     \
	ROW(ibv_cmd_alloc_dmah, ERROR)                                                                       \
	ROW(ibv_cmd_free_dmah, ERROR)                                                                        \
	ROW(ibv_cmd_reg_mr_ex, NOTHING)
LATER_NAMES(ROW_59)
LATER_NAMES(ROW_64)
LATER_NAMES(ROW_65)

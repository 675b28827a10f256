/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the verbs library in a container and the router of the node say to each other: messages on
 * the control socket (docs/protocols/verbs-control.md) and slots in rings
 * (docs/protocols/verbs-rings.md), which say what each field means.
 *
 * This file is the only source of these layouts: bindgen makes rust/verbs-protocol/src/abi.rs of it
 * (make generate). Numbers are in the machine's own byte order, because both sides are on one
 * machine, unless a field is said to be in network byte order. Structs have no padding: what the
 * compiler would add is named, and is 0. */
#ifndef HEDDLE_VERBS_PROTOCOL_H
#define HEDDLE_VERBS_PROTOCOL_H

#include <stdint.h>

#define VERBS_VERSION 1

/* The longest message on the control socket, and the most descriptors with one. */
#define VERBS_MESSAGE_MAX     4096
#define VERBS_DESCRIPTORS_MAX 3

/* Offsets in shared memory. Rings and doorbells are those of docs/protocols/shared-rings.md. */
#define VERBS_CONTEXT_DOORBELL 0    /* context memory: the doorbell in which the router sleeps */
#define VERBS_CONTEXT_NAP      1024 /* context memory: 1 while a thread that polls waits in a futex */
#define VERBS_CONTEXT_PROOF    2048 /* context memory: 8 bytes by which SHOW_MEMORY is checked */
#define VERBS_CONTEXT_SIZE     4096 /* bytes of the context memory */
#define VERBS_CQ_ARM           0    /* memory of a CQ: struct verbs_cq_arm */
#define VERBS_CQ_RING          128  /* memory of a CQ: ring of struct verbs_completion */
#define VERBS_QP_SEND_RING     0    /* memory of a QP: its send ring; the receive ring's offset is told */
#define VERBS_SRQ_RECEIVE_RING 0    /* memory of an SRQ: its receive ring */

#define VERBS_SLOT_SIZE         64
/* The payload of a send request: scatter/gather entries or inline data. */
#define VERBS_SEND_PAYLOAD      48 /* where it begins in the first slot; it goes on at the start of the next */
#define VERBS_SEND_PAYLOAD_MAX  512 /* bytes: 32 entries, or this much inline data */
#define VERBS_SEND_SLOTS_MAX    9
#define VERBS_RECEIVE_PAYLOAD   16
#define VERBS_RECEIVE_SLOTS_MAX 9
#define VERBS_SGE_MAX           32

enum verbs_command {
	VERBS_HELLO = 1,
	VERBS_ALLOC_PD = 2,
	VERBS_DEALLOC_PD = 3,
	VERBS_CREATE_CHANNEL = 4,
	VERBS_DESTROY_CHANNEL = 5,
	VERBS_CREATE_CQ = 6,
	VERBS_DESTROY_CQ = 7,
	VERBS_CREATE_QP = 8,
	VERBS_MODIFY_QP = 9,
	VERBS_QUERY_QP = 10,
	VERBS_DESTROY_QP = 11,
	VERBS_CREATE_SRQ = 12,
	VERBS_MODIFY_SRQ = 13,
	VERBS_QUERY_SRQ = 14,
	VERBS_DESTROY_SRQ = 15,
	VERBS_CREATE_AH = 16,
	VERBS_DESTROY_AH = 17,
	VERBS_CREATE_MEMORY = 18,
	VERBS_DESTROY_MEMORY = 19,
	VERBS_REG_MR = 20,
	VERBS_DEREG_MR = 21,
	VERBS_ATTACH_MCAST = 22,
	VERBS_DETACH_MCAST = 23,
	VERBS_RDMA_CM = 24,
	VERBS_SHOW_MEMORY = 25,
	VERBS_OPEN_USERFAULTFD = 26,
	VERBS_RESIZE_CQ = 27,
	VERBS_QUERY_OUTSIDE = 32,
};

/* verbs_hello_reply.features */
#define VERBS_FEATURE_OUTSIDE 1 /* QUERY_OUTSIDE has an answer */

/* What a connection of the control socket is for. */
enum verbs_kind {
	VERBS_KIND_DEVICE = 0,  /* an open device: ibv_context */
	VERBS_KIND_RDMA_CM = 1, /* an open /dev/infiniband/rdma_cm */
};

/* Flags of a send request. Its opcode is enum ibv_wr_opcode. */
#define VERBS_SEND_FENCE     1
#define VERBS_SEND_SIGNALED  2
#define VERBS_SEND_SOLICITED 4
#define VERBS_SEND_INLINE    8

/* Values of verbs_cq_arm.armed. */
#define VERBS_ARM_NONE      0
#define VERBS_ARM_NEXT      1
#define VERBS_ARM_SOLICITED 2

/* Head of each request, and of each reply. */
struct verbs_request {
	uint32_t command; /* enum verbs_command */
	uint32_t tag;     /* comes back in the reply */
};

struct verbs_reply {
	uint32_t command;
	uint32_t tag;
	int32_t error; /* 0, or a positive errno: then nothing follows, and no descriptor comes */
	uint32_t reserved;
};

/* A request that names one object and nothing else: the DESTROY commands, DEALLOC_PD, DEREG_MR, the
 * QUERY commands. */
struct verbs_object_request {
	struct verbs_request head;
	uint32_t object; /* handle; a QP's is its number */
	uint32_t reserved;
};

/* A request without a body: ALLOC_PD, CREATE_CHANNEL. */
struct verbs_plain_request {
	struct verbs_request head;
};

/* Reply with the handle of what was made: ALLOC_PD, CREATE_CHANNEL, CREATE_AH. */
struct verbs_object_reply {
	struct verbs_reply head;
	uint32_t object;
	uint32_t reserved;
};

struct verbs_hello_request {
	struct verbs_request head;
	uint32_t version; /* VERBS_VERSION */
	uint32_t kind;    /* enum verbs_kind */
};

struct verbs_hello_reply {
	struct verbs_reply head;
	uint32_t version;
	uint32_t context_size; /* bytes of the context memory */
	uint64_t node_guid;    /* network byte order, as in struct ibv_device_attr */
	uint8_t gid[2][16];    /* table of GIDs; all zero: no such entry */
	uint32_t gid_count;
	uint32_t max_qp;
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_sge;
	uint32_t max_inline;
	uint32_t max_cq;
	uint32_t max_cqe;
	uint32_t max_mr;
	uint32_t max_pd;
	uint32_t max_ah;
	uint32_t max_srq;
	uint32_t max_srq_wr;
	uint32_t max_srq_sge;
	uint32_t max_rd_atomic; /* as initiator and as responder, of one QP */
	uint32_t max_channels;
	uint32_t max_mcast_grp;
	uint32_t max_msg_size; /* bytes of an RC or UC message */
	uint32_t mtu;          /* enum ibv_mtu: the most of a UD message, and the path MTU */
	uint32_t spin_us;      /* for how long who waits spins before it sleeps; 0: not at all */
	uint64_t max_mr_size;
	uint64_t features; /* VERBS_FEATURE_...; others are ignored */
};

/* QUERY_OUTSIDE: the GID by which peers without Heddle are reached, last in the port's table. */
struct verbs_query_outside_reply {
	struct verbs_reply head;
	uint8_t gid[16];
};

/* SHOW_MEMORY: where the process that connected has the context memory mapped. */
struct verbs_show_memory_request {
	struct verbs_request head;
	uint64_t address;
};

struct verbs_create_cq_request {
	struct verbs_request head;
	uint64_t user;    /* comes back in events */
	uint32_t cqe;     /* completions it has to hold, at least 1 */
	uint32_t channel; /* handle, or 0 */
};

/* CREATE_CQ, RESIZE_CQ. */
struct verbs_create_cq_reply {
	struct verbs_reply head;
	uint32_t cq;
	uint32_t capacity;    /* slots of the ring */
	uint64_t memory_size; /* bytes of the memfd */
};

struct verbs_resize_cq_request {
	struct verbs_request head;
	uint32_t cq;
	uint32_t cqe;
};

struct verbs_create_qp_request {
	struct verbs_request head;
	uint64_t user;
	uint32_t pd;
	uint32_t send_cq;
	uint32_t recv_cq;
	uint32_t srq;  /* handle, or 0 */
	uint32_t type; /* enum ibv_qp_type: RC, UC or UD */
	uint32_t sq_sig_all;
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline;
	uint32_t reserved;
};

struct verbs_create_qp_reply {
	struct verbs_reply head;
	uint32_t qp;               /* number, and handle */
	uint32_t send_capacity;    /* slots */
	uint32_t receive_capacity; /* slots; 0 with an SRQ */
	uint32_t receive_offset;   /* of the receive ring in the memory; 0 with an SRQ */
	uint64_t memory_size;
	uint32_t max_send_wr; /* what was granted, at least what was asked for */
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline;
	uint32_t reserved;
};

/* struct ibv_ah_attr. */
struct verbs_address {
	uint8_t gid[16];
	uint32_t flow_label;
	uint16_t dlid;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port;
	uint8_t reserved[2];
};

/* struct ibv_qp_attr, without capabilities. */
struct verbs_qp_attr {
	uint32_t qp_state;
	uint32_t cur_qp_state;
	uint32_t path_mtu;
	uint32_t path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	uint32_t access; /* enum ibv_access_flags */
	uint32_t rate_limit;
	struct verbs_address address;
	struct verbs_address alt_address;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port;
	uint8_t alt_timeout;
	uint8_t reserved[5];
};

struct verbs_modify_qp_request {
	struct verbs_request head;
	uint32_t qp;
	uint32_t mask; /* enum ibv_qp_attr_mask */
	struct verbs_qp_attr attr;
};

struct verbs_modify_qp_reply {
	struct verbs_reply head;
	uint32_t qp_state; /* as it is now */
	uint32_t reserved;
};

struct verbs_query_qp_reply {
	struct verbs_reply head;
	struct verbs_qp_attr attr;
};

struct verbs_create_srq_request {
	struct verbs_request head;
	uint64_t user;
	uint32_t pd;
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t limit;
};

struct verbs_create_srq_reply {
	struct verbs_reply head;
	uint32_t srq;
	uint32_t capacity; /* slots */
	uint64_t memory_size;
	uint32_t max_wr;
	uint32_t max_sge;
};

struct verbs_modify_srq_request {
	struct verbs_request head;
	uint32_t srq;
	uint32_t mask; /* enum ibv_srq_attr_mask */
	uint32_t max_wr;
	uint32_t limit;
};

struct verbs_query_srq_reply {
	struct verbs_reply head;
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t limit;
	uint32_t reserved;
};

struct verbs_create_ah_request {
	struct verbs_request head;
	uint32_t pd;
	uint32_t reserved;
	struct verbs_address address;
};

struct verbs_create_memory_request {
	struct verbs_request head;
	uint64_t length; /* bytes, a multiple of the page */
};

struct verbs_create_memory_reply {
	struct verbs_reply head;
	uint32_t memory;
	uint32_t reserved;
	uint64_t length;
};

struct verbs_reg_mr_request {
	struct verbs_request head;
	uint64_t address; /* in the program that opened the connection */
	uint64_t length;
	uint64_t iova;          /* by which work requests and peers name the first byte */
	uint64_t memory_offset; /* of the first byte from the start of `memory`, modulo 2^64 */
	uint32_t memory;        /* handle, or 0: all of it is in the program's own pages */
	uint32_t pd;
	uint32_t access; /* enum ibv_access_flags */
	uint32_t reserved;
};

struct verbs_reg_mr_reply {
	struct verbs_reply head;
	uint32_t mr;
	uint32_t lkey;
	uint32_t rkey;
	uint32_t reserved;
};

/* ATTACH_MCAST, DETACH_MCAST. */
struct verbs_mcast_request {
	struct verbs_request head;
	uint32_t qp;
	uint32_t reserved;
	uint8_t gid[16];
};

/* Followed by `length` bytes: what the program wrote to /dev/infiniband/rdma_cm, and of SET_OPTION
 * the option. */
struct verbs_rdma_cm_request {
	struct verbs_request head;
	uint32_t length;
	uint32_t response_max; /* bytes the program has room for */
};

/* Followed by `length` bytes: what the kernel would have written to the program's memory. */
struct verbs_rdma_cm_reply {
	struct verbs_reply head;
	uint32_t length;
	/* Bits: 1 it has taken the last event, so that one message of the event socket is to be taken,
	 * too; 2 the same of the channel that a moved id had. */
	uint32_t drained;
};

/* A message on a completion channel's socket. */
struct verbs_completion_event {
	uint64_t user; /* of the CQ */
	uint32_t cq;
	uint32_t reserved;
};

/* A message on the socket of asynchronous events. */
struct verbs_async_event {
	uint64_t user;  /* of the QP, CQ or SRQ; 0 for the port and the device */
	uint32_t event; /* enum ibv_event_type */
	uint32_t object;
};

/* Slots. */

struct verbs_sge {
	uint64_t address;
	uint32_t length;
	uint32_t lkey;
};

struct verbs_send {
	uint64_t wr_id;
	uint8_t opcode; /* enum ibv_wr_opcode */
	uint8_t flags;
	uint8_t slots; /* of this request, with this one */
	uint8_t sge_count;
	uint32_t imm;            /* as the program gave it: network byte order; or the rkey to invalidate */
	uint64_t remote_address; /* UD: 0 */
	uint32_t rkey;           /* UD: number of the destination QP */
	uint32_t inline_length;  /* bytes, with VERBS_SEND_INLINE */
	uint64_t compare_add;    /* UD: handle of the AH */
	uint64_t swap;           /* UD: Q_Key of the destination */
	uint8_t payload[16];
};

struct verbs_receive {
	uint64_t wr_id;
	uint8_t slots;
	uint8_t sge_count;
	uint8_t reserved[6];
	struct verbs_sge sge[3];
};

struct verbs_completion {
	uint64_t wr_id;
	uint32_t status; /* enum ibv_wc_status */
	uint32_t opcode; /* enum ibv_wc_opcode */
	uint32_t byte_len;
	uint32_t imm; /* network byte order; or the rkey that was invalidated */
	uint32_t qp_num;
	uint32_t src_qp;
	uint32_t flags; /* enum ibv_wc_flags */
	uint32_t vendor_err;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
	uint8_t reserved[2];
	uint64_t timestamp; /* nanoseconds of CLOCK_MONOTONIC */
	uint64_t reserved2;
};

/* Of a CQ: 128 bytes that the ring follows. */
struct verbs_cq_arm {
	uint32_t armed;
	uint32_t reserved[31];
};

/* No compiler may lay them out in another way. */
#define VERBS_SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " has another size")
VERBS_SIZE(verbs_request, 8);
VERBS_SIZE(verbs_reply, 16);
VERBS_SIZE(verbs_object_request, 16);
VERBS_SIZE(verbs_object_reply, 24);
VERBS_SIZE(verbs_hello_request, 16);
VERBS_SIZE(verbs_hello_reply, 160);
VERBS_SIZE(verbs_query_outside_reply, 32);
VERBS_SIZE(verbs_create_cq_request, 24);
VERBS_SIZE(verbs_create_cq_reply, 32);
VERBS_SIZE(verbs_resize_cq_request, 16);
VERBS_SIZE(verbs_create_qp_request, 64);
VERBS_SIZE(verbs_create_qp_reply, 64);
VERBS_SIZE(verbs_address, 32);
VERBS_SIZE(verbs_qp_attr, 124);
VERBS_SIZE(verbs_modify_qp_request, 140);
VERBS_SIZE(verbs_modify_qp_reply, 24);
VERBS_SIZE(verbs_query_qp_reply, 140);
VERBS_SIZE(verbs_create_srq_request, 32);
VERBS_SIZE(verbs_create_srq_reply, 40);
VERBS_SIZE(verbs_modify_srq_request, 24);
VERBS_SIZE(verbs_query_srq_reply, 32);
VERBS_SIZE(verbs_create_ah_request, 48);
VERBS_SIZE(verbs_create_memory_request, 16);
VERBS_SIZE(verbs_create_memory_reply, 32);
VERBS_SIZE(verbs_reg_mr_request, 56);
VERBS_SIZE(verbs_reg_mr_reply, 32);
VERBS_SIZE(verbs_mcast_request, 32);
VERBS_SIZE(verbs_rdma_cm_request, 16);
VERBS_SIZE(verbs_rdma_cm_reply, 24);
VERBS_SIZE(verbs_completion_event, 16);
VERBS_SIZE(verbs_async_event, 16);
VERBS_SIZE(verbs_sge, 16);
VERBS_SIZE(verbs_send, VERBS_SLOT_SIZE);
VERBS_SIZE(verbs_receive, VERBS_SLOT_SIZE);
VERBS_SIZE(verbs_completion, VERBS_SLOT_SIZE);
VERBS_SIZE(verbs_cq_arm, 128);
#undef VERBS_SIZE

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the parts of the library share. Of each object the struct of the verbs API is the first
 * member, so that one pointer is both.
 * Locks: `context.control_lock` serializes requests to the router, `context.objects_lock` guards
 * the tables of objects, a CQ's lock its consumer, a QP's two locks and an SRQ's their producers. A
 * thread that has a CQ's lock takes no other but objects_lock. No lock is held in a request but
 * control_lock, and none of the context is taken on the data path. */
#ifndef HEDDLE_VERBS_INTERNAL_H
#define HEDDLE_VERBS_INTERNAL_H

#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ring/ring.h"
#include "verbs/lock.h"
#include "verbs/protocol.h"
#include "verbs/table.h"

/* verbs.h hides some functions behind macros of the same name. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define PUBLIC            __attribute__((visibility("default")))
/* For a function that has an older version in unsupported.c. */
#define VERSION_1_1(name) __asm__(".symver " #name "," #name "@@@IBVERBS_1.1")

#define DEVICE_NAME    "heddle0"
/* The folder is mounted into the container, so that the socket is the one of the router that runs
 * now. */
#define CONTROL_SOCKET "/dev/heddle-verbs/control"

/* What became of the waits that were spun for, for who waits at one place: after each that was in
 * vain, twice as many sleep at once, so that a program whose work comes late loses little by it. */
struct spin {
	_Atomic uint32_t misses, skips;
};

/* An open device: one connection to the router. */
struct context {
	struct lock control_lock;
	int control;       /* the connection; one request at a time */
	uint32_t tag;      /* of the last request */
	_Atomic bool gone; /* the router has ended, or does not keep to the protocol */
	bool end_reported; /* IBV_EVENT_DEVICE_FATAL was given out; guarded by objects_lock */
	long process;      /* that opened it */
	void *shared;      /* context memory: the doorbell */
	int doorbell;      /* its ringing end */
	/* Of polls that find nothing: nap.c. */
	bool naps;
	_Atomic int64_t quiet_since; /* no completion came since then; 0: one did, or nobody looked */
	_Atomic int64_t patience;    /* for how long polls go on before they wait */
	_Atomic int64_t spins;       /* for how long, since quiet_since, they keep their processor */
	struct spin spin;
	struct verbs_hello_reply hello;
	uint8_t gid[3][16]; /* the port's table */
	uint32_t gid_count;
	struct lock objects_lock;
	struct table cqs, qps, srqs; /* by handle */
	struct verbs_context verbs;  /* last, as its last member is what programs know */
};

/* What was posted to a queue and is not known to be complete, for the case that the router ends.
 * Whoever posts writes `head`, whoever polls `tail`. */
struct outstanding {
	struct request_note {
		uint64_t wr_id;
		bool signaled;
	} * notes;
	uint32_t size;               /* a power of two */
	uint32_t limit;              /* of requests at a time */
	_Atomic uint32_t head, tail; /* modulo 2^32 */
};

struct memory {
	void *base;
	size_t length;
};

struct channel {
	struct ibv_comp_channel base;
	uint32_t handle;
	struct spin spin;
};

/* Resizing doubles a queue at least. */
#define RESIZES_MAX 20

struct cq {
	struct ibv_cq_ex base;
	struct lock lock;
	struct memory memory;
	_Atomic(struct verbs_cq_arm *) arm; /* in memory */
	/* Memory of smaller rings: a thread may still write a wish into it. */
	struct memory former[RESIZES_MAX];
	uint32_t former_count;
	/* What they had, before all that the ring has. */
	struct verbs_completion *kept;
	uint32_t kept_next, kept_count;
	struct ring_consumer ring;
	struct table qps;                /* that complete here, by number: guarded by lock */
	uint32_t empty_polls;            /* since something was found */
	bool waits;                      /* who polls is to wait once it has given the lock back */
	uint32_t events;                 /* completion events given out: guarded by objects_lock */
	uint32_t async_events;           /* the same of asynchronous ones */
	bool end_reported;               /* a completion event told that the router has ended */
	struct verbs_completion current; /* between start_poll and end_poll */
	uint32_t flush_next;             /* where flush_outstanding goes on */
};

struct qp {
	struct ibv_qp_ex base;
	struct memory memory;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool has_wr_api;       /* ibv_qp_to_qp_ex */
	uint32_t async_events; /* guarded by context.objects_lock */
	/* Completions before these indices of the CQs are of the time before the last reset. */
	struct stale {
		bool set;
		uint32_t until;
	} send_stale, receive_stale;
	struct outstanding sends, receives;

	struct lock receive_lock;
	struct ring_producer receive_ring;

	struct lock send_lock;
	struct ring_producer send_ring;
	uint32_t staged_slots; /* written to the ring and not shown yet */
	uint32_t staged_requests;
	/* Between wr_start and wr_complete: the request that is being made. */
	bool building;
	int build_error;
	struct verbs_send build;
	uint32_t build_length; /* bytes of payload */
	uint8_t build_payload[VERBS_SEND_PAYLOAD_MAX];
};

struct srq {
	struct ibv_srq base;
	struct lock lock;
	struct memory memory;
	struct ring_producer ring;
	uint32_t max_sge;
	uint32_t async_events; /* guarded by context.objects_lock */
};

static inline struct context *context_of(struct ibv_context *c)
{
	return (struct context *)((uint8_t *)c - offsetof(struct context, verbs.context));
}

static inline struct cq *cq_of(struct ibv_cq *cq)
{
	return (struct cq *)cq;
}

static inline struct qp *qp_of(struct ibv_qp *qp)
{
	return (struct qp *)qp;
}

static inline struct qp *qp_of_ex(struct ibv_qp_ex *qp)
{
	return (struct qp *)qp;
}

static inline struct srq *srq_of(struct ibv_srq *srq)
{
	return (struct srq *)srq;
}

static inline bool is_gone(const struct context *c)
{
	return atomic_load_explicit(&c->gone, memory_order_relaxed);
}

/* nap.c */

int64_t now_ns(void);
/* A wait begins: for how many ns it spins, which ends by spin_end. 0: not at all. */
int64_t spin_begin(struct context *c, struct spin *s);
/* Something came while it was spun, or nothing did. */
void spin_end(struct spin *s, bool came);
/* Whether polls of a context may wait, from now on. */
void nap_begin(struct context *c);
/* Polls have found nothing for a while: lets others run, unless they are to spin. True if it has to
 * be by nap_wait. */
bool nap_yield(struct context *c);
/* Waits for a moment, or until the router has completed something. Without the lock of the CQ. */
void nap_wait(struct cq *cq);
void nap_found_slowly(struct context *c, int64_t since);

/* A poll has found something. */
static inline void nap_found(struct context *c)
{
	int64_t since = atomic_load_explicit(&c->quiet_since, memory_order_relaxed);

	if (since)
		nap_found_slowly(c, since);
}

/* Wakes the router if it sleeps. */
static inline void ring_router(struct context *c)
{
	ring_doorbell((uint8_t *)c->shared + VERBS_CONTEXT_DOORBELL, c->doorbell);
}

static inline void close_fd(int fd)
{
	if (fd >= 0)
		syscall(SYS_close, fd);
}

/* control.c */

/* Connects to the router. Returns the descriptor, or -1 with errno. */
int control_connect(void);
/* Sends a request and waits for its reply: at most ten seconds. `request` begins with struct
 * verbs_request, whose head this fills in, `reply` with struct verbs_reply. `fds` gets exactly
 * `fd_count` descriptors. Returns 0 or an errno. */
int control_request(struct context *c, enum verbs_command command, void *request, size_t request_length,
                    void *reply, size_t reply_length, int *fds, int fd_count);
/* The same for a reply of `least` to `*reply_length` bytes without descriptors; the number becomes
 * what came. */
int control_request_up_to(struct context *c, enum verbs_command command, void *request, size_t request_length,
                          void *reply, size_t least, size_t *reply_length);
/* The same for a request that names one object, whose reply is the head alone. */
int control_object(struct context *c, enum verbs_command command, uint32_t object);
/* The same for the end of an object: when the router has ended, it is gone already. */
int control_destroy(struct context *c, enum verbs_command command, uint32_t object);
/* Looks whether the router has ended, by a system call, and remembers it. */
bool control_is_gone(struct context *c);
/* The router does not keep to the protocol: nothing is asked of it any more. */
void control_give_up(struct context *c);
/* Maps memory that came with a reply and closes the descriptor. Returns 0 or an errno. */
int memory_map(struct memory *m, int fd, uint64_t length);
void memory_unmap(struct memory *m);

/* query.c */
PUBLIC const char *ibv_get_sysfs_path(void);
/* Reads the file `name` of folder `dir` without the last line's end. Returns its length, or -1 with
 * errno. */
PUBLIC int ibv_read_sysfs_file(const char *dir, const char *name, char *text, size_t size);
int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t length);
int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                    struct ibv_device_attr_ex *attr, size_t length);
int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);

/* cq.c */
struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int req_notify_cq(struct ibv_cq *cq, int solicited_only);
/* Takes the next completion that is to be given out; false if there is none. The CQ's lock is
 * held. */
bool cq_next(struct cq *cq, struct verbs_completion *completion);
/* Whether who has polled is to wait, by nap_wait. */
static inline bool cq_take_wait(struct cq *cq)
{
	bool waits = cq->waits;

	cq->waits = false;
	return waits;
}
static inline bool cq_is_receive(const struct verbs_completion *completion)
{
	return completion->opcode & IBV_WC_RECV;
}
/* The queue pair of a completion, which lies at `index` of the ring. What was destroyed or reset
 * has none. */
struct qp *cq_owner(struct cq *cq, const struct verbs_completion *completion, uint32_t index);
int cq_attach_qp(struct cq *cq, struct qp *qp);
void cq_detach_qp(struct cq *cq, struct qp *qp);
/* What the CQ has of the QP by now is not given out. */
void cq_forget_qp(struct cq *cq, struct qp *qp);

/* cq_resize.c */

/* Takes a completion that a smaller ring of the CQ had; false if there is none. The CQ's lock is
 * held. */
bool cq_take_kept(struct cq *cq, struct verbs_completion *completion);
/* Those of a QP are not given out. */
void cq_forget_kept(struct cq *cq, uint32_t qp);

/* cq_ex.c */
void cq_set_extended_ops(struct ibv_cq_ex *cq, uint64_t wc_flags);

/* outstanding.c */
int outstanding_init(struct outstanding *o, uint32_t limit);
void outstanding_complete(struct outstanding *o, const struct verbs_completion *completion);
/* Takes the oldest note; false if there is none. */
bool outstanding_take(struct outstanding *o, uint64_t *wr_id);

static inline uint32_t outstanding_count(struct outstanding *o)
{
	return atomic_load_explicit(&o->head, memory_order_relaxed) -
	       atomic_load_explicit(&o->tail, memory_order_acquire);
}

/* Notes a request that is `ahead` behind those shown. */
static inline void outstanding_note(struct outstanding *o, uint32_t ahead, uint64_t wr_id, bool signaled)
{
	uint32_t at = atomic_load_explicit(&o->head, memory_order_relaxed) + ahead;

	o->notes[at & (o->size - 1)] = (struct request_note){wr_id, signaled};
}

static inline void outstanding_add(struct outstanding *o, uint32_t count)
{
	uint32_t head = atomic_load_explicit(&o->head, memory_order_relaxed);

	atomic_store_explicit(&o->head, head + count, memory_order_release);
}

static inline void outstanding_clear(struct outstanding *o)
{
	atomic_store(&o->tail, atomic_load(&o->head));
}

/* qp.c */
struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* ah.c */
void address_to_wire(struct verbs_address *to, const struct ibv_ah_attr *from);
void address_from_wire(struct ibv_ah_attr *to, const struct verbs_address *from);

/* send.c */
int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
/* Writes a request to the ring, without showing it. The QP's send_lock is held. Returns 0 or an
 * errno. */
int stage_send(struct qp *qp, struct verbs_send *send, const void *payload, uint32_t length);
/* Shows what is staged to the router. */
void show_staged(struct qp *qp);
void drop_staged(struct qp *qp);

/* send_wr.c */
void qp_set_wr_api(struct qp *qp);

/* receive.c */
int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* events.c */
/* Waits until the program has acknowledged as many events as it was given. */
void wait_for_acks(uint32_t *acknowledged, const uint32_t *given);

#endif

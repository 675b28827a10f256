/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the parts of api.c share: a device with a queue pair's needs, and checks. */

#include <errno.h>
#include <infiniband/verbs.h>

#define DEPTH      16
#define THREADS    4
#define CQ_SIZE    (2 * DEPTH * THREADS)
#define IS(a, b)   is(__LINE__, #a, (long long)(a), (long long)(b))
#define MUST(call) must(#call, call)

void is(int line, const char *what, long long have, long long want);
void *must(const char *what, void *object);

extern struct ibv_context *context;
extern struct ibv_pd *pd;
extern struct ibv_comp_channel *channel;
extern struct ibv_cq_ex *cq;
extern struct ibv_mr *mr;
extern uint64_t buffer[4096];

void open_all(void);
struct ibv_qp *make_qp(enum ibv_qp_type type);
/* To a state, with what the specification demands. The peer is another queue pair of this
 * context. */
void to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t remote);
void connect_to(struct ibv_qp *qp, uint32_t remote);
struct ibv_sge at(unsigned int word, unsigned int words);
/* Posts a receive request of one buffer cut into `pieces` words. */
int receive(struct ibv_qp *qp, uint64_t id, unsigned int word, int pieces);
struct ibv_wc next(void);
int readable(int fd);
void send_one(struct ibv_qp *qp, unsigned int flags);
void close_all(struct ibv_qp *a, struct ibv_qp *b);

/* changes.c */
void resize(void);
void reregister(void);
void naps(void);
void spins(void);
void sleeping(void);
void groups(void);
void shared(void);
void scarce(void);

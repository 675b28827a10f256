/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ports of the node that one endpoint keeps from all others. The kernel gives no connect() a port
 * that somebody has taken by bind() or listen(), at whatever address, for as long as a socket of
 * his has it: the one that took it, what it accepted (which goes on when the listener is gone), and
 * either's TIME_WAIT. A port that connect() itself took (also after a bind() with
 * IP_BIND_ADDRESS_NO_PORT) is shared, and not counted here.
 *
 * An endpoint may hold config_endpoint_ports of the node's ephemeral ports; no others are given to
 * connects. A bind() above that is refused, and so is one that cannot be counted. listen() without
 * bind() takes a port, too, and cannot be refused: the agent ends such listeners. */
#ifndef HEDDLE_SOCK_RESERVED_PORTS_H
#define HEDDLE_SOCK_RESERVED_PORTS_H

#include "include/abi/reserved_ports.h"
#include "include/config.h"
#include "include/count.h"
#include "include/kernel_types.h"
#include "include/maps.h"
#include "include/protection.h"
#include "sock/node_ports.h"

static __always_inline bool is_ephemeral(__u32 port)
{
	return port >= config_ephemeral_first && port <= config_ephemeral_last;
}

/* The account of the socket's endpoint in a map of them; NULL if that is gone, also if another has
 * its id by now (counter_of). */
static __always_inline struct port_account *account_in(void *accounts, const struct sock_tag *tag)
{
	__u32 id = tag->endpoint_id; /* before Linux 6.2 an argument's tag is no key of a map */
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_id, &id);

	if (!ep || ep->incarnation != tag->incarnation)
		return NULL;
	return bpf_map_lookup_elem(accounts, &id);
}

static __always_inline struct port_account *ports_of(const struct sock_tag *tag)
{
	return account_in(&ports_by_endpoint, tag);
}

static __always_inline __u32 port_slot_now(void)
{
	return (__u32)(bpf_ktime_get_ns() / (PORT_SLOT_SECONDS * 1000000000ULL));
}

/* Counts a port. False: there are as many as may be, and it is counted only if anyway says so. */
static __noinline bool charge_account(struct port_account *a, __u32 limit, bool anyway)
{
	__u32 now = port_slot_now(), n, i;
	__s64 age;
	bool within;

	if (!a)
		return anyway;
	bpf_spin_lock(&a->lock);
	n = a->held;
	for (i = 0; i < PORT_SLOTS; i++) {
		/* no branch, of which the verifier would follow both ways for each */
		age = now - a->waiting[i].when;
		n += a->waiting[i].ports & (__u32)((age - PORT_SLOTS) >> 63);
	}
	within = n < limit;
	if (within || anyway)
		a->held++;
	bpf_spin_unlock(&a->lock);
	return within;
}

/* Counts a port off, at once or when TIME_WAIT is over. */
static __noinline int uncharge_account(struct port_account *a, bool waits)
{
	__u32 now = port_slot_now(), slot = now & (PORT_SLOTS - 1);

	if (!a)
		return 0;
	bpf_spin_lock(&a->lock);
	if (a->held)
		a->held--;
	if (waits && a->waiting[slot].when == now) {
		a->waiting[slot].ports++;
	} else if (waits) {
		a->waiting[slot].when = now;
		a->waiting[slot].ports = 1;
	}
	bpf_spin_unlock(&a->lock);
	return 0;
}

/* The ports that the node keeps (sock/node_ports.h) are taken one by one: half of them at most by
 * all containers, and a sixteenth by one. A port that several have is one less for the node, so it
 * counts once. */
#define NODE_PORTS_ALL 2
#define NODE_PORTS_ONE 16

static __always_inline __u32 node_ports(void)
{
	return (__u32)config_node_port_last - config_node_port_first + 1;
}

static __always_inline struct port_account *all_node_ports(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&node_ports_held, &zero);
}

static __always_inline struct node_port *node_port_at(__u32 port)
{
	__u32 index = port & (NODE_PORTS_MAX - 1);

	return bpf_map_lookup_elem(&node_port_by_number, &index);
}

/* One more socket has the port, if others have it already, or if first says so. Gives whether they
 * have. */
static __always_inline bool join_node_port(struct node_port *p, bool first)
{
	bool shared;

	bpf_spin_lock(&p->lock);
	shared = p->sockets;
	if (!shared && first)
		p->waits = 0;
	if (shared || first)
		p->sockets++;
	bpf_spin_unlock(&p->lock);
	return shared;
}

/* Counts one of the node's ports. False: it must stay the node's; it is counted only if anyway says
 * so. */
static __noinline bool take_node_port(const struct sock_tag *tag, __u32 port, bool anyway)
{
	struct node_port *p = node_port_at(port);
	struct port_account *all = all_node_ports();
	struct port_account *own;

	if (!tag || !p || !all)
		return false;
	own = account_in(&node_ports_by_endpoint, tag);
	if (!charge_account(own, node_ports() / NODE_PORTS_ONE, anyway) && !anyway)
		return false;
	if (join_node_port(p, false))
		return true;
	if (!charge_account(all, node_ports() / NODE_PORTS_ALL, anyway) && !anyway) {
		uncharge_account(own, false);
		return false;
	}
	if (join_node_port(p, true)) /* another came first */
		uncharge_account(all, false);
	return true;
}

static __noinline int leave_node_port(const struct sock_tag *tag, __u32 port, bool waits)
{
	struct node_port *p = node_port_at(port);
	bool last;

	if (!tag || !p)
		return 0;
	uncharge_account(account_in(&node_ports_by_endpoint, tag), waits);
	bpf_spin_lock(&p->lock);
	p->waits |= waits;
	waits = p->waits;
	last = p->sockets == 1;
	if (p->sockets)
		p->sockets--;
	bpf_spin_unlock(&p->lock);
	return last ? uncharge_account(all_node_ports(), waits) : 0;
}

/* Counts a port. Gives why not: then it is counted only if anyway says so. This and uncharge_port
 * are not static, so that the verifier looks at them once, and not once for all that each call can
 * have led to. */
__noinline __u32 charge_port(const struct sock_tag *tag, __u32 port, bool anyway)
{
	__u32 limit = protects(PROTECT_PORT_QUOTA) ? config_endpoint_ports : ~0U;
	struct port_account *a = tag ? ports_of(tag) : NULL;
	bool within;

	if (!a)
		return REASON_REFUSE_PORT_QUOTA;
	within = charge_account(a, limit, anyway);
	if (!within && !anyway)
		return REASON_REFUSE_PORT_QUOTA;
	if (is_node_port(bpf_htons(port)) && !take_node_port(tag, port, anyway)) {
		uncharge_account(a, false);
		return REASON_REFUSE_NODE_PORT;
	}
	return within ? REASON_NONE : REASON_REFUSE_PORT_QUOTA;
}

/* Counts a port off, at once or when TIME_WAIT is over. */
__noinline int uncharge_port(const struct sock_tag *tag, __u32 port, bool waits)
{
	if (!tag)
		return 0;
	uncharge_account(ports_of(tag), waits);
	return is_node_port(bpf_htons(port)) ? leave_node_port(tag, port, waits) : 0;
}

/* The socket has its port no longer. */
static __noinline int release_port(const struct sock_tag *tag, struct reserved_port *h)
{
	struct port_group *group;
	__u32 port;
	bool waits;
	__u64 id;

	if (!tag || !h || !h->port)
		return 0;
	id = h->group;
	port = h->port;
	waits = h->flags & RESERVED_WAITS;
	h->group = 0;
	h->port = 0;
	if (!id)
		return uncharge_port(tag, port, waits);
	group = bpf_map_lookup_elem(&group_by_listener, &id);
	if (!group)
		return 0;
	if (waits)
		group->waits = 1;
	if (__sync_fetch_and_add(&group->sockets, -1) != 1)
		return 0;
	waits = group->waits;
	bpf_map_delete_elem(&group_by_listener, &id);
	return uncharge_port(tag, port, waits);
}

/* The socket has taken a port. Gives why it must not have it, or REASON_NONE: then it is counted
 * only if anyway says so. */
static __always_inline __u32 reserve_port(struct bpf_sock *sk, const struct sock_tag *tag, __u32 port,
                                          bool anyway)
{
	struct reserved_port *h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);
	__u32 reason;

	if (h && h->port == port)
		return h->flags & RESERVED_OVER_QUOTA ? REASON_REFUSE_PORT_QUOTA : REASON_NONE;
	if (h)
		release_port(tag, h); /* one that the kernel took from it when a connection ended */
	if (!is_ephemeral(port) || !ports_of(tag))
		return REASON_NONE;
	reason = charge_port(tag, port, anyway);
	if (reason && !anyway)
		return reason;
	h = bpf_sk_storage_get(&port_by_sock, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!h) {
		/* The program can fill the memory that it would be in (MSG_ZEROCOPY). */
		uncharge_port(tag, port, false);
		return protects(PROTECT_PORT_QUOTA) ? REASON_REFUSE_NO_STORAGE : reason;
	}
	h->group = 0;
	h->port = port;
	h->flags = RESERVED_CLOSED | (reason ? RESERVED_OVER_QUOTA : 0);
	return reason;
}

/* bind() has given the socket a port. False: it must not have it. */
static __always_inline bool bind_within_quota(struct bpf_sock *sk, const struct sock_tag *tag)
{
	__u32 reason = reserve_port(sk, tag, sk->src_port, false);

	if (!reason)
		return true;
	count(reason);
	bpf_set_retval(reason == REASON_REFUSE_NO_STORAGE ? -ENOBUFS_ : -EADDRINUSE_);
	return false;
}

/* The kernel takes the port away again: bind() is refused for another reason. */
static __always_inline void port_unbound(struct bpf_sock *sk, const struct sock_tag *tag)
{
	struct reserved_port *h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);

	if (h)
		release_port(tag, h);
}

/* From here on what the listener accepts holds the port with it. False: there is no room for
 * that. */
static __always_inline bool group_port(struct bpf_sock_ops *ops, const struct sock_tag *tag,
                                       struct reserved_port *h)
{
	struct port_group first = {}, *group;
	__u64 id = bpf_get_socket_cookie(ops) << 16 | h->port;

	first.sockets = 1;
	if (!bpf_map_update_elem(&group_by_listener, &id, &first, BPF_NOEXIST)) {
		h->group = id;
		return true;
	}
	/* It listened there before, and what it accepted then has the port still. */
	group = bpf_map_lookup_elem(&group_by_listener, &id);
	if (!group)
		return false;
	__sync_fetch_and_add(&group->sockets, 1);
	h->group = id;
	uncharge_port(tag, h->port, false);
	return true;
}

/* listen(), which cannot be refused here: a listener that must not be is reported to the agent,
 * which ends it (end_over_quota). */
static __noinline int port_listens(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	struct bpf_sock *sk = ops->sk;
	__u32 id = tag ? tag->endpoint_id : 0;
	struct reserved_port *h;
	bool within;

	if (!sk || !tag)
		return 0;
	within = !reserve_port(sk, tag, ops->local_port, true);
	h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);
	if (h && h->port && !h->group && !group_port(ops, tag, h) && protects(PROTECT_PORT_QUOTA)) {
		__sync_fetch_and_or(&h->flags, RESERVED_OVER_QUOTA);
		within = false;
	}
	if (!within)
		bpf_ringbuf_output(&surplus, &id, sizeof(id), 0);
	return 0;
}

/* Whether sk is a listener that has a port which it must not have: above the limit, or one that
 * could not be counted. */
static __always_inline bool is_over_quota(struct sock_common *sk, const struct sock_tag *tag)
{
	struct reserved_port *h;

	if (sk->skc_state != BPF_TCP_LISTEN)
		return false;
	h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);
	if (h)
		return h->flags & RESERVED_OVER_QUOTA;
	return is_ephemeral(sk->skc_num) && ports_of(tag) && protects(PROTECT_PORT_QUOTA);
}

/* A connect sends its SYN. */
static __always_inline void port_connects(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct reserved_port *h = sk ? bpf_sk_storage_get(&port_by_sock, sk, 0, 0) : NULL;

	if (h)
		__sync_fetch_and_and(&h->flags, ~RESERVED_CLOSED);
}

/* A listener has accepted: what it holds is the listener's, unless it is at another port (a direct
 * one). */
static __always_inline void port_accepted(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;
	struct reserved_port *h = sk ? bpf_sk_storage_get(&port_by_sock, sk, 0, 0) : NULL;
	struct port_group *group = NULL;
	__u64 id;

	if (!h)
		return;
	id = h->group;
	if (id && h->port == ops->local_port)
		group = bpf_map_lookup_elem(&group_by_listener, &id);
	h->flags = RESERVED_ACCEPTED;
	if (group) {
		__sync_fetch_and_add(&group->sockets, 1);
	} else {
		h->group = 0;
		h->port = 0;
	}
}

/* BPF_SOCK_OPS_STATE_CB. A connection that ends gives its port up if it was accepted; another when
 * no program has the socket either. */
static __noinline int port_state(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	__u32 from = ops->args[0], to = ops->args[1];
	struct bpf_sock *sk = ops->sk;
	struct reserved_port *h;

	if (!sk || !tag || (to != BPF_TCP_CLOSE && to != BPF_TCP_SYN_RECV) || from == BPF_TCP_LISTEN)
		return 0;
	h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);
	if (!h || !h->port)
		return 0;
	if (to == BPF_TCP_SYN_RECV) {
		__sync_fetch_and_or(&h->flags, RESERVED_SIMULTANEOUS);
		return 0;
	}
	if (from == BPF_TCP_SYN_RECV && !(h->flags & (RESERVED_ACCEPTED | RESERVED_SIMULTANEOUS)))
		return 0; /* not established yet: what it has is a copy of its listener's */
	if (from == BPF_TCP_FIN_WAIT2 || from == BPF_TCP_CLOSING)
		__sync_fetch_and_or(&h->flags, RESERVED_WAITS);
	if (h->flags & RESERVED_ACCEPTED)
		return release_port(tag, h);
	if (__sync_fetch_and_or(&h->flags, RESERVED_CLOSED) & RESERVED_RELEASED)
		release_port(tag, h);
	return 0;
}

/* No program has the socket any more. */
static __always_inline void port_released(struct bpf_sock *sk, const struct sock_tag *tag)
{
	struct reserved_port *h = bpf_sk_storage_get(&port_by_sock, sk, 0, 0);

	if (!h || !h->port || h->flags & RESERVED_ACCEPTED)
		return;
	if (__sync_fetch_and_or(&h->flags, RESERVED_RELEASED) & RESERVED_CLOSED)
		release_port(tag, h);
}

#endif

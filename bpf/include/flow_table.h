/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What flow_by_wire and wire_by_relay remember has an owner, who began it: each owner has a part of
 * these tables, and what he adds beyond that pushes out what he has himself. Packets do not say who
 * that is, so the tables are looked up without it, and beside them wires_by_owner says which of
 * their entries are whose. */
#ifndef HEDDLE_FLOW_TABLE_H
#define HEDDLE_FLOW_TABLE_H

#include "include/abi/flow.h"
#include "include/clock.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/relay_events.h"

#define TUPLE_FREE 0
#define TUPLE_BUSY (~0U) /* being changed by another program */

/* The connection as the container's packets show it, if its source port behind the relay is
 * port. */
static __always_inline struct flow_key relay_key(const struct flow *flow, __be16 port)
{
	struct flow_key k = {
	        .saddr = flow->dst,
	        .daddr = flow->src,
	        .sport = flow->dst_port,
	        .dport = port,
	        .ipv6 = flow->ipv6,
	};
	return k;
}

static __always_inline bool same_tuple(const struct flow_key *a, const struct flow_key *b)
{
	return ((a->saddr ^ b->saddr) | (a->daddr ^ b->daddr) | (__u32)(a->sport ^ b->sport) |
	        (__u32)(a->dport ^ b->dport) | (__u32)(a->ipv6 ^ b->ipv6)) == 0;
}

/* Whose a flow is that came from overlay address a. All hosts outside are one. */
static __always_inline __be32 tuple_owner(__be32 a)
{
	return is_container(a) ? a : 0;
}

/* Forgets the way back of a relayed connection. */
static __always_inline void forget_back(const struct flow_key *outer, const struct flow *flow)
{
	struct flow_key back, *found;

	if (flow->kind != FLOW_RELAY)
		return;
	back = relay_key(flow, flow->relay_port);
	found = bpf_map_lookup_elem(&wire_by_relay, &back);
	if (found && same_tuple(found, outer))
		bpf_map_delete_elem(&wire_by_relay, &back);
}

/* The owner's flow in a slot; NULL if it has been forgotten, or another's has the same addresses
 * and ports by now. */
static __always_inline struct flow *flow_in(const struct tuple_slot *s, __be32 owner)
{
	struct flow *flow = bpf_map_lookup_elem(&flow_by_wire, &s->key);

	if (flow && owner && (flow->kind == FLOW_PLAIN || flow->kind == FLOW_RELAY) && flow->src != owner)
		return NULL;
	return flow;
}

/* How much is lost with what is in a slot: what was accepted is forgotten already, and a connection
 * that lives is lost last. */
static __always_inline __u32 worth(const struct tuple_slot *s, __be32 owner)
{
	struct flow *flow;

	if (s->id == TUPLE_FREE)
		return 0;
	flow = flow_in(s, owner);
	if (!flow)
		return 0;
	if (flow->kind != FLOW_RELAY)
		return 2;
	return has_ended(flow) ? 1 : 3;
}

/* A set to begin with: callers' stacks are full. */
const volatile struct tuple_set no_tuples = {};

static __always_inline struct tuple_set *tuples_of(__be32 owner, __u32 digest)
{
	struct flow_set_key k = {.owner = owner, .set = digest & (TUPLE_SETS - 1)};
	struct tuple_set *set = bpf_map_lookup_elem(&wires_by_owner, &k);

	if (set)
		return set;
	bpf_map_update_elem(&wires_by_owner, &k, (const void *)&no_tuples,
	                    BPF_NOEXIST); /* or another was faster */
	return bpf_map_lookup_elem(&wires_by_owner, &k);
}

/* A key has a place in one of these many sets of its owner's, the first that has room: by one set
 * alone some would lose a connection that lives when half of all places are taken. */
#define TUPLE_CHOICES 4

/* The place whose flow is the least loss, and of several the one that was taken first. */
struct slot_choice {
	struct tuple_set *set; /* being looked at */
	struct tuple_set *best;
	__be32 owner;
	__u32 rank; /* worth: 2 bits; when it was taken: 27, four years; which: 3 */
};

static int choose_slot(__u32 i, struct slot_choice *c)
{
	const struct tuple_slot *s = &c->set->wire[i & (SET_TUPLES - 1)];
	__u32 w, rank;

	if (s->id == TUPLE_BUSY)
		return 0;
	w = worth(s, c->owner);
	rank = w << 30 | s->seen << 5 >> 2 | i;
	if (rank < c->rank) {
		c->rank = rank;
		c->best = c->set;
	}
	return w == 0;
}

/* Not static, so that the verifier looks at it once, and not once for each of TUPLE_CHOICES. */
__noinline bool has_tuple(const struct tuple_set *set, __u32 id, const struct flow_key *key)
{
	__u32 i;

	if (!set || !key)
		return false;
	for (i = 0; i < SET_TUPLES; i++) {
		if (set->wire[i].id == id)
			break;
	}
	return i < SET_TUPLES && same_tuple(&set->wire[i & (SET_TUPLES - 1)].key, key);
}

/* Forgets what is in a slot, which the caller has made TUPLE_BUSY. */
static __always_inline void forget_tuple(const struct tuple_slot *s, __be32 owner)
{
	struct flow *flow = flow_in(s, owner);

	if (!flow)
		return;
	if (flow->kind == FLOW_RELAY && !has_ended(flow)) {
		count(REASON_CUT_RELAY_FORGOTTEN);
		report_forgotten(&s->key, flow);
	}
	forget_back(&s->key, flow);
	bpf_map_delete_elem(&flow_by_wire, &s->key);
}

/* Gives key the place that is the least loss among its owner's, and forgets what was there. False:
 * another program changes that place just now. */
static __always_inline bool place_tuple(const struct flow_key *key, __be32 owner)
{
	struct slot_choice c = {.owner = owner, .rank = ~0U};
	__u64 digest = digest_tuple(key);
	__u32 id = (__u32)(digest >> 32) >> 1 | 1, was, n;
	struct tuple_slot *s;

	for (n = 0; n < TUPLE_CHOICES && c.rank >> 30; n++) {
		c.set = tuples_of(owner, (__u32)(digest >> n * 10));
		if (!c.set)
			return false;
		if (has_tuple(c.set, id, key))
			return true;
		bpf_loop(SET_TUPLES, choose_slot, &c, 0);
	}
	if (!c.best)
		return false;
	s = &c.best->wire[c.rank & (SET_TUPLES - 1)];
	was = s->id;
	if (was == TUPLE_BUSY || __sync_val_compare_and_swap(&s->id, was, TUPLE_BUSY) != was)
		return false;
	if (was != TUPLE_FREE)
		forget_tuple(s, owner);
	s->key = *key;
	s->seen = now_units();
	WRITE_ONCE(s->id, id);
	return true;
}

/* What key led to goes. */
static __noinline int replace_tuple(const struct flow_key *key)
{
	struct flow *old = bpf_map_lookup_elem(&flow_by_wire, key);

	if (old)
		forget_back(key, old);
	return 0;
}

static __noinline int store_tuple(const struct flow_key *key, const struct flow *flow)
{
	struct flow value = *flow;

	return bpf_map_update_elem(&flow_by_wire, key, &value, BPF_ANY) == 0;
}

/* Remembers flow as owner's. 0: it is not, which is better told now than found out later. Not
 * static, so that the verifier looks at it once, and not once for each call: before Linux 6.2 maps
 * do not take keys and values from what such a function's arguments point to, hence the copies; and
 * they are not all in one frame, because callers' stacks are full. */
__noinline int remember_tuple(const struct flow_key *key, const struct flow *flow, __be32 owner)
{
	struct flow_key k;

	if (!key || !flow)
		return 0;
	k = *key;
	replace_tuple(&k);
	if (protects(PROTECT_FLOW_MEMORY) && !place_tuple(&k, owner))
		return 0;
	return store_tuple(&k, flow);
}

#endif

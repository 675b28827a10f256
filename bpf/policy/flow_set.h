/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Flows that the filters remember: a cache of four flows a set (struct flow_set), in which a flow's
 * owner, who began it, says which sets it may be in. A flood of one container's can fill the sets
 * of that container only, and push out what else it began itself: least recently heard of first. */
#ifndef HEDDLE_POLICY_FLOW_SET_H
#define HEDDLE_POLICY_FLOW_SET_H

#include "include/abi/flow_set.h"
#include "include/address.h"
#include "include/clock.h"
#include "include/endpoint.h"
#include "include/protection.h"

/* In seen: an end of the flow has said that it ends. It is known as before, and the first to go. */
#define FLOW_CLOSES 0x80000000u

/* Whose flow f is. Containers cannot send in another's name, and hosts outside share one place. */
static __always_inline __be32 owner_of(const struct flow_id *f)
{
	if (!protects(PROTECT_FLOW_MEMORY))
		return 0;
	if (is_mapped(&f->from))
		return is_container(f->from.word[3]) ? f->from.word[3] : 0;
	return is_overlay6(&f->from) ? f->from.word[3] : 0;
}

/* A digest of f. Flows of one owner with the same one are taken for one flow; each is decided all
 * the same. */
static __always_inline __u64 digest_flow(const struct flow_id *f)
{
	const __u32 *word = (const __u32 *)f;
	__u64 h = 0;
	__u32 i;

	for (i = 0; i < sizeof(*f) / sizeof(__u32); i += 2) {
		h = (h ^ ((__u64)word[i] << 32 | word[i + 1])) * 0x9e3779b97f4a7c15ULL;
		h ^= h >> 32;
	}
	/* Ports change the upper bits only so far: every bit of the result must depend on them. */
	h *= 0xff51afd7ed558ccdULL;
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	h ^= h >> 33;
	return h | 1;
}

static __always_inline struct flow_set_key flow_set_key(const struct flow_id *f, __u64 id)
{
	struct flow_set_key k;

	k.owner = owner_of(f);
	k.set = id >> 1 & (OWNER_SETS - 1);
	return k;
}

/* A set to begin with: callers' stacks are full. */
const volatile struct flow_set no_flows = {};

static __always_inline __u32 last_heard(__u32 seen)
{
	return seen & FLOW_CLOSES ? 1 : seen; /* 0: a place that is free */
}

/* Remembers value of f in one of the maps above, and gives 1 if nothing was. Inlined once for each
 * map: only then the lookup is. */
static __always_inline int remember_flow(void *map, const struct flow_id *f, __u32 value)
{
	struct flow_set_key k;
	struct flow_set *set;
	__u32 i, at = 0;
	bool fresh;
	__u64 id;

	if (!f)
		return 0;
	id = digest_flow(f);
	k = flow_set_key(f, id);
	set = bpf_map_lookup_elem(map, &k);
	if (!set) {
		bpf_map_update_elem(map, &k, (const void *)&no_flows,
		                    BPF_NOEXIST); /* or another was faster */
		set = bpf_map_lookup_elem(map, &k);
		if (!set)
			return 0;
	}
	for (i = 0; i < SET_FLOWS; i++) {
		if (set->flow[i].id == id) {
			at = i;
			break;
		}
		if (last_heard(set->flow[i].seen) < last_heard(set->flow[at & (SET_FLOWS - 1)].seen))
			at = i;
	}
	at &= SET_FLOWS - 1;
	/* In this order, so that nobody finds a flow with what was remembered of another. */
	fresh = set->flow[at].id != id;
	if (fresh)
		WRITE_ONCE(set->flow[at].id, 0);
	WRITE_ONCE(set->flow[at].value, value);
	WRITE_ONCE(set->flow[at].seen, now_units());
	WRITE_ONCE(set->flow[at].id, id);
	return fresh;
}

#define ANY_TIME (~0U)

/* What is remembered of f, if it was heard of in the last so many units of time; 0 if nothing is.
 * again: it is heard of now; closes: and ends. */
static __always_inline __u32 recall_flow(void *map, const struct flow_id *f, __u32 units, bool again,
                                         bool closes)
{
	struct flow_set_key k;
	struct flow_set *set;
	__u32 now, i;
	__u64 id;

	if (!f)
		return 0;
	id = digest_flow(f);
	k = flow_set_key(f, id);
	set = bpf_map_lookup_elem(map, &k);
	if (!set)
		return 0;
	now = again || units != ANY_TIME ? now_units() : 0;
	for (i = 0; i < SET_FLOWS; i++) {
		if (set->flow[i].id != id)
			continue;
		if (units != ANY_TIME && now - set->flow[i].seen > units)
			return 0;
		if (set->flow[i].seen & FLOW_CLOSES)
			return set->flow[i].value;
		if (closes)
			set->flow[i].seen = now | FLOW_CLOSES;
		else if (again && set->flow[i].seen != now)
			set->flow[i].seen = now;
		return set->flow[i].value;
	}
	return 0;
}

#endif

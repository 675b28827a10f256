/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Services: a connect to an address and port that stand for backends goes to one of them. It is
 * picked here, once a connection, before policy is asked and a path is chosen: nothing of a service
 * is in any packet. */
#ifndef HEDDLE_SOCK_SERVICE_H
#define HEDDLE_SOCK_SERVICE_H

#include "include/abi/service.h"
#include "include/maps.h"
#include "include/service.h"
#include "sock/context.h"

enum service_outcome {
	SERVICE_NONE,  /* not a service's address and port */
	SERVICE_TAKEN, /* the context has a backend's */
	SERVICE_EMPTY, /* it has no backend */
	SERVICE_LOST,  /* the kernel gives the socket no room to remember by what it asked for */
};

#define NANOSECONDS 1000000000ULL

/* One of the service's backends, each as likely. The agent may be taking one away: then the last
 * slot is empty for a moment, and the first is not. */
static __noinline struct backend *any_backend(const struct service *service)
{
	struct backend *b;

	if (!service->backends)
		return NULL;
	b = backend_at(service->id, bpf_get_prandom_u32() % service->backends);
	return b ? b : backend_at(service->id, 0);
}

static __always_inline void copy_backend(struct backend *to, const struct backend *from)
{
	to->addr = from->addr;
	to->port = from->port;
	to->pad = 0;
}

/* The backend that endpoint_id had last, if that is not too long ago and the service still has it;
 * or any. */
static __noinline bool kept_backend(const struct service *service, __u32 endpoint_id, struct backend *to)
{
	struct affinity_key key = {.service_id = service->id, .endpoint_id = endpoint_id};
	struct affinity *had = bpf_map_lookup_elem(&affinity_by_client, &key);
	__u32 now = bpf_ktime_get_boot_ns() / NANOSECONDS;
	struct affinity fresh = {};
	struct member_key member = {};
	struct backend *b;

	if (had && now - had->last_s < affinity_of(service)) {
		member.service_id = service->id;
		copy_backend(&member.backend, &had->backend);
		if (bpf_map_lookup_elem(&member_by_backend, &member)) {
			had->last_s = now;
			copy_backend(to, &member.backend);
			return true;
		}
	}
	b = any_backend(service);
	if (!b)
		return false;
	copy_backend(to, b);
	copy_backend(&fresh.backend, b);
	fresh.last_s = now;
	bpf_map_update_elem(&affinity_by_client, &key, &fresh, BPF_ANY);
	return true;
}

/* Looks *asked up, IPv4 as v4-mapped, and puts the backend's address and port there. */
static __noinline int pick_backend(struct service_key *asked, __u32 endpoint_id)
{
	struct service *service = bpf_map_lookup_elem(&service_by_addr, asked);
	struct backend to = {};
	struct backend *b;
	int i;

	if (!service)
		return SERVICE_NONE;
	if (affinity_of(service)) {
		if (!kept_backend(service, endpoint_id, &to))
			return SERVICE_EMPTY;
	} else {
		b = any_backend(service);
		if (!b)
			return SERVICE_EMPTY;
		copy_backend(&to, b);
	}
	for (i = 0; i < 4; i++)
		asked->addr.word[i] = to.addr.word[i];
	asked->port = to.port;
	return SERVICE_TAKEN;
}

/* Puts the backend of a service, if at and the context's port are one, in their place, and
 * remembers what was asked for. The port is read and written here only: the callers' compiler would
 * keep its place in the context, which the verifier refuses. */
static __noinline int to_backend(struct bpf_sock_addr *ctx, struct sock_tag *tag, struct address *at)
{
	struct service_key to = {}, *asked;
	__u32 port = ctx->user_port;
	int outcome, i;

	for (i = 0; i < 4; i++)
		to.addr.word[i] = at->word[i];
	to.port = (__be16)port;
	outcome = pick_backend(&to, tag->endpoint_id);
	if (outcome != SERVICE_TAKEN)
		return outcome;
	asked = bpf_sk_storage_get(&service_by_sock, sk_of(ctx), 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!asked)
		return SERVICE_LOST;
	for (i = 0; i < 4; i++)
		asked->addr.word[i] = at->word[i];
	asked->port = (__be16)port;
	tag->flags |= TAG_SERVICE;
	for (i = 0; i < 4; i++)
		at->word[i] = to.addr.word[i];
	barrier();
	ctx->user_port = to.port;
	return SERVICE_TAKEN;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Policy for what containers' own stacks send to a service's address: the node's rules
 * (kube-proxy's) put a backend in its place later, and policy is about backends.
 *
 *   in the overlay    asked about when the packet leaves by a veth (to_endpoint) or the overlay
 *                     (to_overlay), which see the backend. By another device it does not leave: it
 *                     has the service mark, and nftables lets it go by those alone
 *   beyond it         no program sees the packet again. All backends of the service have to be
 *                     allowed here; and nftables lets it go if its connection is translated */
#ifndef HEDDLE_POLICY_SERVICE_H
#define HEDDLE_POLICY_SERVICE_H

#include "include/address.h"
#include "include/config.h"
#include "include/service.h"
#include "policy/decide.h"

/* After enum heddle_verdict and VERDICT_UNDECIDABLE: it goes to a service, whose backends are asked
 * about later, or have all been and may be sent to; or to none. */
#define VERDICT_LATER      4
#define VERDICT_BACKENDS   5
#define VERDICT_NO_SERVICE 6

/* Whether what has this verdict may go on. */
static __always_inline bool passes(__u32 verdict)
{
	return verdict == VERDICT_ALLOW || verdict >= VERDICT_LATER;
}

/* Beyond the overlay: a service with more is judged by its own address. */
#define SERVICE_BACKENDS 16

/* Whether a is of the overlay's pool. */
static __always_inline bool in_overlay(const struct address *a)
{
	int i;

	if (!is_mapped(a))
		return is_overlay6(a);
	for (i = 0; i < CONFIG_POOLS; i++) {
		if (config_pool_mask[i] && (a->word[3] & config_pool_mask[i]) == config_pool[i])
			return true;
	}
	return false;
}

/* What policy says of f, which a container sends, if it is to a service: one of the verdicts above,
 * or that on a backend which forbids it. Not static, so that the verifier looks at it once. */
__noinline __u32 decide_service(const struct flow_id *f)
{
	__u32 i, id, backends, verdict;
	struct service_key key = {};
	struct service *service;
	struct backend *b;

	if (!f || (f->protocol != IPPROTO_TCP_ && f->protocol != IPPROTO_UDP_) || in_overlay(&f->to))
		return VERDICT_NO_SERVICE;
	for (i = 0; i < 4; i++)
		key.addr.word[i] = f->to.word[i];
	key.port = f->dport;
	key.pad = f->protocol == IPPROTO_UDP_ ? IPPROTO_UDP_ : 0;
	service = bpf_map_lookup_elem(&service_by_addr, &key);
	if (!service)
		return VERDICT_NO_SERVICE;
	if (service->affinity_s & SERVICE_OVERLAY)
		return VERDICT_LATER;
	id = service->id;
	backends = service->backends;
	if (backends > SERVICE_BACKENDS)
		return VERDICT_NO_SERVICE;
	for (i = 0; i < SERVICE_BACKENDS && i < backends; i++) {
		b = backend_at(id, i);
		verdict = b ? decide(&f->from, &b->addr, f->protocol, bpf_ntohs(b->port)) : VERDICT_ALLOW;
		if (verdict != VERDICT_ALLOW)
			return verdict;
	}
	return VERDICT_BACKENDS;
}

/* The mark of a packet with one of these verdicts. */
static __always_inline __u32 service_mark(__u32 verdict)
{
	return verdict == VERDICT_BACKENDS ? config_service_mark | 1 : config_service_mark;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Endpoints of this node, and whether a tagged socket is of one. */
#ifndef HEDDLE_ENDPOINT_H
#define HEDDLE_ENDPOINT_H

#include "include/abi/endpoint.h"
#include "include/address.h"
#include "include/config.h"
#include "include/maps.h"
#include "include/protection.h"
#include "include/tag.h"

/* ep, which has the id of this tag's endpoint (it may be NULL), unless it is another that has its
 * id by now. */
static __always_inline struct endpoint *unless_another(struct endpoint *ep, const struct sock_tag *tag)
{
	if (ep && protects(PROTECT_INCARNATION) && ep->incarnation != tag->incarnation)
		return NULL;
	return ep;
}

/* The endpoint that a socket with this tag is of; NULL if it is gone, also if another has its id by
 * now. */
static __always_inline struct endpoint *tagged_endpoint(const struct sock_tag *tag)
{
	__u32 id = tag->endpoint_id; /* before Linux 6.2 an iterator's tag is no key of a map */

	return unless_another(bpf_map_lookup_elem(&endpoint_by_id, &id), tag);
}

/* Whether a socket with this tag (which may be NULL) is of endpoint owner. */
static __always_inline bool is_of(const struct sock_tag *tag, __u32 owner)
{
	return tag && tag->endpoint_id == owner && tagged_endpoint(tag);
}

/* Whether a listener with this tag takes what comes by the container's loopback, or what comes from
 * beyond it: a program may have bound it to a device. The kernel's socket is bound to none. */
static __always_inline bool takes_from(const struct sock_tag *tag, bool loopback)
{
	struct endpoint *ep;

	if (!tag->ifindex)
		return true;
	if (loopback)
		return tag->ifindex == LOOPBACK_IFINDEX;
	ep = tagged_endpoint(tag);
	return ep && tag->ifindex == ep->container_ifindex;
}

/* Where the device leads that the program bound the socket to. */
enum device_way {
	DEVICE_LEADS,    /* there, or it is bound to none */
	DEVICE_SILENT,   /* to where nobody answers */
	DEVICE_NO_ROUTE, /* by lo beyond the container */
	DEVICE_UNKNOWN,  /* nowhere: it is none of the container's that Heddle knows */
};

/* Whether a socket with this tag may go to a destination that is loopback's, or not. */
static __always_inline int way_of_device(const struct sock_tag *tag, const struct endpoint *ep, bool loopback)
{
	if (!tag->ifindex)
		return DEVICE_LEADS;
	if (tag->ifindex == LOOPBACK_IFINDEX)
		return loopback ? DEVICE_LEADS : DEVICE_NO_ROUTE;
	if (tag->ifindex != ep->container_ifindex)
		return DEVICE_UNKNOWN;
	return loopback ? DEVICE_SILENT : DEVICE_LEADS;
}

/* The endpoint of this node with overlay address addr. */
static __always_inline struct endpoint *endpoint_at(__be32 addr)
{
	struct address key;

	set_mapped(&key, addr);
	return bpf_map_lookup_elem(&endpoint_by_addr, &key);
}

/* Whether IPv4 address a is of the overlay, or the other network's of an endpoint of this node. Not
 * static, so that the verifier looks at it once. */
__noinline bool is_container(__be32 a)
{
	int i;

	for (i = 0; i < CONFIG_POOLS; i++) {
		if (config_pool_mask[i] && (a & config_pool_mask[i]) == config_pool[i])
			return true;
	}
	return endpoint_at(a) != NULL;
}

#endif

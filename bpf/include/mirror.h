/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Mirror addresses: 250.0.0.0/8 holds 1024 addresses for each endpoint id, routed to its veth. On
 * the node they stand for the addresses that the endpoint's container has in its own stack, where
 * the processes are that are not intercepted. So a connection between such a process and a node
 * socket of the same container has one end at a mirror address and the other at an alias or the
 * overlay address, and the two tell what the programs see: nothing has to be remembered. Mirrors
 * internal/model; a test ties the numbers.
 *
 * The container's addresses are given as in struct flow: an IPv6 one by the overlay address it
 * embeds, ::1 by 0. */
#ifndef HEDDLE_MIRROR_H
#define HEDDLE_MIRROR_H

#include "include/abi/endpoint.h"
#include "include/abi/flow.h"
#include "include/address.h"

#define MIRROR_BASE      0xfa000000
#define MIRROR_SLOTS     1024
#define MIRROR_CROSSING  256 /* crossing addresses: to 383 */
#define MIRROR_CROSSINGS 128
#define MIRROR_SLOT_OWN6 509 /* the overlay address; below 256: 127.0.0.0/24 */
#define MIRROR_SLOT_OWN4 510
#define MIRROR_SLOT_IPV6 511 /* ::1 */
#define ALIAS_SLOT_OWN6  510 /* stands for the IPv6 overlay address, where a connection is IPv4 underneath */

/* Set: the node socket is at the overlay address, and has the name that the kernel gives a socket
 * at a wildcard: the address of its peer's kind. It stands for 127.0.0.1 and ::1 wherever the
 * program did not bind to them itself. */
#define MIRROR_WILD 512

/* The address that programs see: the form of v4 of the family, or ::1. */
static __always_inline void set_name(struct address *a, bool ipv6, __be32 v4)
{
	if (v4)
		set_overlay(a, ipv6, v4);
	else
		set_loopback6(a);
}

static __always_inline bool is_mirror(__be32 a)
{
	return (a & bpf_htonl(0xff000000)) == bpf_htonl(MIRROR_BASE);
}

static __always_inline __be32 mirror_base(__u32 endpoint_id)
{
	return bpf_htonl(MIRROR_BASE | (endpoint_id & ALIAS_ID_MASK) * MIRROR_SLOTS);
}

static __always_inline bool is_mirror_of(__be32 a, __u32 endpoint_id)
{
	return (a & bpf_htonl(~(MIRROR_SLOTS - 1))) == mirror_base(endpoint_id);
}

/* The address that stands for destination to, beyond the container, in connections that cross
 * (tc/crossing.h). It stands for others as well. */
static __always_inline __be32 crossing_of(__u32 endpoint_id, const struct address *to)
{
	__u32 hash = (to->word[0] ^ to->word[1] ^ to->word[2] ^ to->word[3]) * 0x9e3779b1;

	return mirror_base(endpoint_id) | bpf_htonl(MIRROR_CROSSING | (hash >> 25 & (MIRROR_CROSSINGS - 1)));
}

static __always_inline bool is_crossing(__be32 a)
{
	return is_mirror(a) &&
	       (bpf_ntohl(a) & (MIRROR_SLOTS - 1) & ~(MIRROR_CROSSINGS - 1)) == MIRROR_CROSSING;
}

/* Whether a stands for an address of the container itself. */
static __always_inline bool is_own_mirror(__be32 a)
{
	return is_mirror(a) && !is_crossing(a);
}

static __always_inline bool is_alias_of(__be32 a, __u32 endpoint_id)
{
	return (a & bpf_htonl(~(ALIAS_SLOTS - 1))) == alias(endpoint_id, 0);
}

/* Whether a is in 127.0.0.0/24, the loopback addresses that have a mirror address. */
static __always_inline bool is_mirrored_loopback(__be32 a)
{
	return (a & bpf_htonl(0xffffff00)) == bpf_htonl(0x7f000000);
}

/* The hardware address of the node's side of the endpoint's veth: netdev's HostMAC. */
static __always_inline void host_mac(__u8 *mac, __u32 id)
{
	mac[0] = 0x02;
	mac[1] = 0x48;
	mac[2] = 0x45;
	mac[3] = id >> 16;
	mac[4] = id >> 8;
	mac[5] = id;
}

/* That of the container's side: netdev's ContainerMAC. */
static __always_inline void container_mac(__u8 *mac, __u32 id)
{
	host_mac(mac, id);
	mac[2] = 0x43;
}

/* The mirror address of the container's address a, 0 if it has none. */
static __always_inline __be32 mirror_of(const struct endpoint *ep, bool ipv6, __be32 a)
{
	__be32 base = mirror_base(ep->id);

	if (a == ep->addr4.word[3])
		return base | bpf_htonl(ipv6 ? MIRROR_SLOT_OWN6 : MIRROR_SLOT_OWN4);
	if (ipv6)
		return a ? 0 : base | bpf_htonl(MIRROR_SLOT_IPV6);
	return is_mirrored_loopback(a) ? base | (a & bpf_htonl(0xff)) : 0;
}

/* Where node sockets hold the container's address a, in a connection that is IPv4 underneath. Only
 * for addresses that have a mirror address. */
static __always_inline __be32 node_address(const struct endpoint *ep, bool ipv6, __be32 a)
{
	if (!ipv6)
		return a == ep->addr4.word[3] ? a : alias4(ep->id, a);
	return a ? alias(ep->id, ALIAS_SLOT_OWN6) : alias6(ep->id);
}

/* What programs see of the two ends of a connection: at the mirror address (to names->src) and at
 * the node address (to names->dst). False if these are no such addresses of ep. */
static __always_inline bool pod_names(const struct endpoint *ep, __be32 mirror, __be32 node,
                                      struct flow *names)
{
	__u32 slot = bpf_ntohl(mirror) & (MIRROR_SLOTS - 1), at = bpf_ntohl(node) & (ALIAS_SLOTS - 1);
	bool wild = slot & MIRROR_WILD;
	__be32 own = ep->addr4.word[3];

	slot &= ~MIRROR_WILD;
	if (!is_mirror_of(mirror, ep->id))
		return false;
	names->ipv6 = slot == MIRROR_SLOT_OWN6 || slot == MIRROR_SLOT_IPV6;
	if (slot == MIRROR_SLOT_OWN4 || slot == MIRROR_SLOT_OWN6)
		names->src = own;
	else if (slot == MIRROR_SLOT_IPV6)
		names->src = 0;
	else if (slot < ALIAS_SLOT_SHARED)
		names->src = bpf_htonl(0x7f000000 | slot);
	else
		return false;
	names->dst = own;
	if (node == own) {
		if (wild && names->src != own)
			names->dst = names->ipv6 ? 0 : LOOPBACK4;
		return wild || !names->ipv6;
	}
	if (wild || !is_alias_of(node, ep->id))
		return false;
	if (names->ipv6) {
		if (at == ALIAS_SLOT_IPV6)
			names->dst = 0;
		return at == ALIAS_SLOT_IPV6 || at == ALIAS_SLOT_OWN6;
	}
	names->dst = bpf_htonl(0x7f000000 | at);
	return at < ALIAS_SLOT_SHARED;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Addresses: mapped form, loopback aliases, routes. Mirrors internal/model; a test ties the
 * aliases. */
#ifndef HEDDLE_ADDRESS_H
#define HEDDLE_ADDRESS_H

#include "include/abi/address.h"
#include "include/config.h"

#define V4_MAPPED_PREFIX bpf_htonl(0xffff)
#define LOOPBACK4        bpf_htonl(0x7f000001)
#define DOCKER_DNS       bpf_htonl(0x7f00000b) /* 127.0.0.11 */
#define DNS_PORT         53

/* Loopback aliases: 127.128.0.0/9 holds 512 addresses for each endpoint id, which stand for the
 * loopback addresses of that endpoint's container. Local in every namespace without set-up. */
#define ALIAS_BASE        0x7f800000
#define ALIAS_ID_MASK     0x3fff
#define ALIAS_SLOTS       512
#define ALIAS_SLOT_SHARED 256 /* below: 127.0.0.0/24, one each; from here the rest of 127.0.0.0/8 by a hash */
#define ALIAS_SLOT_LAST   509
#define ALIAS_SLOT_IPV6   511 /* ::1 */

/* These store word by word. A constant struct that is copied makes clang 14's BPF backend drop
 * neighbouring stores; a test in internal/plane/tcp/datapath refuses objects with such
 * constants. */
static __always_inline void set_mapped(struct address *a, __be32 v4)
{
	a->word[0] = 0;
	a->word[1] = 0;
	a->word[2] = V4_MAPPED_PREFIX;
	a->word[3] = v4;
}

static __always_inline void set_loopback6(struct address *a)
{
	a->word[0] = 0;
	a->word[1] = 0;
	a->word[2] = 0;
	a->word[3] = bpf_htonl(1);
}

/* ::1, or the IPv4 loopback address v4. */
static __always_inline void set_loopback(struct address *a, bool v6, __be32 v4)
{
	if (v6)
		set_loopback6(a);
	else
		set_mapped(a, v4);
}

static __always_inline void set_words(struct address *a, const __be32 *words)
{
	a->word[0] = words[0];
	a->word[1] = words[1];
	a->word[2] = words[2];
	a->word[3] = words[3];
}

/* These compare all words at once: with a branch for each, the verifier has so many more states to
 * go on from. */
static __always_inline bool is_mapped(const struct address *a)
{
	return (a->word[0] | a->word[1] | (a->word[2] ^ V4_MAPPED_PREFIX)) == 0;
}

static __always_inline bool same_address(const struct address *a, const struct address *b)
{
	return ((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]) |
	        (a->word[3] ^ b->word[3])) == 0;
}

static __always_inline bool is_unspecified6(const struct address *a)
{
	return (a->word[0] | a->word[1] | a->word[2] | a->word[3]) == 0;
}

static __always_inline bool is_loopback6(const struct address *a)
{
	return (a->word[0] | a->word[1] | a->word[2] | (a->word[3] ^ bpf_htonl(1))) == 0;
}

static __always_inline bool is_loopback4(__be32 a)
{
	return (a & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

static __always_inline __be32 alias(__u32 endpoint_id, __u32 slot)
{
	return bpf_htonl(ALIAS_BASE | (endpoint_id & ALIAS_ID_MASK) * ALIAS_SLOTS | slot);
}

/* The node address that stands for loopback address a of the endpoint's container. */
static __always_inline __be32 alias4(__u32 endpoint_id, __be32 a)
{
	__u32 host = bpf_ntohl(a) & 0xffffff;

	if (host >= ALIAS_SLOT_SHARED)
		host = ALIAS_SLOT_SHARED + host % (ALIAS_SLOT_LAST + 1 - ALIAS_SLOT_SHARED);
	return alias(endpoint_id, host);
}

/* The same for ::1. */
static __always_inline __be32 alias6(__u32 endpoint_id)
{
	return alias(endpoint_id, ALIAS_SLOT_IPV6);
}

/* Whether a stands for a container's loopback address, and so is never shown to a program. */
static __always_inline bool is_alias(__be32 a)
{
	return (a & bpf_htonl(0xff800000)) == bpf_htonl(ALIAS_BASE);
}

static __always_inline bool is_alias6(__be32 a)
{
	return is_alias(a) && (a & bpf_htonl(ALIAS_SLOTS - 1)) == bpf_htonl(ALIAS_SLOT_IPV6);
}

/* The loopback address that alias a stands for, 0 for ::1. Of a shared one only the range is
 * known. */
static __always_inline __be32 loopback_of(__be32 a)
{
	__u32 slot = bpf_ntohl(a) & (ALIAS_SLOTS - 1);

	if (slot == ALIAS_SLOT_IPV6)
		return 0;
	return slot < ALIAS_SLOT_SHARED ? bpf_htonl(0x7f000000 | slot) : LOOPBACK4;
}

/* Whether the overlay has IPv6 addresses. */
static __always_inline bool has_overlay6(void)
{
	return (config_prefix6[0] | config_prefix6[1] | config_prefix6[2]) != 0;
}

/* The IPv6 form of overlay address v4. */
static __always_inline void set_overlay6(struct address *a, __be32 v4)
{
	a->word[0] = config_prefix6[0];
	a->word[1] = config_prefix6[1];
	a->word[2] = config_prefix6[2];
	a->word[3] = v4;
}

static __always_inline void set_overlay(struct address *a, bool ipv6, __be32 v4)
{
	if (ipv6)
		set_overlay6(a, v4);
	else
		set_mapped(a, v4);
}

/* Whether a is the IPv6 form of an overlay address: its last word is the IPv4 one. */
static __always_inline bool is_overlay6(const struct address *a)
{
	return has_overlay6() && ((a->word[0] ^ config_prefix6[0]) | (a->word[1] ^ config_prefix6[1]) |
	                          (a->word[2] ^ config_prefix6[2])) == 0;
}

/* Whether the underlay is IPv6: then nodes have an inner IPv4 address each, and what their sockets
 * send to these is translated (tc/wire.h). */
static __always_inline bool is_translated(void)
{
	return (config_outer[0] | config_outer[1] | config_outer[2] | config_outer[3]) != 0;
}

static __always_inline void set_outer(struct address *a)
{
	a->word[0] = config_outer[0];
	a->word[1] = config_outer[1];
	a->word[2] = config_outer[2];
	a->word[3] = config_outer[3];
}

/* Whether these are the words of this node's IPv6 address on the underlay. */
static __always_inline bool is_outer(const __be32 *words)
{
	return ((words[0] ^ config_outer[0]) | (words[1] ^ config_outer[1]) | (words[2] ^ config_outer[2]) |
	        (words[3] ^ config_outer[3])) == 0;
}

static __always_inline bool is_link_local6(const struct address *a)
{
	return (a->word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

/* Whether a is the link-local address of the device of endpoint id: of hardware address 02:48:43
 * and the id. */
static __always_inline bool is_own_link_local6(const struct address *a, __u32 id)
{
	return a->word[0] == bpf_htonl(0xfe800000) && a->word[1] == 0 &&
	       a->word[2] == bpf_htonl(0x004843ff) && a->word[3] == bpf_htonl(0xfe000000 | (id & 0xffffff));
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The SYN option: docs/protocols/syn-option.md is normative. */
#ifndef HEDDLE_SYN_OPTION_H
#define HEDDLE_SYN_OPTION_H

#include "include/abi/reason.h"
#include "include/abi/syn_option.h"
#include "include/address.h"
#include "include/config.h"

#define OPTION_KIND     253    /* RFC 4727: experiments */
#define OPTION_EXID     0x4864 /* "Hd", RFC 6994 experiment identifier */
#define OPTION_IPV4     1      /* versions: src and dst are addresses */
#define OPTION_IPV6     2      /* ... stand for their IPv6 forms */
#define OPTION_PROBE    3 /* ... are the nodes' gateways: asks whether options arrive, for no connection */
/* Between containers, not to a direct port: asks whether the nodes' firewalls let a SYN pass. */
#define OPTION_FIREWALL 4

static __always_inline struct syn_option make_option(bool ipv6, __be32 src, __be32 dst, __be16 dst_port)
{
	struct syn_option o = {
	        .kind = OPTION_KIND,
	        .length = sizeof(o),
	        .exid = bpf_htons(OPTION_EXID),
	        .version_network = bpf_htons((ipv6 ? OPTION_IPV6 : OPTION_IPV4) << 12 | config_network_id),
	        .dst_port = dst_port,
	        .dst = dst,
	        .src = src,
	};
	return o;
}

static __always_inline bool option_is_ipv6(const struct syn_option *o)
{
	return bpf_ntohs(o->version_network) >> 12 == OPTION_IPV6;
}

static __always_inline bool option_is_probe(const struct syn_option *o)
{
	return bpf_ntohs(o->version_network) >> 12 == OPTION_PROBE;
}

/* Why a receiver must reject o; REASON_NONE if it may not. o has the right kind and ExID. */
static __always_inline __u32 reject_option(const struct syn_option *o)
{
	__u16 vn = bpf_ntohs(o->version_network);

	if (vn >> 12 != OPTION_IPV4 && vn >> 12 != OPTION_PROBE &&
	    (vn >> 12 != OPTION_IPV6 || !has_overlay6()))
		return REASON_DROP_OPTION_VERSION;
	if (o->length != sizeof(*o) || o->dst_port == 0)
		return REASON_DROP_OPTION_MALFORMED;
	if ((vn & 0xfff) != config_network_id)
		return REASON_DROP_OPTION_NETWORK;
	return REASON_NONE;
}

#endif

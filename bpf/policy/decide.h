/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What policy says of a connection or datagram: the verdict of internal/model.PolicyTables. Without
 * rules it is one lookup in an array; with them at most two for each end, one for the pair and one
 * for the port, whatever the number of rules. */
#ifndef HEDDLE_POLICY_DECIDE_H
#define HEDDLE_POLICY_DECIDE_H

#include "include/abi/path.h"
#include "include/abi/policy.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/headers.h"
#include "include/maps.h"
#include "include/mirror.h"

static __always_inline __u32 policy_flags(void)
{
	__u32 zero = 0, *flags = bpf_map_lookup_elem(&policy_state, &zero);

	return flags ? *(volatile __u32 *)flags : 0;
}

static __always_inline bool has_policy(void)
{
	return policy_flags() & POLICY_ACTIVE;
}

/* NULL: an address that no rule knows. */
static __always_inline struct class_info *class_of(const struct address *a, __u32 side)
{
	struct class_prefix_key key;
	struct class_info *found;

	key.of.side = side;
	key.of.addr = *a;
	found = bpf_map_lookup_elem(&class_by_addr, &key.of);
	if (found)
		return found;
	key.prefixlen = 160;
	key.of.side = is_mapped(a) ? side : side + 2;
	return bpf_map_lookup_elem(&class_by_prefix, &key);
}

static __always_inline __u32 port_verdict(__u32 ports, __u32 protocol, __u32 port, __u32 otherwise)
{
	struct port_range_key key;
	__u32 *found;

	if (!ports)
		return otherwise;
	key.prefixlen = 64;
	key.ports = ports;
	key.protocol = protocol;
	key.pad = 0;
	key.port = bpf_htons((__u16)port);
	found = bpf_map_lookup_elem(&verdict_by_port, &key);
	return found ? *found : otherwise;
}

/* The verdict on what from opens to a port (host byte order; 0 of protocols without) of to. A
 * container may always talk to itself. Not static, so that the verifier looks at it once, and not
 * once for all that each call can have led to. */
__noinline __u32 decide(const struct address *from, const struct address *to, __u32 protocol, __u32 port)
{
	__u32 flags = policy_flags(), side = !!(flags & POLICY_SIDE), egress = 0, ingress = 0;
	struct class_info *source, *target;
	struct pair_verdict *verdict;
	struct pair_key pair;

	if (!from || !to)
		return VERDICT_DROP;
	if (!(flags & POLICY_ACTIVE))
		return VERDICT_ALLOW;
	if (same_address(from, to))
		return VERDICT_ALLOW;
	pair.from = 0;
	pair.to = 0;
	pair.side = side;
	source = class_of(from, side);
	if (source) {
		pair.from = source->class_id;
		egress = source->egress;
	}
	target = class_of(to, side);
	if (target) {
		pair.to = target->class_id;
		ingress = target->ingress;
	}
	verdict = bpf_map_lookup_elem(&verdict_by_pair, &pair);
	if (verdict)
		return port_verdict(verdict->ports, protocol, port, verdict->verdict);
	return egress > ingress ? egress : ingress;
}

/* The verdict on the connection of a tagged socket. remote is the kernel's remote address, ports
 * its remote port in the upper and its local port in the lower half (host byte order); the tag
 * knows better where packets have others. A connection of a container with itself is none of
 * policy's business. */
static __noinline __u32 decide_tagged(const struct sock_tag *tag, const struct address *remote, __u32 ports)
{
	__u32 id = tag->endpoint_id, flags = tag->flags;
	__u16 port = flags & TAG_ACCEPTED ? (__u16)ports : ports >> 16;
	struct address own, peer = *remote;
	struct endpoint *ep;

	if (tag->path == PATH_NONE || tag->path == PATH_LOOPBACK || flags & TAG_DROPPED)
		return VERDICT_ALLOW;
	if (is_mapped(&peer) && (is_loopback4(peer.word[3]) || is_own_mirror(peer.word[3])))
		return VERDICT_ALLOW;
	ep = bpf_map_lookup_elem(&endpoint_by_id, &id);
	if (!ep)
		return VERDICT_ALLOW;
	if (flags & TAG_REMOTE)
		peer = tag->remote;
	set_overlay(&own, !is_mapped(&peer), ep->addr4.word[3]);
	if (flags & TAG_ACCEPTED) {
		if (tag->local_port)
			port = bpf_ntohs(tag->local_port);
		return decide(&peer, &own, IPPROTO_TCP_, port);
	}
	if (tag->remote_port)
		port = bpf_ntohs(tag->remote_port);
	return decide(&own, &peer, IPPROTO_TCP_, port);
}

/* What policy says of the connection that flow asks for. */
static __noinline __u32 decide_flow(const struct flow *flow)
{
	struct address from, to;

	set_overlay(&from, flow->ipv6, flow->src);
	set_overlay(&to, flow->ipv6, flow->dst);
	return decide(&from, &to, IPPROTO_TCP_, bpf_ntohs(flow->dst_port));
}

/* The packet is not let through. Rejected, it goes on to nftables, which answers its sender by a
 * RST or an ICMP error. In case somebody has flushed nftables it goes on as one that was sent to
 * many stations: the kernel forwards none of these, gives none to a TCP socket, and takes none of
 * IPv4 from an endpoint's device (drop_unicast_in_l2_multicast, which netcfg sets). Heddle's rule
 * makes it an ordinary one again before it answers. */
static __always_inline int stop(struct __sk_buff *skb, __u32 verdict)
{
	if (verdict == VERDICT_DROP) {
		count(REASON_DROP_POLICY_DROPPED);
		return TC_ACT_SHOT;
	}
	count(REASON_DROP_POLICY_REJECTED);
	bpf_skb_change_type(skb, PACKET_MULTICAST_);
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_reject_mark;
	return TC_ACT_OK;
}

#endif

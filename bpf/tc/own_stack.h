/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* TCP between node sockets of a container and the processes in its namespace that are not
 * intercepted, over loopback and over the own address (include/mirror.h has the addresses):
 *
 *   own stack a:s -> b:p                  on_loopback makes it mirror(a):s -> node(b):p, out by
 *                                         eth0; from_own_stack gives it to the node socket
 *   node socket node(b):p -> mirror(a):s  to_own_stack passes it; into_loopback makes it
 *                                         b:p -> a:s, in by lo
 *
 * Between the two it is IPv4, whatever the programs use. The two programs in the container's
 * namespace may be removed or changed by its root, and what they send may be forged there: what
 * must hold for others is checked at the node's end of the veth. */
#ifndef HEDDLE_TC_OWN_STACK_H
#define HEDDLE_TC_OWN_STACK_H

#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "tc/packet.h"
#include "tc/time_wait.h"

/* What find_node_socket found. */
enum node_socket {
	NODE_SOCKET_NONE,
	NODE_SOCKET_CONNECTED,
	NODE_SOCKET_LISTENS,
};

/* What sk, which it releases, is to endpoint owner; of listeners those count whose tags have flags,
 * and which take what comes by lo, if it does. With assign, the packet is given to it. */
static __always_inline int take_node_socket(struct __sk_buff *skb, struct bpf_sock *sk, __u32 owner,
                                            __u32 flags, bool by_lo, bool assign)
{
	int found = NODE_SOCKET_NONE;
	struct sock_tag *tag;

	if (!sk)
		return found;
	if (sk->state == BPF_TCP_LISTEN) {
		tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
		if (is_of(tag, owner) && (tag->flags & flags) == flags && takes_from(tag, by_lo))
			found = NODE_SOCKET_LISTENS;
	} else if (owned(sk, owner)) {
		found = NODE_SOCKET_CONNECTED;
	}
	/* Request and time-wait sockets are found again by the stack itself. */
	if (assign && found && sk->state != BPF_TCP_NEW_SYN_RECV && sk->state != BPF_TCP_TIME_WAIT)
		bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	return found;
}

/* How find_node_socket looks. */
#define FIND_FOR_SYN 1
#define FIND_ASSIGN  2 /* what it finds is given the packet */

/* The node socket for a packet k, by the kernel's own lookup. TIME_WAIT has no use for a SYN. Not
 * static, so that the verifier looks at it once. */
__noinline int find_node_socket(struct __sk_buff *skb, __u64 netns, const struct flow_key *k, __u32 owner,
                                __u32 how)
{
	struct bpf_sock *sk;

	if (!k)
		return NODE_SOCKET_NONE;
	sk = lookup_in(skb, netns, k->saddr, k->sport, k->daddr, k->dport);
	if (sk && how & FIND_FOR_SYN && sk->state == BPF_TCP_TIME_WAIT) {
		bpf_sk_release(sk);
		sk = lookup_in(skb, netns, k->saddr, 0, k->daddr, k->dport);
	}
	return take_node_socket(skb, sk, owner, 0, is_alias(k->daddr), how & FIND_ASSIGN);
}

/* The listeners that are not at k's own destination: those at wildcards, and IPv6 ones. dst is the
 * name of the destination. */
static __always_inline int find_wild_listener(struct __sk_buff *skb, __u64 netns, const struct flow_key *k,
                                              const struct endpoint *ep, bool ipv6, __be32 dst, bool assign)
{
	__be32 own = ep->addr4.word[3];
	bool by_lo = !ipv6 || !dst;
	struct address own6;
	int found;

	if (k->daddr == own)
		return NODE_SOCKET_NONE;
	/* Source port 0 never matches a connected socket. */
	found = take_node_socket(skb, lookup_in(skb, netns, k->saddr, 0, own, k->dport), ep->id,
	                         ipv6 ? TAG_ANY6 : TAG_WILD, by_lo, assign);
	if (found || !ipv6 || !has_overlay6())
		return found;
	set_overlay6(&own6, own);
	return take_node_socket(skb, lookup6_in(skb, netns, &own6, 0, &own6, k->dport), ep->id,
	                        dst ? 0 : TAG_WILD, by_lo, assign);
}

/* A SYN to a node socket that is in TIME_WAIT: its listener is mostly at another address than the
 * packet's, so the kernel does not find it (take_time_wait). Global, so that the verifier looks at
 * it once, and not with all that from_endpoint may know. */
__noinline int end_pod_time_wait(struct __sk_buff *skb)
{
	struct packet p;

	if (read_packet(skb, &p) != PACKET_TCP || p.ipv6 || !is_syn(&p))
		return 0;
	if (take_time_wait(skb, &p, BPF_F_INGRESS) <= 0)
		return 0;
	count(REASON_TIME_WAIT_ENDED);
	barrier();
	skb->mark = config_mark; /* a RST by now, for what waits */
	return 1;
}

/* A packet from the veth of self (NULL if unknown) that has a mirror address, or goes to a loopback
 * address. kind is read_packet's. Only node sockets of self are reached by either. */
static __always_inline int from_own_stack(struct __sk_buff *skb, const struct packet *p, int kind,
                                          const struct endpoint *self)
{
	struct flow_key k = packet_tuple(p);
	struct flow names = {};
	int found, syn;

	if (!self || kind != PACKET_TCP || p->ipv6 || !(self->flags & ENDPOINT_INTERCEPTED) ||
	    !pod_names(self, k.saddr, k.daddr, &names))
		return protects(PROTECT_LOOPBACK) ? drop(REASON_DROP_FORGED_LOOPBACK) : TC_ACT_OK;
	syn = is_syn(p) ? FIND_FOR_SYN : 0;
	if (syn && end_pod_time_wait(skb))
		return TC_ACT_OK;
	found = find_node_socket(skb, NODE_NETNS, &k, self->id,
	                         k.saddr & bpf_htonl(MIRROR_WILD) ? syn : syn | FIND_ASSIGN);
	if (k.saddr & bpf_htonl(MIRROR_WILD)) {
		if (found == NODE_SOCKET_CONNECTED) {
			found = find_node_socket(skb, NODE_NETNS, &k, self->id, syn | FIND_ASSIGN);
		} else { /* the listener is at the alias, or at a wildcard: another one may have the overlay address */
			k.saddr &= ~bpf_htonl(MIRROR_WILD);
			k.daddr = node_address(self, names.ipv6, names.dst);
			found = find_node_socket(skb, NODE_NETNS, &k, self->id, FIND_FOR_SYN | FIND_ASSIGN);
		}
	}
	if (!found)
		found = find_wild_listener(skb, NODE_NETNS, &k, self, names.ipv6, names.dst, true);
	/* It went away since on_loopback saw it: sent again, the packet stays in the container. */
	if (!found)
		return TC_ACT_SHOT;
	count(REASON_DELIVER_OVERLAY);
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_mark;
	return TC_ACT_OK;
}

/* A packet to or from a mirror address that the node sends to an endpoint's veth: from that
 * endpoint's node sockets only. Their mark tells them from other processes of the node, their
 * address from sockets of other endpoints. */
static __always_inline int to_own_stack(struct __sk_buff *skb, const struct packet *p, int kind)
{
	__u32 ifindex = skb->ifindex, mark = skb->mark;
	struct endpoint *self = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	struct flow names = {};

	if (!self || kind != PACKET_TCP || p->ipv6 || (mark != config_mark && mark != config_overlay_mark) ||
	    !pod_names(self, p->ip.daddr, p->ip.saddr, &names))
		return drop(REASON_DROP_FORGED_LOOPBACK);
	return TC_ACT_OK;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets of the overlay whose destination is a node socket: caught at ingress, before routing, and
 * marked so that routing delivers them locally. (A forwarded packet that early demux matched to a
 * socket is dropped by the kernel, so this cannot wait.) Everything else goes on as ordinary
 * overlay traffic. */
#ifndef HEDDLE_TC_DIVERT_H
#define HEDDLE_TC_DIVERT_H

#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/flow_table.h"
#include "include/maps.h"
#include "include/orphans.h"
#include "policy/filter.h"
#include "tc/packet.h"
#include "tc/time_wait.h"

/* Whether endpoint owner has a node socket that listens for this packet's destination. */
static __always_inline bool has_listener(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = find_listener(skb, p->ipv6, p->ip.saddr, p->ip.daddr, p->tcp.dest, owner);

	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Finds the listener of endpoint owner on ::1. */
static __always_inline struct bpf_sock *find_loopback6(struct __sk_buff *skb, __be16 port, __u32 owner)
{
	struct bpf_sock *sk = lookup(skb, 0, 0, alias6(owner), port);

	if (!sk)
		return NULL;
	if (sk->state == BPF_TCP_LISTEN && owned(sk, owner))
		return sk;
	bpf_sk_release(sk);
	return NULL;
}

/* Finds the socket for the packet as the kernel would; for IPv6 also a listener on [::] of endpoint
 * owner. */
static __always_inline struct bpf_sock *find_socket(struct __sk_buff *skb, const struct packet *p,
                                                    __u32 owner)
{
	struct bpf_sock *sk;

	sk = lookup_from(skb, p, p->tcp.source);
	if (!p->ipv6)
		return sk;
	if (sk) {
		if (sk->state != BPF_TCP_LISTEN || owned(sk, owner))
			return sk;
		bpf_sk_release(sk); /* the node's own, on its wildcard */
	}
	sk = lookup(skb, 0, 0, p->ip.daddr, p->tcp.dest);
	if (sk) {
		if (takes_ipv6(sk, owner))
			return sk;
		bpf_sk_release(sk);
	}
	/* connect_loopback6 sends this way what is for ::1. Nobody else may: not from a device. */
	if (p->ip.saddr != p->ip.daddr ||
	    (skb->ingress_ifindex && skb->ingress_ifindex != config_divert_ifindex))
		return NULL;
	return find_loopback6(skb, p->tcp.dest, owner);
}

/* A packet that matches a node socket in TIME_WAIT may be of a new connection between the
 * containers' own stacks, which know nothing of the node's ports. Its SYN tells (no node socket
 * listens for it), or its SYN-ACK (one in TIME_WAIT expects none); the rest of it is recognised by
 * what is remembered then. */
static __always_inline bool past_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct flow_key k = packet_tuple(p);
	struct flow flow = {};
	struct flow *found;

	if (p->tcp.flags & TCP_FLAG_SYN_) {
		if (!(p->tcp.flags & TCP_FLAG_ACK_) && has_listener(skb, p, owner))
			return false;
		flow.kind = FLOW_CONTAINERS;
		remember_tuple(&k, &flow, tuple_owner(k.saddr));
		return true;
	}
	found = bpf_map_lookup_elem(&flow_by_wire, &k);
	if (!found) { /* or of the other direction */
		k.saddr = p->ip.daddr;
		k.daddr = p->ip.saddr;
		k.sport = p->tcp.dest;
		k.dport = p->tcp.source;
		found = bpf_map_lookup_elem(&flow_by_wire, &k);
	}
	return found && found->kind == FLOW_CONTAINERS;
}

/* Whether endpoint owner has a listener for what find_socket finds a handshake for, on whatever
 * device its program bound it to. Source port 0 never matches a connected socket. */
static __always_inline bool still_listens(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = lookup_from(skb, p, 0);
	bool ours;

	if (sk) {
		ours = sk->state == BPF_TCP_LISTEN && owned(sk, owner);
		bpf_sk_release(sk);
		if (ours)
			return true;
	}
	if (!p->ipv6)
		return false;
	sk = lookup(skb, 0, 0, p->ip.daddr, p->tcp.dest);
	if (sk) {
		ours = takes_ipv6(sk, owner);
		bpf_sk_release(sk);
		if (ours)
			return true;
	}
	sk = p->ip.saddr == p->ip.daddr ? find_loopback6(skb, p->tcp.dest, owner) : NULL;
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Whether endpoint owner, which has begun to answer the packet's connection, has nobody any more
 * who would accept it: the kernel drops what comes for that, and says nothing. */
static __noinline bool is_orphan(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	return p && orphans_until && bpf_ktime_get_ns() < orphans_until && !still_listens(skb, p, owner);
}

/* Whether sk, found by the packet's own addresses and ports, is what endpoint owner's packet is
 * for. */
static __always_inline bool meant_for(struct __sk_buff *skb, const struct packet *p, struct bpf_sock *sk,
                                      __u32 owner)
{
	if (sk->state == BPF_TCP_TIME_WAIT)
		return !past_time_wait(skb, p, owner);
	/* From the container to itself: connect() has asked. */
	return owned(sk, owner) && (p->ip.saddr == p->ip.daddr || takes_from_beyond(sk));
}

/* What divert() did with a packet. */
enum divert_outcome {
	DIVERT_NONE, /* no node socket: it is the container's */
	/* the container's, although a node socket matches: in TIME_WAIT, or begun for a listener
	 * that closed */
	DIVERT_PAST,
	DIVERT_TAKEN,   /* given to a node socket */
	DIVERT_OPENING, /* the same; with it, a connection comes to be */
};

/* Hands the packet to the node socket of endpoint owner, if it is for one. */
static __always_inline int divert(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = find_socket(skb, p, owner);
	bool ours, waits, opening, begun;

	if (!sk)
		return DIVERT_NONE;
	begun = sk->state == BPF_TCP_NEW_SYN_RECV;
	opening = sk->state == BPF_TCP_LISTEN || sk->state == BPF_TCP_NEW_SYN_RECV;
	waits = sk->state == BPF_TCP_TIME_WAIT;
	ours = meant_for(skb, p, sk, owner);
	/* Request and time-wait sockets are found again by the stack itself. */
	if (ours && !waits && !begun)
		bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	if (!ours)
		return waits ? DIVERT_PAST : DIVERT_NONE;
	if (begun && is_orphan(skb, p, owner))
		return DIVERT_PAST;
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_mark;
	return opening ? DIVERT_OPENING : DIVERT_TAKEN;
}

/* Whether endpoint ep has a node socket for the packet; *established: one whose connection is
 * there. */
static __always_inline bool has_node_socket(struct __sk_buff *skb, const struct packet *p,
                                            const struct endpoint *ep, bool *established)
{
	struct bpf_sock *sk = find_socket(skb, p, ep->id);
	bool ours;

	if (!sk)
		return false;
	*established = sk->state != BPF_TCP_LISTEN && sk->state != BPF_TCP_NEW_SYN_RECV;
	ours = meant_for(skb, p, sk, ep->id);
	bpf_sk_release(sk);
	return ours;
}

/* Whether the node's firewall is to see a packet. */
enum forward_chain {
	FORWARD_NONE,   /* it is not */
	FORWARD_ROUTED, /* it is: routing sees to that */
	FORWARD_WAITS,  /* it is, once end_time_wait has ended the wait of its 4-tuple */
};

/* Whether a SYN for endpoint ep of this node is to be routed, so that the node's firewall sees it
 * (sock/firewall.h): to_endpoint gives it to the listener then. What is of a connection that has
 * passed is not: routing would find its socket, and drop it. Nor is what connect_loopback6 sends:
 * it stays in the container. *taken as towards() has it. */
static __noinline int meets_forward_chain(struct __sk_buff *skb, const struct packet *p,
                                          const struct endpoint *ep, bool *taken)
{
	bool established = false;
	struct bpf_sock *sk;
	int state;

	if (!config_firewall_ns || !p || !ep || !taken || !is_syn(p) || !(ep->flags & ENDPOINT_INTERCEPTED) ||
	    p->ip.saddr == p->ip.daddr)
		return FORWARD_NONE;
	if (skb->mark == SYN_RETURNED) {
		barrier(); /* the compiler must not write the mark through a moved context pointer */
		skb->mark = 0;
	} else {
		sk = lookup_exact(skb, p);
		state = sk ? sk->state : BPF_TCP_LISTEN;
		if (sk)
			bpf_sk_release(sk);
		if (state == BPF_TCP_TIME_WAIT && has_listener(skb, p, ep->id))
			return FORWARD_WAITS;
		if (state != BPF_TCP_LISTEN)
			return FORWARD_NONE;
	}
	*taken = has_node_socket(skb, p, ep, &established);
	return FORWARD_ROUTED;
}

/* What becomes of a packet for endpoint ep that arrived at the node, of container sender (as start
 * has it); taken: a node socket has it. */
static __always_inline int towards(struct __sk_buff *skb, const struct packet *p, const struct endpoint *ep,
                                   __be32 sender, bool *taken)
{
	__u32 ifindex = ep->ifindex;
	int found, action;

	if (!(ep->flags & ENDPOINT_INTERCEPTED))
		return TC_ACT_OK;
	found = divert(skb, p, ep->id);
	/* A SYN was asked about before. */
	if (found != DIVERT_TAKEN && !is_syn(p)) {
		action = filter_tcp(skb, p, sender, 0, 0);
		if (action != FILTER_PASS)
			return action;
	}
	switch (found) {
	case DIVERT_TAKEN:
	case DIVERT_OPENING:
		*taken = true;
		count(REASON_DELIVER_OVERLAY);
		return TC_ACT_OK;
	case DIVERT_PAST:
		/* Routing would match it to that socket, too, and drop it. */
		return into_container(skb, ifindex);
	}
	return TC_ACT_OK;
}

#endif

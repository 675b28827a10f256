/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections of node sockets whose own address is of no use where they go: bound to [::], which
 * underneath is the IPv4 address, and connecting to an IPv6 one; or bound to no address of the
 * container at all (bind() with AF_UNSPEC). Such a socket connects to a crossing address
 * (include/mirror.h), which stands for the destination, and its packets are sent as the container's
 * own stack would send them:
 *
 *   x:p -> crossing:q             out by the endpoint's veth; cross_out makes it
 *                                 x:p or x6:p -> destination:q, in by that veth
 *   destination:q -> x:p or x6:p  to_endpoint; cross_back makes it
 *                                 crossing:q -> x:p, by the divert device
 *
 * What is said of the destination there is said of a process that is not intercepted. The tag knows
 * the destination; crossed_by_wire, for which a flood of others may be too much, is asked for what
 * is in TIME_WAIT, which has no tag. */
#ifndef HEDDLE_TC_CROSSING_H
#define HEDDLE_TC_CROSSING_H

#include "include/address.h"
#include "include/config.h"
#include "include/endpoint.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/once.h"
#include "tc/packet.h"
#include "tc/translate.h"

/* Finds the destination that stands behind packet p's. */
static __always_inline bool crossing_target(struct __sk_buff *skb, const struct packet *p,
                                            const struct endpoint *self, struct address *to)
{
	struct flow_key k = packet_tuple(p);
	struct bpf_sock *sk = skb->sk;
	struct address *remembered;
	struct sock_tag *tag;

	sk = sk ? bpf_sk_fullsock(sk) : NULL;
	tag = sk ? bpf_sk_storage_get(&tag_by_sock, sk, 0, 0) : NULL;
	if (tag && is_of(tag, self->id) && tag->flags & TAG_REMOTE) {
		*to = tag->remote;
	} else {
		remembered = bpf_map_lookup_elem(&crossed_by_wire, &k);
		if (!remembered)
			return false;
		*to = *remembered;
	}
	return crossing_of(self->id, to) == p->ip.daddr;
}

/* A packet to a crossing address that the node sends to an endpoint's veth: of that endpoint's node
 * sockets only, as in to_own_stack. It comes back by that veth, without the mark that makes overlay
 * addresses local. */
static __noinline int cross_out(struct __sk_buff *skb, const struct packet *p, int kind)
{
	__u32 ifindex = skb->ifindex;
	struct endpoint *self = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	struct address src, to = {};
	struct flow_key k = {};
	__u8 mac[6];

	if (!p || !self || kind != PACKET_TCP || p->ipv6 || skb->mark != config_mark ||
	    p->ip.saddr != self->addr4.word[3] || !crossing_target(skb, p, self, &to))
		return drop(REASON_DROP_FORGED_LOOPBACK);
	k.sport = p->tcp.source;
	k.dport = p->tcp.dest;
	host_mac(mac, self->id);
	set_overlay(&src, !is_mapped(&to), p->ip.saddr);
	if (rewrite_between(skb, p, !is_mapped(&to), &k, &src, &to))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0))
		return TC_ACT_SHOT;
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = 0;
	skb->tc_index = INDEX_CROSSING;
	return bpf_redirect(ifindex, BPF_F_INGRESS);
}

/* Whether packet p for endpoint ep is of a connection that crosses: k says how its socket knows
 * it. */
static __noinline bool is_crossed(struct __sk_buff *skb, const struct packet *p, const struct endpoint *ep,
                                  struct flow_key *k)
{
	struct address from, *remembered;
	struct flow_key out = {};
	struct sock_tag *tag;
	struct bpf_sock *sk;
	bool ours = false;

	if (!p || !ep || !k || !may_cross(ep->id))
		return false;
	if (p->ipv6)
		from = p->src6;
	else
		set_mapped(&from, p->ip.saddr);
	k->saddr = crossing_of(ep->id, &from);
	k->daddr = p->ip.daddr;
	k->sport = p->tcp.source;
	k->dport = p->tcp.dest;
	sk = lookup(skb, k->saddr, k->sport, k->daddr, k->dport);
	if (!sk)
		return false;
	if (sk->state == BPF_TCP_TIME_WAIT) {
		out.saddr = k->daddr;
		out.daddr = k->saddr;
		out.sport = k->dport;
		out.dport = k->sport;
		remembered = bpf_map_lookup_elem(&crossed_by_wire, &out);
		ours = remembered && same_address(remembered, &from);
		/* What waits expects no SYN: the container's own stack has a connection there now. */
		if (ours && p->tcp.flags & TCP_FLAG_SYN_) {
			bpf_map_delete_elem(&crossed_by_wire, &out);
			ours = false;
		}
	} else if (sk->state != BPF_TCP_LISTEN && sk->state != BPF_TCP_NEW_SYN_RECV) {
		tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
		ours = is_of(tag, ep->id) && tag->flags & TAG_REMOTE && same_address(&tag->remote, &from);
	}
	bpf_sk_release(sk);
	return ours;
}

/* Gives such a packet to its socket, by the divert device. */
static __noinline int cross_back(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	if (!p || !k || (rewrite_to_ipv4(skb, p, k)))
		return TC_ACT_SHOT;
	return redeliver(skb);
}

#endif

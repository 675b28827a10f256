/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Connections that the node's firewall gave another destination. */
#ifndef HEDDLE_TC_NAT_H
#define HEDDLE_TC_NAT_H

#include "include/endpoint.h"
#include "include/flow_table.h"
#include "include/maps.h"
#include "tc/packet.h"

/* The overlay address of the container whose node socket sends packet p, if the node's firewall
 * gave it another destination than connect() saw; else 0. */
static __noinline __be32 translated_sender(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = skb->sk;
	struct sock_tag *tag;
	struct endpoint *ep;

	if (!p || !sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return 0;
	if (sk->dst_port == p->tcp.dest &&
	    (p->ipv6 ? sk->dst_ip6[0] == p->dst6.word[0] && sk->dst_ip6[1] == p->dst6.word[1] &&
	                       sk->dst_ip6[2] == p->dst6.word[2] && sk->dst_ip6[3] == p->dst6.word[3]
	             : sk->dst_ip4 == p->ip.daddr))
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	ep = tag ? tagged_endpoint(tag) : NULL;
	return ep ? ep->addr4.word[3] : 0;
}

/* The overlay address of the container whose own stack sends packet p, if the node's rules gave it
 * another source (as kube-proxy does at node ports); else 0. */
static __noinline __be32 masqueraded_sender(struct __sk_buff *skb, const struct packet *p)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct endpoint *ep = ifindex ? bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex) : NULL;

	if (!p || !ep || p->ip.saddr == ep->addr4.word[3])
		return 0;
	return ep->addr4.word[3];
}

/* Tells the listener's side whose SYN this is, if the node's firewall gave it this destination and
 * it is a container's of this node: of a process of its own stack (what did not need translation
 * does not come this way), or of a node socket. translated: who it is, where the packet does not
 * say. */
static __noinline bool remember_translated(struct __sk_buff *skb, const struct packet *p, __be32 translated)
{
	struct flow flow = {};
	struct flow *old;
	struct flow_key k;

	if (!p)
		return true;
	k = packet_tuple(p);
	if (!translated && !(skb->ingress_ifindex && endpoint_at(p->ip.saddr))) {
		/* A container's that had its addresses and ports is forgotten; names that connect()
		 * noted are not. */
		old = skb->ingress_ifindex ? NULL : bpf_map_lookup_elem(&flow_by_wire, &k);
		if (old && old->kind == FLOW_PLAIN)
			bpf_map_delete_elem(&flow_by_wire, &k);
		return true;
	}
	flow.src = translated ? translated : k.saddr;
	flow.dst = k.daddr;
	flow.dst_port = k.dport;
	flow.ipv6 = k.ipv6;
	return remember_tuple(&k, &flow, tuple_owner(flow.src));
}

#endif

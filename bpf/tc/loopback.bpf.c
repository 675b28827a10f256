/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* In the container's namespace: its lo, and its side of the veth. tc/own_stack.h says what goes
 * where. */

#include "include/address.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "tc/own_stack.h"
#include "tc/packet.h"
#include "tc/translate.h"

/* Whether the container's own stack has a socket that the packet is for. A listener is for a SYN,
 * and for anything else only if no node socket wants it: the answer to one may go to a port where
 * something listens. */
static __always_inline bool own_stack_wants(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = lookup_exact(skb, p);
	bool wants;

	if (!sk)
		return false;
	wants = sk->state != BPF_TCP_LISTEN || is_syn(p);
	bpf_sk_release(sk);
	return wants;
}

/* Finds the addresses under which the node has a socket for a packet of the container's own
 * stack. */
static __always_inline bool find_node_tuple(struct __sk_buff *skb, const struct packet *p,
                                            const struct endpoint *ep, struct flow_key *k)
{
	__u64 netns = (__u32)ep->node_nsid;
	__be32 own = ep->addr4.word[3];
	struct flow_key wild = {};
	bool ipv6 = p->ipv6;
	int found;

	k->saddr = mirror_of(ep, ipv6, p->ip.saddr);
	if (!k->saddr || !mirror_of(ep, ipv6, p->ip.daddr) || ep->node_nsid < 0)
		return false;
	k->daddr = node_address(ep, ipv6, p->ip.daddr);
	k->sport = p->tcp.source;
	k->dport = p->tcp.dest;
	found = find_node_socket(skb, netns, k, ep->id, is_syn(p) ? FIND_FOR_SYN : 0);
	if (found == NODE_SOCKET_CONNECTED)
		return true;
	/* Who is bound to a wildcard is at the overlay address, and so are connections with
	 * 127.0.0.1 and ::1. */
	wild.saddr = k->saddr | bpf_htonl(MIRROR_WILD);
	wild.daddr = own;
	wild.sport = k->sport;
	wild.dport = k->dport;
	if (find_node_socket(skb, netns, &wild, ep->id, 0) == NODE_SOCKET_CONNECTED) {
		*k = wild;
		return true;
	}
	if (!found && !find_wild_listener(skb, netns, k, ep, ipv6, p->ip.daddr, false))
		return false;
	if (p->ip.saddr != own && p->ip.daddr == (ipv6 ? 0 : LOOPBACK4))
		*k = wild;
	return true;
}

/* Reads a packet on the container's lo, in which ::1 is given by 0. */
static __always_inline bool read_loopback(struct __sk_buff *skb, struct packet *p)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return read_packet(skb, p) == PACKET_TCP;
	if (skb->protocol != bpf_htons(ETH_P_IPV6) || read_ipv6(skb, p, ETH_HLEN) != PACKET_TCP)
		return false;
	return (is_loopback6(&p->src6) || p->ip.saddr) && (is_loopback6(&p->dst6) || p->ip.daddr);
}

/* Egress of the container's lo. The filter's class is the endpoint's id. */
SEC("tc")
int on_loopback(struct __sk_buff *skb)
{
	__u32 id = skb->tc_classid, ifindex;
	struct flow_key k = {};
	struct endpoint *ep;
	struct packet p;
	__u8 mac[6];

	if (!read_loopback(skb, &p) || own_stack_wants(skb, &p))
		return TC_ACT_OK;
	ep = bpf_map_lookup_elem(&endpoint_by_id, &id);
	if (!ep || !(ep->flags & ENDPOINT_INTERCEPTED) || !find_node_tuple(skb, &p, ep, &k))
		return TC_ACT_OK;
	ifindex = ep->container_ifindex;
	host_mac(mac, id);
	if (rewrite_to_ipv4(skb, &p, &k))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(ifindex, 0);
}

/* Ingress of the container's eth0: what to_own_stack let pass goes on by lo, as if it had been sent
 * there. */
SEC("tc")
int into_loopback(struct __sk_buff *skb)
{
	__u32 id = skb->tc_classid;
	struct address src, dst;
	struct flow names = {};
	struct flow_key k = {};
	struct endpoint *ep;
	struct packet p;
	__u8 macs[12];
	int err;

	if (skb->protocol != bpf_htons(ETH_P_IP) || read_packet(skb, &p) != PACKET_TCP ||
	    !is_mirror(p.ip.daddr))
		return TC_ACT_OK;
	ep = bpf_map_lookup_elem(&endpoint_by_id, &id);
	if (!ep || !pod_names(ep, p.ip.daddr, p.ip.saddr, &names))
		return TC_ACT_SHOT;
	k.sport = p.tcp.source;
	k.dport = p.tcp.dest;
	set_name(&src, names.ipv6, names.dst);
	set_name(&dst, names.ipv6, names.src);
	err = rewrite_between(skb, &p, names.ipv6, &k, &src, &dst);
	__builtin_memset(macs, 0, sizeof(macs));
	if (err || bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(LOOPBACK_IFINDEX, BPF_F_INGRESS);
}

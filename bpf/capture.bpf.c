/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets of the overlay whose destination is a node socket: caught at ingress, before routing, and
 * marked so that routing delivers them locally. (A forwarded packet that early demux matched to a
 * socket is dropped by the kernel, so this cannot wait.) Everything else goes on as ordinary overlay
 * traffic. */

/* Hands the packet to the node socket of endpoint owner it is for. */
static __always_inline bool deliver_to_socket(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = lookup(skb, p->ip.saddr, p->tcp.source, p->ip.daddr, p->tcp.dest);
	bool ours;

	if (!sk)
		return false;
	ours = owned(sk, owner);
	/* Request and time-wait sockets are found again by the stack itself. */
	if (ours && sk->state != BPF_TCP_TIME_WAIT && sk->state != BPF_TCP_NEW_SYN_RECV)
		bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	if (!ours)
		return false;
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_mark;
	return true;
}

/* Ingress of the VXLAN device. */
SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	struct endpoint *ep;
	struct packet p;

	if (read_packet(skb, &p) != 6)
		return TC_ACT_OK;
	ep = endpoint_at(p.ip.daddr);
	if (ep && ep->flags & ENDPOINT_INTERCEPTED && deliver_to_socket(skb, &p, ep->id))
		count(REASON_DELIVER_OVERLAY);
	return TC_ACT_OK;
}

/* Tells the listener's side (sockops) that this SYN's sender is no node socket. */
static __always_inline void remember_plain(const struct packet *p)
{
	struct flow_key k = wire_key(p);
	struct flow plain = {.src = k.saddr, .dst = k.daddr, .dst_port = k.dport};

	if ((p->tcp.flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_)
		bpf_map_update_elem(&flow_by_wire, &k, &plain, BPF_ANY);
}

/* Whether this is VXLAN for a node: masqueraded, it would look like that of the container's own node, and
 * what is inside may claim any source. */
static __always_inline bool forges_overlay(struct __sk_buff *skb, const struct packet *p)
{
	__u32 offset = ETH_HLEN + (p->ip.version_ihl & 0xf) * 4 + 2;
	struct address dst;
	__be16 port;

	if (p->ip.protocol != IPPROTO_UDP_ || p->ip.frag_off & bpf_htons(0x1fff))
		return false;
	if (bpf_skb_load_bytes(skb, offset, &port, sizeof(port)) || port != bpf_htons(config_vxlan_port))
		return false;
	set_mapped(&dst, p->ip.daddr);
	return bpf_map_lookup_elem(&node_by_underlay, &dst);
}

/* Node side of an endpoint's veth, ingress: what leaves the container's own namespace. */
SEC("tc")
int from_endpoint(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct endpoint *self, *peer;
	struct address dst;
	struct route *node;
	struct packet p;
	int kind, verdict;

	kind = read_packet(skb, &p);
	if (!kind)
		return TC_ACT_OK;
	self = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	if (!self)
		return TC_ACT_OK;
	/* Identity on the overlay is the source address. */
	if (p.ip.saddr != self->addr4.word[3] && p.ip.saddr != 0)
		return drop(REASON_DROP_SPOOFED_SOURCE);
	if (kind != 6)
		return forges_overlay(skb, &p) ? drop(REASON_DROP_FORGED_OVERLAY) : TC_ACT_OK;
	verdict = relay_return(skb, &p);
	if (verdict >= 0)
		return verdict;
	peer = endpoint_at(p.ip.daddr);
	if (peer) {
		if (peer->flags & ENDPOINT_INTERCEPTED && deliver_to_socket(skb, &p, peer->id)) {
			remember_plain(&p);
			count(REASON_DELIVER_OVERLAY);
		}
		return TC_ACT_OK;
	}
	/* Masqueraded, a SYN forged in the container would look like the node's. */
	set_mapped(&dst, p.ip.daddr);
	node = bpf_map_lookup_elem(&node_by_underlay, &dst);
	if (node && bpf_ntohs(p.tcp.dest) >= node->port_first && bpf_ntohs(p.tcp.dest) <= node->port_last)
		return drop(REASON_DROP_FORGED_DIRECT);
	return TC_ACT_OK;
}

/* Node side of an endpoint's veth, egress: what the node's own processes send to the container, or
 * what is routed to it. */
SEC("tc")
int to_endpoint(struct __sk_buff *skb)
{
	static const __u8 deliver_mac[6] = {0x02, 0x48, 0x44, 0x00, 0x00, 0x01};
	struct endpoint *ep;
	struct bpf_sock *sk;
	struct packet p;
	bool ours;

	if (read_packet(skb, &p) != 6)
		return TC_ACT_OK;
	ep = endpoint_at(p.ip.daddr);
	if (!ep || !(ep->flags & ENDPOINT_INTERCEPTED))
		return TC_ACT_OK;
	sk = lookup(skb, p.ip.saddr, p.tcp.source, p.ip.daddr, p.tcp.dest);
	if (!sk)
		return TC_ACT_OK;
	ours = owned(sk, ep->id);
	bpf_sk_release(sk);
	if (!ours)
		return TC_ACT_OK;
	if (bpf_skb_store_bytes(skb, 0, deliver_mac, sizeof(deliver_mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_deliver_ifindex, BPF_F_INGRESS);
}

/* Ingress of the delivery device: packets that to_endpoint sent here. */
SEC("tc")
int deliver(struct __sk_buff *skb)
{
	struct endpoint *ep;
	struct packet p;

	if (read_packet(skb, &p) != 6)
		return TC_ACT_OK;
	ep = endpoint_at(p.ip.daddr);
	if (ep && deliver_to_socket(skb, &p, ep->id))
		count(REASON_DELIVER_NODE);
	return TC_ACT_OK;
}

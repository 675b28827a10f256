/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A direct SYN for an endpoint none of whose intercepted sockets listens there: a process of the
 * container that is not intercepted may. The connection is then relayed into the container's own
 * namespace by rewriting addresses: a:sport -> b:P becomes x:sport -> y:port and back. So a sender
 * need not know which of a container's listeners are intercepted, and a closed port is refused by the
 * container's own stack. Decision 0004. */

#define TCP_CHECK_OFFSET 16
#define IP_CHECK_OFFSET  (ETH_HLEN + 10)
#define IP_SADDR_OFFSET  (ETH_HLEN + 12)
#define IP_DADDR_OFFSET  (ETH_HLEN + 16)

/* Rewrites addresses and ports of p in place from (ip, tcp) to k. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	__u32 check = p->tcp_offset + TCP_CHECK_OFFSET;

	if (bpf_l4_csum_replace(skb, check, p->ip.saddr, k->saddr, BPF_F_PSEUDO_HDR | 4) ||
	    bpf_l4_csum_replace(skb, check, p->ip.daddr, k->daddr, BPF_F_PSEUDO_HDR | 4) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.source, k->sport, 2) ||
	    bpf_l4_csum_replace(skb, check, p->tcp.dest, k->dport, 2) ||
	    bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, p->ip.saddr, k->saddr, 4) ||
	    bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, p->ip.daddr, k->daddr, 4) ||
	    bpf_skb_store_bytes(skb, IP_SADDR_OFFSET, &k->saddr, 8, 0) || /* both addresses */
	    bpf_skb_store_bytes(skb, p->tcp_offset, &k->sport, 4, 0))     /* both ports */
		return -1;
	return 0;
}

static __always_inline int relay_forward(struct __sk_buff *skb, const struct packet *p,
                                         const struct flow *flow)
{
	struct flow_key inner = {
	        .saddr = flow->src,
	        .daddr = flow->dst,
	        .sport = p->tcp.source,
	        .dport = flow->dst_port,
	};
	__u32 ifindex = flow->ifindex;

	if (rewrite(skb, p, &inner))
		return TC_ACT_SHOT;
	return bpf_redirect_peer(ifindex, 0);
}

static __always_inline int relay_open(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k,
                                      struct flow *flow, __u32 ifindex)
{
	struct flow_key back = {
	        .saddr = flow->dst,
	        .daddr = flow->src,
	        .sport = flow->dst_port,
	        .dport = k->sport,
	};
	struct flow_key *other = bpf_map_lookup_elem(&wire_by_relay, &back);

	if (!ifindex)
		return TC_ACT_OK;
	/* Two direct ports of one node pair may carry the same source port; behind the relay they
	 * would be one: the second is refused. */
	if (other && (other->saddr != k->saddr || other->sport != k->sport || other->dport != k->dport)) {
		count(REASON_DROP_RELAY_CONFLICT);
		return TC_ACT_OK; /* RST */
	}
	flow->relay = 1;
	flow->ifindex = ifindex;
	if (bpf_map_update_elem(&wire_by_relay, &back, k, BPF_ANY) ||
	    bpf_map_update_elem(&flow_by_wire, k, flow, BPF_ANY))
		return TC_ACT_SHOT;
	if (!other)
		count(REASON_RELAY_OPENED);
	return relay_forward(skb, p, flow);
}

/* A packet from a container's own namespace: back onto the wire if it belongs to a relayed connection.
 * Gives -1 if it does not. */
static __always_inline int relay_return(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key k = wire_key(p);
	struct flow_key *wire = bpf_map_lookup_elem(&wire_by_relay, &k);
	struct flow_key out;

	if (!wire)
		return -1;
	out.saddr = wire->daddr;
	out.daddr = wire->saddr;
	out.sport = wire->dport;
	out.dport = wire->sport;
	if (rewrite(skb, p, &out))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(config_underlay_ifindex, NULL, 0, 0);
}

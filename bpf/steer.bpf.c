/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the underlay device: hands the SYN of a direct connection to the listener its option
 * names. All later packets find their socket by the kernel's own 4-tuple lookup. */

/* Finds the Heddle option. The kernel has no loop over options for tc programs, so it is walked here;
 * 40 bytes of options are 40 NOPs at most. Gives 1 if found, 0 if absent, -1 if malformed. */
static __always_inline int find_option(struct __sk_buff *skb, const struct packet *p, struct syn_option *o)
{
	__u32 offset = p->tcp_offset + sizeof(p->tcp);
	__u32 end = p->tcp_offset + (p->tcp.doff_res >> 4) * 4;
	__u8 head[4];
	int i;

	for (i = 0; i < 40; i++) {
		if (offset >= end)
			return 0;
		if (bpf_skb_load_bytes(skb, offset, head, 1))
			return 0;
		if (head[0] == 0) /* end of options */
			return 0;
		if (head[0] == 1) { /* no operation */
			offset++;
			continue;
		}
		if (offset + 2 > end || bpf_skb_load_bytes(skb, offset, head, 2))
			return 0;
		if (head[1] < 2 || offset + head[1] > end)
			return head[0] == OPTION_KIND ? -1 : 0;
		if (head[0] == OPTION_KIND && head[1] >= 4) {
			if (bpf_skb_load_bytes(skb, offset, head, 4))
				return 0;
			if (head[2] == (OPTION_EXID >> 8) && head[3] == (OPTION_EXID & 0xff)) {
				if (head[1] != sizeof(*o))
					return -1;
				return bpf_skb_load_bytes(skb, offset, o, sizeof(*o)) ? -1 : 1;
			}
		}
		offset += head[1];
	}
	return 0;
}

static __always_inline int drop(__u32 reason)
{
	count(reason);
	return TC_ACT_SHOT;
}

/* Why the sender may not speak for o->src; REASON_NONE if it may. */
static __always_inline __u32 reject_sender(__be32 underlay, const struct syn_option *o)
{
	struct address key;
	struct route *from;

	set_mapped(&key, underlay);
	if (!bpf_map_lookup_elem(&node_by_underlay, &key))
		return REASON_DROP_UNKNOWN_NODE;
	from = route_to(o->src);
	if (!from || from->underlay.word[3] != underlay)
		return REASON_DROP_SOURCE_NOT_OF_NODE;
	return REASON_NONE;
}

/* Whether the kernel already has a socket for exactly this wire 4-tuple, and may go on alone. A
 * socket in TIME_WAIT does not count: it has no listener to hand a new SYN to. */
static __always_inline bool has_socket(struct __sk_buff *skb, const struct flow_key *k, __u32 *state)
{
	struct bpf_sock *sk = lookup(skb, k->saddr, k->sport, k->daddr, k->dport);
	bool live = false;

	if (!sk)
		return false;
	*state = sk->state;
	live = sk->state != BPF_TCP_LISTEN && sk->state != BPF_TCP_TIME_WAIT;
	bpf_sk_release(sk);
	return live;
}

/* Assigns the packet to the listener dst:dst_port of endpoint owner. */
static __always_inline bool assign_listener(struct __sk_buff *skb, const struct flow *flow, __u32 owner)
{
	struct bpf_sock *sk = find_listener(skb, flow->ipv6, flow->src, flow->dst, flow->dst_port, owner);
	bool assigned;

	if (!sk)
		return false;
	assigned = bpf_sk_assign(skb, sk, 0) == 0;
	bpf_sk_release(sk);
	return assigned;
}

static __always_inline int steer_syn(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	struct syn_option o = {};
	struct endpoint *ep;
	struct flow flow = {};
	__u32 reason, state;
	int found;

	found = find_option(skb, p, &o);
	if (found == 0)
		return TC_ACT_OK; /* not for Heddle: the kernel answers with a RST */
	if (found < 0)
		return drop(REASON_DROP_OPTION_MALFORMED);
	reason = reject_option(&o);
	if (!reason)
		reason = reject_sender(k->saddr, &o);
	if (reason)
		return drop(reason);
	if (has_socket(skb, k, &state))
		return TC_ACT_OK; /* retransmitted */
	ep = endpoint_at(o.dst);
	if (!ep) {
		count(REASON_DROP_NO_ENDPOINT);
		return TC_ACT_OK; /* RST: the sender sees a refusal at once */
	}
	flow.src = o.src;
	flow.dst = o.dst;
	flow.dst_port = o.dst_port;
	flow.ipv6 = option_is_ipv6(&o);
	if (assign_listener(skb, &flow, ep->id)) {
		bpf_map_update_elem(&flow_by_wire, k, &flow, BPF_ANY);
		return TC_ACT_OK;
	}
	return relay_open(skb, p, k, &flow, ep->ifindex);
}

SEC("tc")
int from_underlay(struct __sk_buff *skb)
{
	struct packet p;
	struct flow_key k;
	struct endpoint *ep;
	struct flow *flow;
	__u32 state = 0;

	if (read_packet(skb, &p) != PACKET_TCP || p.ipv6 || !in_direct_ports(p.tcp.dest) ||
	    p.ip.daddr != config_underlay)
		return TC_ACT_OK;
	k = wire_key(&p);
	if ((p.tcp.flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_)
		return steer_syn(skb, &p, &k);
	/* Established connections have no entry: this lookup is all they pay. */
	flow = bpf_map_lookup_elem(&flow_by_wire, &k);
	if (!flow)
		return TC_ACT_OK;
	if (flow->kind == FLOW_RELAY) {
		note_end(flow, &p, ENDED_BY_SENDER);
		return relay_forward(skb, &p, flow);
	}
	if (has_socket(skb, &k, &state))
		return TC_ACT_OK;
	/* The ACK of a SYN cookie: only the listener can make a connection of it. */
	ep = endpoint_at(flow->dst);
	if (ep)
		assign_listener(skb, flow, ep->id);
	return TC_ACT_OK;
}

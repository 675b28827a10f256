/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the underlay device: hands the SYN of a direct connection to the listener its option
 * names. All later packets find their socket by the kernel's own 4-tuple lookup. */

/* Finds the Heddle option. Gives 1 if found, 0 if absent, -1 if malformed. */
static __always_inline int find_option(struct __sk_buff *skb, const struct packet *p, struct syn_option *o)
{
	struct option_walk w = {.skb = skb, .kind = OPTION_KIND};

	w.offset = p->tcp_offset + sizeof(p->tcp);
	w.end = p->tcp_offset + (p->tcp.doff_res >> 4) * 4;
	bpf_loop(TCP_OPTIONS_MAX, step_option, &w, 0);
	if (w.found <= 0)
		return w.found;
	return w.length != sizeof(*o) || bpf_skb_load_bytes(skb, w.offset, o, sizeof(*o)) ? -1 : 1;
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

/* Fills in what the connection that SYN option o asks for is to be remembered by. */
static __always_inline void set_flow(struct flow *flow, const struct syn_option *o)
{
	flow->src = o->src;
	flow->dst = o->dst;
	flow->dst_port = o->dst_port;
	flow->ipv6 = option_is_ipv6(o);
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

/* What SYN_RETURNED marks came back from end_time_wait and is not sent round again. */
#define SYN_RETURNED 0x48640010

/* The SYN's own timestamp; gives 0 if it has none. */
static __noinline int read_timestamp(struct __sk_buff *skb, __u32 offset, __u32 end, __u32 *timestamp)
{
	struct option_walk w = {.skb = skb, .kind = TCP_OPTION_TIMESTAMP, .offset = offset, .end = end};
	__be32 value;

	bpf_loop(TCP_OPTIONS_MAX, step_option, &w, 0);
	if (!timestamp || w.found <= 0 || w.length != TCP_OPTION_TIMESTAMP_LENGTH ||
	    bpf_skb_load_bytes(skb, w.offset + 2, &value, sizeof(value)))
		return 0;
	*timestamp = bpf_ntohl(value);
	return 1;
}

/* Turns the SYN into the RST of the connection whose end waits at expected (RFC 1337, section 2). Its options
 * become payload, so that no timestamp of them is judged. */
static __always_inline int make_reset(struct __sk_buff *skb, const struct packet *p, __be32 expected)
{
	__u32 check = p->tcp_offset + TCP_CHECK_OFFSET;
	__be32 seq = p->tcp.seq;
	__be16 was, is;
	__u8 flags[2];

	flags[0] = p->tcp.doff_res;
	flags[1] = p->tcp.flags;
	__builtin_memcpy(&was, flags, 2);
	flags[0] = sizeof(struct tcphdr_) / 4 << 4;
	flags[1] = TCP_FLAG_RST_;
	__builtin_memcpy(&is, flags, 2);
	if (bpf_l4_csum_replace(skb, check, seq, expected, 4) ||
	    bpf_l4_csum_replace(skb, check, was, is, 2) ||
	    bpf_skb_store_bytes(skb, p->tcp_offset + 4, &expected, sizeof(expected), 0) ||
	    bpf_skb_store_bytes(skb, p->tcp_offset + 12, &is, sizeof(is), 0))
		return -1;
	return 0;
}

/* A SYN for a 4-tuple that the node has in TIME_WAIT, because its server closed first. The kernel takes the new
 * connection for the old one's place if it finds a listener at the packet's own destination, as RFC 6191 has it.
 * Here the listener is elsewhere, and since 6.x a SYN that is assigned to it is dropped while the 4-tuple is taken,
 * again and again for a minute. So the kernel's rule is applied here: if the SYN is newer than what waits, it is sent
 * round once more, by the device's queue (BPF_F_INGRESS, or 0: as if it were sent), and before it the wait is ended by a RST
 * made of this one. Gives 1 if that is done, 0 if the SYN is not newer, and -1 if it cannot be done. */
static __always_inline int take_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 how)
{
	__u32 expected = 0, recent = 0, stamp = 0, timestamp = 0, options, seq;
	struct tcp_timewait_sock *wait;
	struct bpf_sock *sk;

	if (skb->mark == SYN_RETURNED)
		return 0;
	sk = lookup_exact(skb, p);
	if (!sk)
		return 0;
	wait = bpf_skc_to_tcp_timewait_sock(sk);
	if (!wait) {
		bpf_sk_release(sk);
		return 0;
	}
	expected = wait->tw_sk.__tw_common.skc_tw_rcv_nxt;
	recent = wait->tw_ts_recent;
	stamp = wait->tw_ts_recent_stamp;
	bpf_sk_release(sk);

	seq = bpf_ntohl(p->tcp.seq);
	options = p->tcp_offset + sizeof(p->tcp);
	if ((__s32)(seq - expected) <= 0 &&
	    !(stamp && read_timestamp(skb, options, p->tcp_offset + (p->tcp.doff_res >> 4) * 4, &timestamp) &&
	      (__s32)(timestamp - recent) > 0))
		return 0;
	barrier();
	skb->mark = SYN_RETURNED;
	if (bpf_clone_redirect(skb, skb->ifindex, how))
		return -1;
	skb->mark = 0;
	return make_reset(skb, p, bpf_htonl(expected)) ? -1 : 1;
}

static __noinline int end_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 how)
{
	return p ? take_time_wait(skb, p, how) : -1;
}

/* Gives the verdict, or SYN_IS_PROBE: for steer_probe, which the caller calls because the stack is full here. */
#define SYN_IS_PROBE 0x100

static __noinline int steer_syn(struct __sk_buff *skb, const struct packet *p, const struct flow_key *k)
{
	struct syn_option o = {};
	struct endpoint *ep;
	struct flow flow = {};
	__u32 reason, verdict, state = 0;
	int found;

	found = find_option(skb, p, &o);
	if (found == 0)
		return TC_ACT_OK; /* not for Heddle: the kernel answers with a RST */
	if (found < 0)
		return drop(REASON_DROP_OPTION_MALFORMED);
	reason = reject_option(&o);
	if (!reason && protects(PROTECT_SYN_SENDER))
		reason = reject_sender(k->saddr, &o);
	if (reason)
		return drop(reason);
	if (option_is_probe(&o))
		return SYN_IS_PROBE;
	set_flow(&flow, &o);
	verdict = has_policy() ? decide_flow(&flow) : VERDICT_ALLOW;
	if (verdict)
		return stop(skb, verdict);
	if (has_socket(skb, k, &state)) { /* retransmitted */
		/* It will be needed yet. If it was forgotten meanwhile, this SYN says it again. */
		if (state == BPF_TCP_NEW_SYN_RECV && !bpf_map_lookup_elem(&flow_by_wire, k))
			remember_wire(k, &flow, wire_owner(flow.src));
		return TC_ACT_OK;
	}
	if (state == BPF_TCP_TIME_WAIT) {
		if (end_time_wait(skb, p, BPF_F_INGRESS) > 0)
			count(REASON_TIME_WAIT_ENDED);
		return TC_ACT_OK; /* a RST by now; or an old duplicate, which the kernel answers with an ACK */
	}
	if (skb->mark == SYN_RETURNED) {
		barrier();
		skb->mark = 0;
	}
	ep = endpoint_at(o.dst);
	if (!ep) {
		count(REASON_DROP_NO_ENDPOINT);
		return TC_ACT_OK; /* RST: the sender sees a refusal at once */
	}
	if (assign_listener(skb, &flow, ep->id)) {
		/* A busy map refuses now and then. Who connects is not known without it: better the sender tries again. */
		if (!remember_wire(k, &flow, wire_owner(flow.src)))
			return drop(REASON_DROP_NOT_REMEMBERED);
		return TC_ACT_OK;
	}
	return relay_open(skb, p, k, &flow, ep->ifindex);
}

static __noinline int from_outside(struct __sk_buff *skb, const struct packet *p);
static __noinline __u32 refuse_outsider(const struct packet *p);

static __always_inline int from_underlay_verdict(struct __sk_buff *skb)
{
	struct packet p;
	struct flow_key k;
	struct endpoint *ep;
	struct flow *flow;
	__u32 state = 0;
	__u32 reason;
	int kind;

	kind = read_packet(skb, &p);
	if (kind != PACKET_TCP) {
		reason = refuse_overlay(skb);
		/* What is for the node's own address is most of it, and no container's. */
		if (!reason && kind == PACKET_IP && p.ip.daddr != config_underlay)
			reason = refuse_outsider(&p);
		return reason ? drop(reason) : TC_ACT_OK;
	}
	if (p.ip.daddr != config_underlay)
		return is_syn(&p) || has_policy() ? from_outside(skb, &p) : TC_ACT_OK;
	if (!in_direct_ports(p.tcp.dest))
		return TC_ACT_OK;
	k = wire_key(&p);
	if (is_syn(&p)) {
		kind = steer_syn(skb, &p, &k);
		return kind == SYN_IS_PROBE ? steer_probe(skb, &p, &k) : kind;
	}
	/* Established connections have no entry: this lookup is all they pay. */
	flow = bpf_map_lookup_elem(&flow_by_wire, &k);
	if (!flow)
		return TC_ACT_OK;
	/* Policy may have changed since the SYN. A RST of the sender, whose connection was cut, ends the other end. */
	if (has_policy() && !(p.tcp.flags & TCP_FLAG_RST_) && decide_flow(flow))
		return stop(skb, VERDICT_REJECT);
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

SEC("tc")
int from_underlay(struct __sk_buff *skb)
{
	return or_next_filter(from_underlay_verdict(skb));
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Writes the option into the SYN of a direct connect, and gives accepted sockets their names. */

static __always_inline struct sock_tag *tag_of(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk = ops->sk;

	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
}

static __always_inline void write_option(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	struct syn_option o;

	if (!tag || tag->path != PATH_DIRECT)
		return;
	o = make_option(tag->local.word[3], tag->remote.word[3], tag->remote_port);
	bpf_store_hdr_opt(ops, &o, sizeof(o), 0);
}

/* What the SYN of this accepted direct connection said: from the saved SYN, or, after a SYN cookie,
 * from what steering remembered. */
static __always_inline bool accepted_flow(struct bpf_sock_ops *ops, struct flow *flow)
{
	struct flow_key key = {
	        .saddr = ops->remote_ip4,
	        .daddr = ops->local_ip4,
	        .sport = (__be16)(ops->remote_port >> 16), /* the upper half of a big-endian word */
	        .dport = bpf_htons((__u16)ops->local_port),
	};
	struct syn_option o = {};
	struct flow *remembered;

	if (key.daddr != config_underlay || !in_direct_ports(key.dport))
		return false;
	o.kind = OPTION_KIND; /* what to look for: kind, and the first two bytes behind the length */
	o.length = 4;
	o.exid = bpf_htons(OPTION_EXID);
	remembered = bpf_map_lookup_elem(&flow_by_wire, &key);
	if (bpf_load_hdr_opt(ops, &o, sizeof(o), BPF_LOAD_HDR_OPT_TCP_SYN) == sizeof(o)) {
		flow->src = o.src;
		flow->dst = o.dst;
		flow->dst_port = o.dst_port;
	} else if (remembered) {
		*flow = *remembered;
	} else {
		return false;
	}
	if (remembered)
		bpf_map_delete_elem(&flow_by_wire, &key);
	return true;
}

static __always_inline void accept_direct(struct sock_tag *tag, const struct flow *flow)
{
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_mapped(&tag->local, flow->dst);
	tag->local_port = flow->dst_port;
	set_mapped(&tag->remote, flow->src);
	tag->path = PATH_DIRECT;
	count(REASON_ACCEPT_DIRECT);
}

/* What was remembered of this accepted connection's SYN: by from_endpoint, if the peer is a process in its
 * container's own namespace (FLOW_PLAIN); by connect, if both ends are one container's (FLOW_NAMES). */
static __always_inline bool remembered_flow(struct bpf_sock_ops *ops, struct flow *flow)
{
	struct flow_key key = {
	        .saddr = ops->remote_ip4,
	        .daddr = ops->local_ip4,
	        .sport = (__be16)(ops->remote_port >> 16),
	        .dport = bpf_htons((__u16)ops->local_port),
	};
	struct flow *found = bpf_map_lookup_elem(&flow_by_wire, &key);

	if (!found)
		return false;
	*flow = *found;
	bpf_map_delete_elem(&flow_by_wire, &key);
	return flow->kind != FLOW_CONTAINERS;
}

/* The container talks to itself: src and dst are the addresses its programs see. 0 is ::1. */
static __always_inline void accept_names(struct sock_tag *tag, __be32 src, __be32 dst)
{
	tag->flags |= TAG_LOCAL | TAG_REMOTE;
	set_loopback(&tag->local, !dst, dst);
	set_loopback(&tag->remote, !src, src);
	tag->path = !dst || is_loopback4(dst) ? PATH_LOOPBACK : PATH_LOCAL;
}

/* A listener's packets are routed, because it cannot know whether a peer on its own node is a node
 * socket or not, and the capture program on the peer's veth tells them apart. Once it is known that
 * both ends are node sockets, lo is shorter. */
static __always_inline void accept_same_node(struct bpf_sock_ops *ops, struct sock_tag *tag)
{
	__u32 mark = config_mark;
	struct flow flow = {};

	tag->path = PATH_LOCAL;
	if (remembered_flow(ops, &flow)) {
		if (flow.kind == FLOW_PLAIN) {
			tag->path = PATH_OVERLAY;
			return;
		}
		accept_names(tag, flow.src, flow.dst);
	}
	if (!bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		tag->flags &= ~TAG_ROUTED;
}

/* Not direct: the kernel's addresses are those the program expects, but for loopback. */
static __always_inline void accept_as_is(struct bpf_sock_ops *ops, struct sock_tag *tag, __be32 remote)
{
	__be32 local = ops->local_ip4;
	struct flow flow = {};
	struct route *from;

	count(REASON_ACCEPT_LOCAL);
	if (is_alias(remote) || is_alias(local)) {
		/* The own address stands for a wildcard. */
		flow.src = is_alias(remote) ? loopback_of(remote) : loopback_of(local);
		flow.dst = is_alias(local) ? loopback_of(local) : (is_alias6(remote) ? 0 : LOOPBACK4);
		remembered_flow(ops, &flow);
		accept_names(tag, flow.src, flow.dst);
		return;
	}
	from = route_to(remote);
	if (!from)
		tag->path = PATH_OUTSIDE;
	else if (from->flags & ROUTE_NODE_ADDR)
		tag->path = PATH_NODE;
	else if (from->flags & ROUTE_SELF)
		accept_same_node(ops, tag);
	else
		tag->path = PATH_OVERLAY;
}

static __always_inline void established_passive(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	struct flow flow = {};

	if (!tag)
		return;
	/* The tag is a copy of the listener's. */
	tag->flags &= ~(TAG_WILD | TAG_LOCAL | TAG_REMOTE | TAG_NAMES);
	tag->flags |= TAG_ESTABLISHED;
	tag->local_port = 0;
	tag->remote_port = 0;
	tag->claim = tag->claim_wish = CLAIM_NONE;
	tag->reason = REASON_NONE;
	if (accepted_flow(ops, &flow))
		accept_direct(tag, &flow);
	else
		accept_as_is(ops, tag, ops->remote_ip4);
}

/* A connection within the container whose addresses on lo stand for several: tells the accepting side which
 * ones the programs see. 0 is ::1. */
static __always_inline void remember_names(struct bpf_sock_ops *ops, const struct sock_tag *tag)
{
	struct flow_key k = {};
	struct flow flow = {};

	k.saddr = ops->local_ip4;
	k.daddr = ops->remote_ip4;
	k.sport = bpf_htons((__u16)ops->local_port);
	k.dport = (__be16)(ops->remote_port >> 16);
	flow.src = k.saddr;
	if (tag->flags & TAG_LOCAL)
		flow.src = is_mapped(&tag->local) ? tag->local.word[3] : 0;
	flow.dst = k.daddr;
	if (tag->flags & TAG_REMOTE)
		flow.dst = is_mapped(&tag->remote) ? tag->remote.word[3] : 0;
	flow.dst_port = k.dport;
	flow.kind = FLOW_NAMES;
	bpf_map_update_elem(&flow_by_wire, &k, &flow, BPF_ANY);
}

static __always_inline void connecting_cb(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);

	if (!tag)
		return;
	if (tag->path == PATH_DIRECT)
		bpf_sock_ops_cb_flags_set(ops,
		                          ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	else if (tag->flags & TAG_NAMES)
		remember_names(ops, tag);
}

static __always_inline void listening(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag = tag_of(ops);
	__u32 mark = config_overlay_mark;
	int one = 1;

	if (!tag)
		return;
	tag->path = PATH_LISTEN;
	set_claim_flag(tag, CLAIM_LISTENS, true);
	/* listen() without bind(): the kernel chose a port of the wildcard, which here is the node's. Tied
	 * to the delivery device, nothing outside can reach it. */
	if (!ops->local_ip4) {
		__u32 ifindex = config_deliver_ifindex;

		bpf_setsockopt(ops, SOL_SOCKET_, 62 /* SO_BINDTOIFINDEX */, &ifindex, sizeof(ifindex));
		count(REASON_REFUSE_LISTEN_UNBOUND);
	}
	bpf_setsockopt(ops, SOL_TCP_, 27 /* TCP_SAVE_SYN */, &one, sizeof(one));
	/* Only the container itself reaches its loopback, and over lo. */
	if (is_alias(ops->local_ip4))
		return;
	if (!bpf_setsockopt(ops, SOL_SOCKET_, 36 /* SO_MARK */, &mark, sizeof(mark)))
		tag->flags |= TAG_ROUTED;
}

SEC("sockops")
int tcp_events(struct bpf_sock_ops *ops)
{
	struct sock_tag *tag;

	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		connecting_cb(ops);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		listening(ops);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		if (ops->skb_tcp_flags & TCP_FLAG_SYN_)
			bpf_reserve_hdr_opt(ops, sizeof(struct syn_option), 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		if (ops->skb_tcp_flags & TCP_FLAG_SYN_)
			write_option(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		tag = tag_of(ops);
		if (tag)
			tag->flags |= TAG_ESTABLISHED;
		/* Only the SYN and its retransmissions carry the option. */
		bpf_sock_ops_cb_flags_set(ops,
		                          ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		established_passive(ops);
		break;
	}
	return 1;
}

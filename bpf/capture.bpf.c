/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets of the overlay whose destination is a node socket: caught at ingress, before routing, and
 * marked so that routing delivers them locally. (A forwarded packet that early demux matched to a
 * socket is dropped by the kernel, so this cannot wait.) Everything else goes on as ordinary overlay
 * traffic. */

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

/* Finds the socket for the packet as the kernel would; for IPv6 also a listener on [::] of endpoint owner. */
static __always_inline struct bpf_sock *find_socket(struct __sk_buff *skb, const struct packet *p,
                                                    __u32 owner)
{
	struct bpf_sock *sk;

	if (!p->ipv6)
		return lookup(skb, p->ip.saddr, p->tcp.source, p->ip.daddr, p->tcp.dest);
	sk = lookup6(skb, &p->src6, p->tcp.source, &p->dst6, p->tcp.dest);
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
	    (skb->ingress_ifindex && skb->ingress_ifindex != config_deliver_ifindex))
		return NULL;
	return find_loopback6(skb, p->tcp.dest, owner);
}

/* A packet that matches a node socket in TIME_WAIT may be of a new connection between the containers' own
 * stacks, which know nothing of the node's ports. Its SYN tells (no node socket listens for it), or its
 * SYN-ACK (one in TIME_WAIT expects none); the rest of it is recognised by what is remembered then. */
static __always_inline bool past_time_wait(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct flow_key k = wire_key(p);
	struct flow flow = {};
	struct flow *found;

	if (p->tcp.flags & TCP_FLAG_SYN_) {
		if (!(p->tcp.flags & TCP_FLAG_ACK_) && has_listener(skb, p, owner))
			return false;
		flow.kind = FLOW_CONTAINERS;
		remember_wire(&k, &flow, wire_owner(k.saddr));
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

/* Whether endpoint owner has a listener for what find_socket finds a handshake for, on whatever device its program bound it to.
 * Source port 0 never matches a connected socket. */
static __always_inline bool still_listens(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = p->ipv6 ? lookup6(skb, &p->src6, 0, &p->dst6, p->tcp.dest)
	                              : lookup(skb, p->ip.saddr, 0, p->ip.daddr, p->tcp.dest);
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

/* Whether endpoint owner, which has begun to answer the packet's connection, has nobody any more who would accept it: the kernel
 * drops what comes for that, and says nothing. */
static __noinline bool is_orphan(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	return p && orphans_until && bpf_ktime_get_ns() < orphans_until && !still_listens(skb, p, owner);
}

/* Whether sk, found by the packet's own addresses and ports, is what endpoint owner's packet is for. */
static __always_inline bool meant_for(struct __sk_buff *skb, const struct packet *p, struct bpf_sock *sk,
                                      __u32 owner)
{
	if (sk->state == BPF_TCP_TIME_WAIT)
		return !past_time_wait(skb, p, owner);
	/* From the container to itself: connect() has asked. */
	return owned(sk, owner) && (p->ip.saddr == p->ip.daddr || takes_from_beyond(sk));
}

/* What capture() did with a packet. */
enum capture {
	CAPTURE_NONE, /* no node socket: it is the container's */
	CAPTURE_PAST, /* the container's, although a node socket matches: in TIME_WAIT, or begun for a listener that closed */
	CAPTURE_TAKEN,   /* given to a node socket */
	CAPTURE_OPENING, /* the same; with it, a connection comes to be */
};

/* Hands the packet to the node socket of endpoint owner, if it is for one. */
static __always_inline int capture(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = find_socket(skb, p, owner);
	bool ours, waits, opening, begun;

	if (!sk)
		return CAPTURE_NONE;
	begun = sk->state == BPF_TCP_NEW_SYN_RECV;
	opening = sk->state == BPF_TCP_LISTEN || sk->state == BPF_TCP_NEW_SYN_RECV;
	waits = sk->state == BPF_TCP_TIME_WAIT;
	ours = meant_for(skb, p, sk, owner);
	/* Request and time-wait sockets are found again by the stack itself. */
	if (ours && !waits && !begun)
		bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	if (!ours)
		return waits ? CAPTURE_PAST : CAPTURE_NONE;
	if (begun && is_orphan(skb, p, owner))
		return CAPTURE_PAST;
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_mark;
	return opening ? CAPTURE_OPENING : CAPTURE_TAKEN;
}

/* What becomes of a packet for endpoint ep that arrived at the node, of container sender (as start has it); taken: a
 * node socket has it. */
static __always_inline int towards(struct __sk_buff *skb, const struct packet *p, const struct endpoint *ep,
                                   __be32 sender, bool *taken)
{
	__u32 ifindex = ep->ifindex;
	int found, action;

	if (!(ep->flags & ENDPOINT_INTERCEPTED))
		return TC_ACT_OK;
	found = capture(skb, p, ep->id);
	/* A SYN was asked about before. */
	if (found != CAPTURE_TAKEN && !is_syn(p)) {
		action = filter_tcp(skb, p, sender, 0, 0);
		if (action != FILTER_PASS)
			return action;
	}
	switch (found) {
	case CAPTURE_TAKEN:
	case CAPTURE_OPENING:
		*taken = true;
		count(REASON_DELIVER_OVERLAY);
		return TC_ACT_OK;
	case CAPTURE_PAST:
		/* Routing would match it to that socket, too, and drop it. */
		return into_container(ifindex);
	}
	return TC_ACT_OK;
}

/* Ingress of the VXLAN device. */
static __always_inline int from_overlay_verdict(struct __sk_buff *skb)
{
	struct endpoint *ep;
	bool taken = false;
	struct packet p;
	int kind, action;

	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	/* What comes from there is taken for the container's own. */
	if (kind == PACKET_TCP && is_mirror(p.ip.saddr))
		return drop(REASON_DROP_FORGED_LOOPBACK);
	ep = endpoint_at(p.ip.daddr);
	/* For the node itself: its container has been asked about on its own node, and this node's tables do not know what
	 * nodes and other nodes' containers may do. */
	if (!ep)
		return TC_ACT_OK;
	action = filter_for(skb, &p, kind, 0, ep);
	if (action != FILTER_PASS)
		return action;
	return kind == PACKET_TCP ? towards(skb, &p, ep, 0, &taken) : TC_ACT_OK;
}

SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	return or_next_filter(from_overlay_verdict(skb));
}

/* Why a packet that the underlay device brings may not come that way: endpoints are beyond the overlay's. */
static __noinline __u32 refuse_outsider(const struct packet *p)
{
	struct route *from;

	if (!p || !p->ip.saddr || !protects(PROTECT_OVERLAY))
		return REASON_NONE;
	from = route_to(p->ip.saddr);
	return from && !(from->flags & (ROUTE_NODE_ADDR | ROUTE_CARRIED)) ? REASON_DROP_SPOOFED_SOURCE
	                                                                  : REASON_NONE;
}

/* What the underlay device brings for an overlay address, if it is for one: of a host outside. With policy not only SYNs: the
 * last ACK of a handshake may come when the rules are others, with data that nobody is to read. */
static __noinline int from_outside(struct __sk_buff *skb, const struct packet *p)
{
	struct endpoint *ep;
	bool taken = false;
	__u32 reason;
	int action;

	if (!p)
		return TC_ACT_SHOT;
	ep = endpoint_at(p->ip.daddr);
	if (!ep || is_mirror(p->ip.saddr))
		return TC_ACT_OK;
	reason = refuse_outsider(p);
	if (reason)
		return drop(reason);
	action = filter_tcp(skb, p, 0, 0, 0);
	return action == FILTER_PASS ? towards(skb, p, ep, 0, &taken) : action;
}

/* Tells the listener's side (sockops) that this SYN's sender is no node socket. */
static __always_inline bool remember_plain(const struct packet *p)
{
	struct flow_key k = wire_key(p);
	struct flow plain = {.src = k.saddr, .dst = k.daddr, .dst_port = k.dport, .ipv6 = k.ipv6};

	if ((p->tcp.flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) != TCP_FLAG_SYN_)
		return true;
	return remember_wire(&k, &plain, wire_owner(k.saddr));
}

/* Whether packet p is a SYN that says, as only nodes may, which endpoints it joins: masqueraded, it would look like the node's,
 * also at a node that this one does not know yet. */
static __noinline bool forges_option(struct __sk_buff *skb, const struct packet *p)
{
	struct syn_option o;

	if (!p || !is_syn(p) || !protects(PROTECT_DIRECT_PORTS))
		return false;
	return find_option(skb, p, &o) != 0;
}

/* Whether packet p may leave endpoint self: from its own address, from none yet, or from the link-local one that its
 * device's hardware address gives, which goes no further than the node. */
static __always_inline bool may_send_from(const struct endpoint *self, const struct packet *p)
{
	if (!p->ipv6)
		return p->ip.saddr == self->addr4.word[3] || p->ip.saddr == 0;
	if (is_overlay6(&p->src6))
		return p->ip.saddr == self->addr4.word[3];
	if (self->flags & ENDPOINT_CARRIED && is_link_local6(&p->src6))
		return true; /* its hardware address is not Heddle's */
	return is_unspecified6(&p->src6) || is_own_link_local6(&p->src6, self->id);
}

/* Answers a SYN of a node socket by a RST: the delivery device is where nftables does. */
static __always_inline int refuse_syn(struct __sk_buff *skb)
{
	count(REASON_REFUSE_LISTENER_GONE);
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_reject_mark;
	return redeliver(skb);
}

/* Whether endpoint ep has a node socket for the packet; *established: one whose connection is there. */
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

/* Whether endpoint peer of this node has a node socket for the packet: CAPTURE_NONE, CAPTURE_OPENING or CAPTURE_TAKEN. Nothing
 * is assigned: see from_carried. */
static __noinline int node_socket(struct __sk_buff *skb, const struct packet *p, const struct endpoint *peer)
{
	bool established = false;

	if (!p || !peer || !(peer->flags & ENDPOINT_INTERCEPTED) ||
	    !has_node_socket(skb, p, peer, &established))
		return CAPTURE_NONE;
	return established ? CAPTURE_TAKEN : CAPTURE_OPENING;
}

/* What becomes of a packet from endpoint self, whose device is another network's, for endpoint peer of this node: *taken as
 * towards() has it. A bridge may have the device and take the packet past the node's stack, so that it is sent to the
 * delivery device instead of being marked. */
static __always_inline int from_carried(struct __sk_buff *skb, const struct packet *p,
                                        const struct endpoint *self, const struct endpoint *peer, bool *taken)
{
	int found = node_socket(skb, p, peer);
	int action;

	/* A SYN was asked about before. */
	if (found != CAPTURE_TAKEN && !is_syn(p) && peer->flags & ENDPOINT_INTERCEPTED) {
		action = filter_tcp(skb, p, self->addr4.word[3], 0, 0);
		if (action != FILTER_PASS)
			return action;
	}
	*taken = found != CAPTURE_NONE;
	return *taken ? redeliver(skb) : TC_ACT_OK;
}

/* Node side of an endpoint's veth, ingress: what leaves the container's own namespace. */
static __always_inline int from_endpoint_verdict(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct endpoint *self, *peer;
	struct address dst;
	struct route *node;
	bool taken = false;
	struct packet p;
	int kind, verdict;
	__u32 reason;

	self = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	reason = refuse_frame(skb, self ? self->addr4.word[3] : 0);
	if (reason)
		return drop(reason);
	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	/* The device routes loopback addresses (route_localnet): none but the container's own may pass. */
	if (is_mirror(p.ip.saddr) || is_mirror(p.ip.daddr) || is_loopback4(p.ip.daddr))
		return from_own_stack(skb, &p, kind, self);
	if (!self)
		return drop(REASON_DROP_SPOOFED_SOURCE);
	/* Identity on the overlay is the source address. */
	if (protects(PROTECT_SOURCE) && !may_send_from(self, &p))
		return drop(REASON_DROP_SPOOFED_SOURCE);
	if (kind != PACKET_TCP && forges_overlay(skb))
		return drop(REASON_DROP_FORGED_OVERLAY);
	if (kind == PACKET_TCP && forges_option(skb, &p))
		return drop(REASON_DROP_FORGED_DIRECT);
	if (kind != PACKET_TCP && forges_error(skb, &p, self))
		return drop(REASON_DROP_FORGED_ERROR);
	peer = endpoint_at(p.ip.daddr);
	verdict = filter_for(skb, &p, kind, self->addr4.word[3], peer);
	if (verdict != FILTER_PASS)
		return verdict;
	if (kind != PACKET_TCP)
		return TC_ACT_OK;
	verdict = relay_return(skb, &p);
	if (verdict >= 0)
		return verdict;
	if (peer) {
		if (self->flags & ENDPOINT_CARRIED)
			verdict = from_carried(skb, &p, self, peer, &taken);
		else
			verdict = towards(skb, &p, peer, self->addr4.word[3], &taken);
		if (taken && !remember_plain(&p))
			return drop(REASON_DROP_NOT_REMEMBERED);
		return verdict;
	}
	if (p.ipv6)
		return TC_ACT_OK;
	/* Masqueraded, a SYN forged in the container would look like the node's. */
	set_mapped(&dst, p.ip.daddr);
	node = bpf_map_lookup_elem(&node_by_underlay, &dst);
	if (protects(PROTECT_DIRECT_PORTS) && node && bpf_ntohs(p.tcp.dest) >= node->port_first &&
	    bpf_ntohs(p.tcp.dest) <= node->port_last)
		return drop(REASON_DROP_FORGED_DIRECT);
	return TC_ACT_OK;
}

SEC("tc")
int from_endpoint(struct __sk_buff *skb)
{
	return or_next_filter(from_endpoint_verdict(skb));
}

/* The overlay address of the container whose node socket sends packet p, if the node's firewall gave it another
 * destination than connect() saw; else 0. */
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

/* Tells the listener's side whose SYN this is, if the node's firewall gave it this destination and it is a container's of
 * this node: of a process of its own stack (what did not need translation does not come this way), or of a node
 * socket. */
static __noinline bool remember_translated(struct __sk_buff *skb, const struct packet *p, __be32 translated)
{
	struct flow flow = {};
	struct flow *old;
	struct flow_key k;

	if (!p)
		return true;
	k = wire_key(p);
	if (!translated && !(skb->ingress_ifindex && endpoint_at(p->ip.saddr))) {
		/* A container's that had its addresses and ports is forgotten; names that connect() noted are not. */
		old = skb->ingress_ifindex ? NULL : bpf_map_lookup_elem(&flow_by_wire, &k);
		if (old && old->kind == FLOW_PLAIN)
			bpf_map_delete_elem(&flow_by_wire, &k);
		return true;
	}
	flow.src = translated ? translated : k.saddr;
	flow.dst = k.daddr;
	flow.dst_port = k.dport;
	flow.ipv6 = k.ipv6;
	return remember_wire(&k, &flow, wire_owner(flow.src));
}

/* What policy says of a packet that is about to enter the container at the other end of the device. */
static __noinline int filter_entering(struct __sk_buff *skb, const struct packet *p, int kind,
                                      __be32 translated)
{
	__u32 ifindex = skb->ifindex;
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	__be32 receiver = ep ? ep->addr4.word[3] : 0;

	if (kind != PACKET_TCP)
		return filter_other(skb, p, 0, receiver);
	return filter_tcp(skb, p, 0, receiver, translated);
}

/* Node side of an endpoint's veth, egress: what the node's own processes send to the container, or
 * what is routed to it. */
static __always_inline int to_endpoint_verdict(struct __sk_buff *skb)
{
	bool ours = false, established = false;
	__be32 translated = 0;
	struct flow_key k = {};
	struct endpoint *ep;
	struct packet p;
	int kind, action;

	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER)
		return TC_ACT_OK;
	if (is_crossing(p.ip.daddr))
		return cross_out(skb, &p, kind);
	if (is_mirror(p.ip.daddr) || is_mirror(p.ip.saddr))
		return to_own_stack(skb, &p, kind);
	ep = endpoint_at(p.ip.daddr);
	if (kind == PACKET_TCP && ep && ep->flags & ENDPOINT_INTERCEPTED) {
		ours = has_node_socket(skb, &p, ep, &established);
		if (ours && !established && !is_syn(&p) && is_orphan(skb, &p, ep->id))
			ours = false;
		if (!(ours && established) && is_crossed(skb, &p, ep, &k))
			return cross_back(skb, &p, &k);
	}
	if (kind == PACKET_TCP && is_syn(&p))
		translated = translated_sender(skb, &p);
	if (!(ours && established && !is_syn(&p)) && !is_refusal(skb, &p, kind)) {
		action = filter_entering(skb, &p, kind, translated);
		/* Past nftables here: what is to be answered goes by it once more. */
		if (action != FILTER_PASS)
			return action == TC_ACT_SHOT ? action : redeliver(skb);
	}
	/* What a container sends to itself its own stack would take for a stranger with its address. */
	if (!ours && is_syn(&p) && ep && p.ip.saddr == p.ip.daddr && ep->flags & ENDPOINT_INTERCEPTED)
		return refuse_syn(skb);
	if (!ours)
		return TC_ACT_OK;
	if (is_syn(&p) && !remember_translated(skb, &p, translated))
		return drop(REASON_DROP_NOT_REMEMBERED);
	return redeliver(skb);
}

SEC("tc")
int to_endpoint(struct __sk_buff *skb)
{
	return or_next_filter(to_endpoint_verdict(skb));
}

/* Egress of the VXLAN device: what a container of this node begins is asked about, and remembered, once more, because the
 * node's firewall may have given it another destination on the way. Of a node socket the other node then sees this node's
 * address; here it is known whose it is. */
static __always_inline int to_overlay_verdict(struct __sk_buff *skb)
{
	__be32 translated = 0;
	struct packet p;
	int kind, action;

	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER || (kind == PACKET_TCP ? !is_syn(&p) : !has_policy()))
		return TC_ACT_OK;
	if (kind == PACKET_TCP)
		translated = translated_sender(skb, &p);
	/* This node's tables do not know what nodes and other nodes' containers may do. */
	if (!translated && !endpoint_at(p.ip.saddr))
		return TC_ACT_OK;
	action = kind == PACKET_TCP ? filter_tcp(skb, &p, 0, 0, translated) : filter_other(skb, &p, 0, 0);
	/* As in to_endpoint. */
	if (action == FILTER_PASS)
		return TC_ACT_OK;
	return action == TC_ACT_SHOT ? action : redeliver(skb);
}

SEC("tc")
int to_overlay(struct __sk_buff *skb)
{
	return or_next_filter(to_overlay_verdict(skb));
}

/* Ingress of the delivery device: packets that to_endpoint sent here. */
static __always_inline int deliver_verdict(struct __sk_buff *skb)
{
	struct endpoint *ep;
	struct packet p;

	if (skb->mark == config_reject_mark || read_packet(skb, &p) != PACKET_TCP)
		return TC_ACT_OK;
	ep = endpoint_at(p.ip.daddr);
	if (ep && capture(skb, &p, ep->id) >= CAPTURE_TAKEN)
		count(REASON_DELIVER_NODE);
	return TC_ACT_OK;
}

SEC("tc")
int deliver(struct __sk_buff *skb)
{
	return or_next_filter(deliver_verdict(skb));
}

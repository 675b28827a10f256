/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Caps, marks and priorities that the operator sets for endpoints. These two programs are on the
 * node's devices only while some endpoint has a limit, behind Heddle's other filters, each with the
 * action "redirect to the shaping device" (an ifb): a program that gives -1 has its packet queued
 * there in the HTB class that skb->priority names. From there the kernel puts the packet back where
 * it was, past the actions of the hook, with its socket, mark and route. Decision 0016. */

#include "include/address.h"
#include "include/config.h"
#include "include/endpoint.h"
#include "include/limits.h"
#include "include/maps.h"
#include "include/mirror.h"
#include "include/protection.h"
#include "include/route.h"
#include "tc/packet.h"
#include "tc/wire.h"

#define LIMIT_HANDLE     0x48640000 /* of the HTB qdisc */
#define LIMIT_SLOT_TRIES 8
#define LIMIT_SLOT_IDLE  1000000000ULL /* ns after which another connection may have the class */

/* The class of one connection, of the block that begins with first: the one it has, or one that
 * nobody uses. If there is none, it shares. Not static, so that the verifier looks at it once. */
__noinline __u32 connection_class(__u32 first, __u32 addresses, __u32 ports)
{
	struct limit_slots *slots = bpf_map_lookup_elem(&slots_by_class, &first);
	__u64 owner = (__u64)addresses << 32 | ports, now = bpf_ktime_get_ns();
	/* the bits that depend on all */
	__u32 hash = (addresses * 0x9e3779b1 ^ ports * 0x85ebca6b) >> 24;
	__u32 i, at, idle = 0;

	if (!slots)
		return first;
	for (i = 0; i < LIMIT_SLOT_TRIES; i++) {
		at = (hash + i * 37) & (LIMIT_SLOTS - 1);
		if (!at || at == LIMIT_SLOTS - 1)
			continue;
		if (slots->owner[at] == owner) {
			slots->seen_ns[at] = now;
			return first + at;
		}
		if (!idle && now - slots->seen_ns[at] > LIMIT_SLOT_IDLE)
			idle = at;
	}
	at = idle & (LIMIT_SLOTS - 1);
	if (!at)
		return first + 1 + hash % (LIMIT_SLOTS - 2);
	slots->owner[at] = owner;
	slots->seen_ns[at] = now;
	return first + at;
}

/* The class for packet p on side, 0 if it has no cap. */
static __always_inline __u32 queue_class(const struct limit_side *side, const struct packet *p, int kind)
{
	__u32 class = side->class;

	if (kind == PACKET_TCP && side->connections)
		class = connection_class(side->connections, p->ip.saddr ^ p->ip.daddr,
		                         (__u32)p->tcp.source << 16 | p->tcp.dest);
	return class;
}

/* The endpoint of a connection's socket; 0 for listeners, what is less than a connection, and
 * sockets of the node's own. sk may be NULL. */
static __always_inline __u32 endpoint_of(struct bpf_sock *sk)
{
	struct sock_tag *tag;

	if (!sk || sk->state == BPF_TCP_LISTEN || sk->state == BPF_TCP_NEW_SYN_RECV ||
	    sk->state == BPF_TCP_TIME_WAIT)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return tag ? tag->endpoint_id : 0;
}

/* Whether the packet stays within one container: those are not limited. An answer by a published
 * port to its node is from and to one address, too, the node's. */
static __always_inline bool within_container(const struct packet *p)
{
	return is_alias(p->ip.daddr) || is_alias(p->ip.saddr) || is_mirror(p->ip.daddr) ||
	       is_mirror(p->ip.saddr) ||
	       (p->ip.saddr && p->ip.saddr == p->ip.daddr && endpoint_at(p->ip.saddr));
}

/* Puts one side of l, which may be NULL, into side: no cap if l is NULL. */
static __always_inline void get_side(struct limit_side *side, const struct limit *l, bool egress)
{
	side->rate = 0;
	side->class = 0;
	side->connections = 0;
	if (!l)
		return;
	barrier(); /* no arithmetic on l before the test */
	if (egress) {
		side->rate = l->egress.rate;
		side->class = l->egress.class;
		side->connections = l->egress.connections;
	} else {
		side->rate = l->ingress.rate;
		side->class = l->ingress.class;
		side->connections = l->ingress.connections;
	}
}

/* Has the packet count for a class that it does not wait in: the shaping device gets a copy, which
 * takes its turn there and then ends, because nobody redirected it. Says whether there was room in
 * the class's queue. */
static __always_inline bool charge(struct __sk_buff *skb, __u32 class)
{
	skb->priority = LIMIT_HANDLE | class;
	return bpf_clone_redirect(skb, limit_device, 0) == 0;
}

/* Queues the packet for a cap. If it has two it waits for the tighter and is charged to the other:
 * a packet has one class at one hook. What the other has no room for goes there after all, and is
 * dropped. */
static __always_inline int queue(struct __sk_buff *skb, const struct packet *p, int kind,
                                 const struct limit *sender, const struct limit *receiver, __u16 index)
{
	struct limit_side out, in;
	__u32 class, other;

	if (!protects(PROTECT_LIMITS) && skb->priority)
		/* as it would be if classes were chosen by the priority that the program set */
		return 0;
	get_side(&out, sender, true);
	get_side(&in, receiver, false);
	class = queue_class(&out, p, kind);
	other = queue_class(&in, p, kind);
	if (!class || (other && in.rate < out.rate)) {
		__u32 looser = class;

		class = other;
		other = looser;
	}
	if (!class)
		return 0;
	if (other && limit_device && !charge(skb, other))
		class = other;
	/* What to_overlay and to_endpoint want to know stays. */
	skb->tc_index = index | (has_index(skb, INDEX_BEYOND) ? INDEX_BEYOND : 0);
	skb->priority = LIMIT_HANDLE | class;
	return -1;
}

/* Sets the DSCP of an IP header of version 4 or 6 at offset. */
static __always_inline void set_dscp(struct __sk_buff *skb, __u32 offset, bool ipv6, __u8 dscp)
{
	__be16 old, new;

	if (bpf_skb_load_bytes(skb, offset, &old, sizeof(old)))
		return;
	new = ipv6 ? (old & bpf_htons(0xf03f)) | bpf_htons(dscp << 6)
	           : (old & bpf_htons(0xff03)) | bpf_htons(dscp << 2);
	if (new == old)
		return;
	if (!ipv6)
		bpf_l3_csum_replace(skb, offset + 10, old, new, sizeof(new));
	bpf_skb_store_bytes(skb, offset, &new, sizeof(new), 0);
}

/* Marks what the container sends as its operator said. */
static __always_inline void mark(struct __sk_buff *skb, const struct packet *p, const struct limit *l,
                                 __u32 ip)
{
	if (l->flags & LIMIT_DSCP)
		set_dscp(skb, ip, p->ipv6, l->dscp);
	if (l->flags & LIMIT_PRIORITY)
		skb->priority = l->priority;
}

/* VXLAN on its way out has the DSCP of the endpoint whose packet is inside. */
static __noinline int mark_outer(struct __sk_buff *skb)
{
	const __u32 ip = config_underlay_raw ? 0 : ETH_HLEN;
	const __u32 udp = ip + (is_translated() ? sizeof(struct ip6hdr_) : sizeof(struct iphdr_));
	const __u32 inner = udp + 8 /* UDP */ + 8 /* VXLAN */ + ETH_HLEN;
	struct endpoint *ep;
	struct limit *l;
	__be16 port;
	__u8 version;
	__be32 src;

	if (bpf_skb_load_bytes(skb, udp + 2, &port, sizeof(port)) || port != bpf_htons(config_vxlan_port) ||
	    bpf_skb_load_bytes(skb, inner, &version, 1))
		return 0;
	/* Of IPv6: the last word of the source, which is the IPv4 address that it embeds. */
	if (bpf_skb_load_bytes(skb, inner + (version >> 4 == 6 ? 20 : 12), &src, sizeof(src)))
		return 0;
	ep = endpoint_at(src);
	l = ep ? limit_of(ep->id) : NULL;
	if (l && l->flags & LIMIT_DSCP)
		set_dscp(skb, ip, is_translated(), l->dscp);
	return 0;
}

/* The endpoint that sends a packet of no node socket: of a relayed connection, or as its source
 * says. */
static __always_inline __u32 plain_sender(const struct __sk_buff *skb, const struct packet *p, int kind)
{
	__be32 src = p->ip.saddr;
	struct flow_key k = {};
	struct endpoint *ep;
	struct flow *flow;

	if (kind == PACKET_TCP && src == config_underlay && in_direct_ports(p->tcp.source)) {
		k.saddr = p->ip.daddr;
		k.daddr = p->ip.saddr;
		k.sport = p->tcp.dest;
		k.dport = p->tcp.source;
		flow = bpf_map_lookup_elem(&flow_by_wire, &k);
		if (!flow || flow->kind != FLOW_RELAY)
			return 0;
		src = flow->dst;
	}
	ep = endpoint_at(src);
	return ep ? ep->id : 0;
}

/* The endpoint that receives what leaves by a device: at the other end of its veth, or by a module
 * that runs its TCP. */
static __always_inline struct endpoint *receiver_by(__u32 ifindex)
{
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	struct stack_device *veth;
	__u32 at;

	if (ep)
		return ep;
	veth = bpf_map_lookup_elem(&stack_by_ifindex, &ifindex);
	if (!veth)
		return NULL;
	at = veth->ifindex;
	return bpf_map_lookup_elem(&endpoint_by_ifindex, &at);
}

/* Egress of the node's devices. */
SEC("tc")
int limit_out(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, sender = 0, ip = ETH_HLEN;
	struct endpoint *receiver;
	struct limit *l, *theirs;
	struct bpf_sock *sk;
	struct packet p;
	int kind;

	if (config_underlay_raw && ifindex == config_underlay_ifindex)
		ip = 0;
	kind = is_translated() && ifindex == config_outer_ifindex ? read_wire(skb, &p)
	                                                          : read_packet_at(skb, &p, ip);
	if (kind == PACKET_OTHER)
		return 0;
	if (kind == PACKET_OVERLAY)
		return mark_outer(skb);
	if (ifindex == config_underlay_ifindex && !p.ipv6 && p.ip.protocol == IPPROTO_UDP_ &&
	    p.ip.saddr == config_underlay) {
		mark_outer(skb);
		return 0;
	}
	if (within_container(&p))
		return 0;
	sk = skb->sk;
	if (sk)
		sk = bpf_sk_fullsock(sk);
	if (kind == PACKET_TCP)
		sender = endpoint_of(sk);
	if (!sender)
		sender = plain_sender(skb, &p, kind);
	l = sender ? limit_of(sender) : NULL;
	if (has_index(skb, INDEX_QUEUED)) {
		/* Back from the shaping device. The kernel skips the action. The device may be on top
		 * of another one (VLAN, bridge), by whose egress the packet leaves after this. */
		skb->tc_index = INDEX_SENT;
		skb->priority = l && l->flags & LIMIT_PRIORITY ? l->priority : 0;
		return -1;
	}
	if (l)
		mark(skb, &p, l, ip);
	if (has_index(skb, INDEX_SENT))
		l = NULL;
	receiver = receiver_by(ifindex);
	theirs = receiver ? limit_of(receiver->id) : NULL;
	return queue(skb, &p, kind, l, theirs, INDEX_QUEUED);
}

/* The endpoint of the node socket that the packet, which another filter has not given to one, is
 * for. */
static __noinline __u32 receiving_endpoint(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk;
	__u32 id;

	if (!p)
		return 0;
	sk = lookup_exact(skb, p);
	if (!sk)
		return 0;
	id = endpoint_of(sk);
	bpf_sk_release(sk);
	return id;
}

/* Ingress of the node's devices. */
SEC("tc")
int limit_in(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, receiver = 0;
	struct limit *ours = NULL, *theirs;
	struct endpoint *sender;
	struct bpf_sock *sk;
	struct packet p;
	int kind;

	if (has_index(skb, INDEX_RECEIVED)) /* at a device below this one */
		return 0;
	kind = read_packet(skb, &p);
	if (kind == PACKET_OTHER || within_container(&p))
		return 0;
	sender = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	if (sender) {
		ours = limit_of(sender->id);
		if (ours)
			mark(skb, &p, ours, ETH_HLEN);
	}
	if (kind == PACKET_TCP) {
		sk = skb->sk;
		if (sk)
			sk = bpf_sk_fullsock(sk);
		/* A listener is not held while the packet waits. */
		if (sk && sk->state == BPF_TCP_LISTEN)
			return 0;
		if (sk)
			/* 0: the container's own socket, which sends it */
			receiver = endpoint_of(sk);
		else if (!sender)
			receiver = receiving_endpoint(skb, &p);
	}
	theirs = receiver ? limit_of(receiver) : NULL;
	return queue(skb, &p, kind, ours, theirs, sender ? INDEX_SENT : INDEX_RECEIVED);
}

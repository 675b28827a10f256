/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress of the node's lo: which socket a node socket's SYN goes to, for connections of a
 * container with itself and with others of the node. connect() chose the path by who listened then.
 * The listener may be gone when a SYN comes, the first one or one that is sent again; the kernel
 * would look further, and find a process of the node that listens on a wildcard, or find nothing
 * and say nothing, because it has no RST from an address that is not local to unmarked traffic. */

#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/maps.h"
#include "include/orphans.h"
#include "include/protection.h"
#include "tc/divert.h"
#include "tc/packet.h"
#include "tc/time_wait.h"

/* Whether the frame may be a SYN. All others, and most packets are others, are let go after a look
 * at one byte. */
static __always_inline bool may_be_syn(struct __sk_buff *skb)
{
	__u32 offset = ETH_HLEN + sizeof(struct ip6hdr_) + TCP_FLAGS_OFFSET;
	__u8 *frame = (__u8 *)(long)skb->data, *end = (__u8 *)(long)skb->data_end;

	if (frame + ETH_HLEN + sizeof(struct iphdr_) + TCP_FLAGS_OFFSET + 1 > end)
		return true;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return frame[ETH_HLEN] != 0x45 ||
		       frame[ETH_HLEN + sizeof(struct iphdr_) + TCP_FLAGS_OFFSET] & TCP_FLAG_SYN_;
	return frame + offset + 1 > end || frame[offset] & TCP_FLAG_SYN_;
}

/* The endpoint of this node that the packet is for: by its overlay address, or by one that stands
 * for its loopback. *known says that the address is of one, also of one that is gone. */
static __always_inline struct endpoint *endpoint_for(const struct packet *p, bool *known)
{
	__u32 id = (bpf_ntohl(p->ip.daddr) - ALIAS_BASE) / ALIAS_SLOTS;
	struct endpoint *ep;

	*known = true;
	if (!p->ipv6 && is_alias(p->ip.daddr))
		return bpf_map_lookup_elem(&endpoint_by_id, &id);
	ep = endpoint_at(p->ip.daddr);
	*known = ep && ep->flags & ENDPOINT_INTERCEPTED;
	return ep;
}

/* A SYN for what is in TIME_WAIT. The kernel, if it takes it for a new connection's, would look for
 * a listener by itself. */
static __always_inline int past_waiting(struct __sk_buff *skb, const struct packet *p)
{
	int ended;

	if (skb->mark == SYN_RETURNED) /* the wait cannot be ended (net.ipv4.tcp_rfc1337) */
		return drop(REASON_DROP_SYN_WAITS);
	ended = end_time_wait(skb, p, 0);
	if (ended < 0)
		return drop(REASON_DROP_SYN_WAITS);
	if (ended)
		count(REASON_TIME_WAIT_ENDED);
	/* a RST by now; or an old duplicate, which the kernel answers with an ACK */
	return TC_ACT_OK;
}

/* Whether a listener with this tag takes the packet, whatever device its program bound it to. To
 * the own address a socket goes by lo or by eth0, as its own device says: connect() has asked. */
static __always_inline bool takes_over_lo(const struct sock_tag *tag, const struct packet *p)
{
	if (!p->ipv6 && (is_alias(p->ip.saddr) || is_alias(p->ip.daddr)))
		return takes_from(tag, true);
	return p->ip.saddr == p->ip.daddr || takes_from(tag, false);
}

/* Assigned, so that nothing is looked up once more: the listener may close at this moment. */
static __always_inline int to_socket_of(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = lookup_exact(skb, p);
	struct sock_tag *tag;
	__u32 state;
	bool ours;

	if (!sk)
		return refuse_syn(skb);
	state = sk->state;
	if (state == BPF_TCP_NEW_SYN_RECV || state == BPF_TCP_TIME_WAIT) {
		bpf_sk_release(sk);
		/* Sent again although its SYN-ACK is under way, which the listener repeats if need
		 * be. If that has closed, the kernel would find so and look for another. */
		return state == BPF_TCP_TIME_WAIT ? past_waiting(skb, p) : drop(REASON_DROP_SYN_WAITS);
	}
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	ours = is_of(tag, owner) && (state != BPF_TCP_LISTEN || takes_over_lo(tag, p));
	if (ours)
		bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	if (!ours)
		return refuse_syn(skb);
	if (skb->mark == SYN_RETURNED) {
		barrier();
		skb->mark = config_mark;
	}
	return TC_ACT_OK;
}

/* Whether the packet is for a handshake whose listener has closed: the kernel drops that, and says
 * nothing, when the client's last ACK comes. The client would have a connection that nobody answers
 * for. */
static __always_inline bool begun_for_nobody(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct bpf_sock *sk = lookup_exact(skb, p);
	bool begun;

	if (!sk)
		return false;
	begun = sk->state == BPF_TCP_NEW_SYN_RECV;
	bpf_sk_release(sk);
	return begun && is_orphan(skb, p, owner);
}

static __always_inline int from_lo_verdict(struct __sk_buff *skb)
{
	bool syn = may_be_syn(skb), known;
	struct endpoint *ep;
	struct packet p;

	if (!syn && (!orphans_until || bpf_ktime_get_ns() > orphans_until))
		return TC_ACT_OK;
	if (!protects(PROTECT_WILDCARD))
		return TC_ACT_OK;
	if (skb->mark != config_mark && skb->mark != config_overlay_mark && skb->mark != SYN_RETURNED)
		return TC_ACT_OK; /* not of a node socket: the node's own affair */
	if (read_packet(skb, &p) != PACKET_TCP || (syn && !is_syn(&p)) || p.tcp.flags & TCP_FLAG_RST_)
		return TC_ACT_OK;
	ep = endpoint_for(&p, &known);
	if (!known)
		return TC_ACT_OK;
	if (!syn)
		return ep && begun_for_nobody(skb, &p, ep->id) ? refuse_syn(skb) : TC_ACT_OK;
	return ep ? to_socket_of(skb, &p, ep->id) : refuse_syn(skb);
}

SEC("tc")
int from_lo(struct __sk_buff *skb)
{
	return or_next_filter(from_lo_verdict(skb));
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reading packets in tc programs, and finding sockets for them. Headers are copied, not mapped:
 * after GRO they need not be linear. */
#ifndef HEDDLE_TC_PACKET_H
#define HEDDLE_TC_PACKET_H

#include "include/abi/flow.h"
#include "include/address.h"
#include "include/config.h"
#include "include/count.h"
#include "include/endpoint.h"
#include "include/headers.h"
#include "include/limits.h"
#include "include/lookup.h"
#include "include/protection.h"

#define TCP_DOFF_OFFSET  12
#define TCP_FLAGS_OFFSET 13
#define TCP_CHECK_OFFSET 16
#define UDP_CHECK_OFFSET 6

struct packet {
	struct iphdr_ ip; /* of IPv6: only protocol, ttl, saddr and daddr, see below */
	struct tcphdr_ tcp;
	__u32 tcp_offset; /* from the start of the frame */
	/* 1 if it is IPv6: then ip has the IPv4 addresses that overlay addresses embed, else 0 */
	__u32 ipv6;
	struct address src6;
	struct address dst6;
};

/* skb->tc_index: what a program remembers of a packet from one hook to the next. Nothing else of
 * the node sets it; what a container set from_endpoint clears, and of what another node set that
 * shares the kernel, as in a lab, from_underlay clears what it trusts. */
#define INDEX_OURS       0x4800
#define INDEX_QUEUED     (INDEX_OURS | 1)  /* on its way through the shaping device */
#define INDEX_SENT       (INDEX_OURS | 2)  /* counted for the container that sent it */
#define INDEX_BEYOND     (INDEX_OURS | 4)  /* a container sent it to an address beyond the overlay */
#define INDEX_REDIRECTED (INDEX_OURS | 8)  /* from_endpoint sent it here: nothing more is to be asked */
#define INDEX_CROSSING   (INDEX_OURS | 16) /* a node socket sent it, by the container's device */
#define INDEX_RECEIVED   (INDEX_OURS | 32) /* counted for the container that receives it */
#define INDEX_JUDGED     (INDEX_OURS | 64) /* from_underlay let it in: the node's stack goes on with it */

static __always_inline bool has_index(const struct __sk_buff *skb, __u32 index)
{
	return (skb->tc_index & (0xff00 | index)) == index;
}

/* Whether the packet is back from the shaping device. Where others' namespaces set the field their
 * packets have not come in by that device. */
static __always_inline bool was_queued(const struct __sk_buff *skb)
{
	return has_index(skb, INDEX_QUEUED) && limit_device && skb->ingress_ifindex == limit_device;
}

/* What read_packet found. */
enum packet_kind {
	PACKET_OTHER, /* no IP */
	PACKET_IP,    /* IP, but no TCP header can be read: only the addresses are valid */
	PACKET_TCP,
};

static __always_inline int read_tcp(struct __sk_buff *skb, struct packet *p)
{
	if (bpf_skb_load_bytes(skb, p->tcp_offset, &p->tcp, sizeof(p->tcp)))
		return PACKET_IP;
	return PACKET_TCP;
}

static __always_inline int read_ipv6(struct __sk_buff *skb, struct packet *p, __u32 ip)
{
	struct ip6hdr_ h;
	int i;

	if (bpf_skb_load_bytes(skb, ip, &h, sizeof(h)))
		return PACKET_OTHER;
	p->ipv6 = 1;
	/* Before Linux 6.3 the verifier lets nobody read what was not written, on any path that it
	 * cannot tell from one of IPv4. */
	p->ip.version_ihl = 0;
	p->ip.id = 0;
	p->ip.frag_off = 0;
	p->ip.ttl = h.hop_limit;
	for (i = 0; i < 4; i++) {
		p->src6.word[i] = h.saddr[i];
		p->dst6.word[i] = h.daddr[i];
	}
	p->ip.saddr = is_overlay6(&p->src6) ? p->src6.word[3] : 0;
	p->ip.daddr = is_overlay6(&p->dst6) ? p->dst6.word[3] : 0;
	p->ip.protocol = h.next_header;
	/* Node sockets send no extension headers, and those of others are for the container's own
	 * stack. */
	if (h.next_header != IPPROTO_TCP_)
		return PACKET_IP;
	p->tcp_offset = ip + sizeof(h);
	return read_tcp(skb, p);
}

/* Reads IP, whose header is at ip, and, if it is TCP and not a later fragment, TCP headers. */
static __always_inline int read_packet_at(struct __sk_buff *skb, struct packet *p, __u32 ip)
{
	__u32 ihl;

	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return has_overlay6() ? read_ipv6(skb, p, ip) : PACKET_OTHER;
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return PACKET_OTHER;
	p->ipv6 = 0;
	if (bpf_skb_load_bytes(skb, ip, &p->ip, sizeof(p->ip)))
		return PACKET_OTHER;
	ihl = (p->ip.version_ihl & 0xf) * 4;
	if (p->ip.protocol != IPPROTO_TCP_ || p->ip.frag_off & bpf_htons(0x1fff) || ihl < sizeof(p->ip))
		return PACKET_IP;
	p->tcp_offset = ip + ihl;
	return read_tcp(skb, p);
}

/* The same of a frame of Ethernet. */
static __always_inline int read_packet(struct __sk_buff *skb, struct packet *p)
{
	return read_packet_at(skb, p, ETH_HLEN);
}

static __always_inline bool is_syn(const struct packet *p)
{
	return (p->tcp.flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_;
}

static __always_inline int drop(__u32 reason)
{
	count(reason);
	return TC_ACT_SHOT;
}

static __always_inline struct flow_key packet_tuple(const struct packet *p)
{
	struct flow_key k = {
	        .saddr = p->ip.saddr,
	        .daddr = p->ip.daddr,
	        .sport = p->tcp.source,
	        .dport = p->tcp.dest,
	        .ipv6 = p->ipv6,
	};
	return k;
}

#define NODE_NETNS BPF_F_CURRENT_NETNS /* for programs on the node's devices */

static __always_inline struct bpf_sock *lookup_in(struct __sk_buff *skb, __u64 netns, __be32 saddr,
                                                  __be16 sport, __be32 daddr, __be16 dport)
{
	struct bpf_sock_tuple t = {};

	t.ipv4.saddr = saddr;
	t.ipv4.sport = sport;
	t.ipv4.daddr = daddr;
	t.ipv4.dport = dport;
	return bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv4), netns, 0);
}

static __always_inline struct bpf_sock *lookup(struct __sk_buff *skb, __be32 saddr, __be16 sport,
                                               __be32 daddr, __be16 dport)
{
	return lookup_in(skb, BPF_F_CURRENT_NETNS, saddr, sport, daddr, dport);
}

static __always_inline struct bpf_sock *lookup6_in(struct __sk_buff *skb, __u64 netns,
                                                   const struct address *saddr, __be16 sport,
                                                   const struct address *daddr, __be16 dport)
{
	struct bpf_sock_tuple t = {};
	__u32 size = set_lookup(&t, true, saddr, sport, daddr, dport);

	return bpf_skc_lookup_tcp(skb, &t, size, netns, 0);
}

static __always_inline struct bpf_sock *lookup6(struct __sk_buff *skb, const struct address *saddr,
                                                __be16 sport, const struct address *daddr, __be16 dport)
{
	return lookup6_in(skb, BPF_F_CURRENT_NETNS, saddr, sport, daddr, dport);
}

/* The socket for the packet, if it came from port sport, as the kernel would find it. Port 0 never
 * matches a connected socket. */
static __always_inline struct bpf_sock *lookup_from(struct __sk_buff *skb, const struct packet *p,
                                                    __be16 sport)
{
	if (p->ipv6)
		return lookup6(skb, &p->src6, sport, &p->dst6, p->tcp.dest);
	return lookup(skb, p->ip.saddr, sport, p->ip.daddr, p->tcp.dest);
}

/* The socket for the packet as the kernel would find it. Not inline: its callers' stacks are
 * full. */
static __noinline struct bpf_sock *lookup_exact(struct __sk_buff *skb, const struct packet *p)
{
	return lookup_from(skb, p, p->tcp.source);
}

/* Whether sk, found for a packet to an overlay address, belongs to endpoint owner. Listeners on a
 * wildcard of the node itself match the lookup too and are not: no tag. Request and time-wait
 * sockets carry no tag; they exist only as children of sockets that did. */
static __always_inline bool owned(struct bpf_sock *sk, __u32 owner)
{
	struct sock_tag *tag;

	if (sk->state == BPF_TCP_NEW_SYN_RECV || sk->state == BPF_TCP_TIME_WAIT)
		return true;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return is_of(tag, owner) || !protects(PROTECT_LISTENER);
}

/* Whether sk is a listener of endpoint owner that takes IPv6 connections although it is bound to an
 * IPv4 address: one on [::], which underneath is at the IPv4 overlay address. */
static __always_inline bool takes_ipv6(struct bpf_sock *sk, __u32 owner)
{
	struct sock_tag *tag;

	if (sk->state != BPF_TCP_LISTEN || sk->family != AF_INET6)
		return false;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return is_of(tag, owner) && tag->flags & TAG_ANY6;
}

/* Whether sk, if it is a listener, takes what comes from beyond the container. */
static __always_inline bool takes_from_beyond(struct bpf_sock *sk)
{
	struct sock_tag *tag;

	if (sk->state != BPF_TCP_LISTEN)
		return true;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	return !tag || takes_from(tag, false);
}

/* Finds the listener of endpoint owner for a SYN from src to dst:port, overlay addresses. Source
 * port 0 never matches a connected socket. The caller releases it. */
static __always_inline struct bpf_sock *find_listener(struct __sk_buff *skb, bool ipv6, __be32 src,
                                                      __be32 dst, __be16 port, __u32 owner)
{
	struct address src6, dst6;
	struct bpf_sock *sk;

	if (ipv6) {
		set_overlay6(&src6, src);
		set_overlay6(&dst6, dst);
		sk = lookup6(skb, &src6, 0, &dst6, port);
		if (sk) {
			if (sk->state == BPF_TCP_LISTEN && owned(sk, owner) && takes_from_beyond(sk))
				return sk;
			bpf_sk_release(sk);
		}
	}
	sk = lookup(skb, src, 0, dst, port);
	if (!sk)
		return NULL;
	if ((ipv6 ? takes_ipv6(sk, owner) : sk->state == BPF_TCP_LISTEN && owned(sk, owner)) &&
	    takes_from_beyond(sk))
		return sk;
	bpf_sk_release(sk);
	return NULL;
}

/* What a filter on the node's devices says to the kernel: what it lets pass goes on to the next
 * filter, which may be tc/limit.bpf.c's. */
static __always_inline int or_next_filter(int verdict)
{
	return verdict == TC_ACT_OK ? TC_ACT_UNSPEC : verdict;
}

/* Sends a packet that was to leave by a veth to the divert device instead, where it enters the
 * stack again. */
static __always_inline int redeliver(struct __sk_buff *skb)
{
	static const __u8 divert_mac[6] = {0x02, 0x48, 0x44, 0x00, 0x00, 0x01};

	if (bpf_skb_store_bytes(skb, 0, divert_mac, sizeof(divert_mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(config_divert_ifindex, BPF_F_INGRESS);
}

/* Hands the packet to the module that runs its endpoint's TCP. */
static __always_inline int into_stack(struct __sk_buff *skb, const struct stack_device *module)
{
	if (bpf_skb_store_bytes(skb, 0, module->mac, sizeof(module->mac), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(module->ifindex, 0);
}

/* Whether a packet of TCP for the container behind veth ifindex, whose TCP a module runs, is for a
 * socket of its own stack all the same: one of a process that is not intercepted. What both have is
 * that one's: nobody here knows what the module has. Not static, so that the verifier looks at it
 * once. */
__noinline int is_for_own_stack(struct __sk_buff *skb, __u32 ifindex)
{
	struct endpoint *ep = bpf_map_lookup_elem(&endpoint_by_ifindex, &ifindex);
	struct bpf_sock *sk;
	struct packet p;
	int own;

	if (!ep || ep->nsid < 0 || read_packet(skb, &p) != PACKET_TCP)
		return 0;
	if (p.ipv6)
		sk = lookup6_in(skb, (__u32)ep->nsid, &p.src6, p.tcp.source, &p.dst6, p.tcp.dest);
	else
		sk = lookup_in(skb, (__u32)ep->nsid, p.ip.saddr, p.tcp.source, p.ip.daddr, p.tcp.dest);
	if (!sk)
		return 0;
	/* A listener has what begins a connection. Any other segment that only it is found for is of a
	 * connection of the module's. */
	own = sk->state != BPF_TCP_LISTEN || is_syn(&p);
	bpf_sk_release(sk);
	return own;
}

/* Hands the packet to the container behind veth ifindex: at once, or, so that limits see it, by its
 * node side. */
static __always_inline int into_container(struct __sk_buff *skb, __u32 ifindex)
{
	struct stack_device *module = bpf_map_lookup_elem(&stack_by_ifindex, &ifindex);

	if (module && !is_for_own_stack(skb, ifindex))
		return into_stack(skb, module);
	if (limits_in_force)
		return bpf_redirect_neigh(ifindex, NULL, 0, 0);
	return bpf_redirect_peer(ifindex, 0);
}

/* Answers a SYN of a node socket by a RST: the divert device is where nftables does. */
static __always_inline int refuse_syn(struct __sk_buff *skb)
{
	count(REASON_REFUSE_LISTENER_GONE);
	barrier(); /* the compiler must not write the mark through a moved context pointer */
	skb->mark = config_reject_mark;
	return redeliver(skb);
}

#endif

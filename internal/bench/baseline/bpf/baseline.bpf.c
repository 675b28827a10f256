/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A benchmark's peer, and no part of Heddle: the data path of a BPF container network, as Cilium
 * and Calico build it, so that Heddle can be compared with one where neither can be installed.
 *
 * A packet from a container is seen once where it leaves the container's veth, a packet to one
 * where it enters the node. Both look up the connection, the policy and the destination, and then
 * hand the packet over without the node's stack: bpf_redirect_peer() into the container's
 * namespace, bpf_redirect() or bpf_redirect_neigh() out of the underlay device, bpf_redirect() with
 * a tunnel key into a VXLAN device. docs/benchmarks/method.md says what is left out. */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#define AF_INET 2

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The VXLAN device between nodes; 0 without one. */
volatile const __u32 vxlan_ifindex;

/* A container of this node. */
struct endpoint {
	__u32 ifindex; /* the node's end of its veth */
	__u8 mac[ETH_ALEN];
	__u8 node_mac[ETH_ALEN];
};

/* Where containers of another node are. */
struct remote {
	__u32 identity;
	__u32 tunnel_to; /* underlay address, host's byte order; 0: routed natively */
};

struct prefix {
	__u32 bits;
	__be32 address;
};

struct flow {
	__be32 source, destination;
	__be16 source_port, destination_port;
	__u8 protocol;
	__u8 inward; /* 1: as its destination saw it, 0: as its source did */
	__u16 unused;
};

struct connection {
	__u64 packets, bytes;
	__u64 last_ns;
};

struct policy_key {
	__u32 identity; /* of the sender */
	__be16 port_be;
	__u16 protocol;
};

/* What happened to packets: counters. */
enum baseline_path {
	PATH_DELIVERED, /* into a container of this node, by bpf_redirect_peer() */
	PATH_ROUTED,    /* out of the underlay device */
	PATH_TUNNELLED, /* into the VXLAN device */
	PATH_STACK,     /* to a container, but left to the node's stack */
	PATH_DROPPED,
	PATH_COUNT,
};
const enum baseline_path *path_for_go __attribute__((unused)); /* keeps the type in the object */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __be32);
	__type(value, struct endpoint);
} endpoint_by_address SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, struct remote);
} remote_by_prefix SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 262144);
	__type(key, struct flow);
	__type(value, struct connection);
} connection_by_flow SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct policy_key);
	__type(value, __u32);
} verdict_by_policy SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PATH_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} packets_by_path SEC(".maps");

static __always_inline int count(enum baseline_path path, int verdict)
{
	__u32 key = path;
	__u64 *packets = bpf_map_lookup_elem(&packets_by_path, &key);

	if (packets)
		*packets += 1;
	return verdict;
}

/* headers gives the IPv4 header of a TCP, UDP or ICMP packet and its flow; NULL if it is none that
 * this data path carries. */
static __always_inline struct iphdr *headers(struct __sk_buff *skb, struct flow *flow)
{
	void *data, *end;
	struct iphdr *ip;
	__be16 *ports;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return NULL;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + ETH_HLEN + sizeof(*ip) + 4 > end) {
		if (bpf_skb_pull_data(skb, ETH_HLEN + sizeof(*ip) + 4))
			return NULL;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		if (data + ETH_HLEN + sizeof(*ip) + 4 > end)
			return NULL;
	}
	ip = data + ETH_HLEN;
	if (ip->ihl != 5 || ip->ttl <= 1)
		return NULL;
	flow->source = ip->saddr;
	flow->destination = ip->daddr;
	flow->protocol = ip->protocol;
	flow->source_port = 0;
	flow->destination_port = 0;
	flow->inward = 0;
	flow->unused = 0;
	if (ip->protocol == IPPROTO_TCP || ip->protocol == IPPROTO_UDP) {
		ports = (void *)(ip + 1);
		flow->source_port = ports[0];
		flow->destination_port = ports[1];
	}
	return ip;
}

static __always_inline void saw(struct connection *c, struct __sk_buff *skb)
{
	__sync_fetch_and_add(&c->packets, 1);
	__sync_fetch_and_add(&c->bytes, skb->len);
	c->last_ns = bpf_ktime_get_ns();
}

/* allowed asks the policy for a packet of a connection's opener. */
static __always_inline bool allowed(__u32 identity, const struct flow *flow)
{
	struct policy_key key = {};
	__u32 *verdict;

	key.identity = identity;
	key.port_be = flow->destination_port;
	key.protocol = flow->protocol;
	verdict = bpf_map_lookup_elem(&verdict_by_policy, &key);
	if (verdict)
		return *verdict;
	key.identity = 0; /* anybody, any port */
	key.port_be = 0;
	key.protocol = 0;
	verdict = bpf_map_lookup_elem(&verdict_by_policy, &key);
	return verdict && *verdict;
}

/* track looks a packet's connection up, makes it if there is none and policy allows it; false: to
 * be dropped. inward says on which side of the connection's destination or source this is. */
static __always_inline bool track(struct __sk_buff *skb, struct flow *flow, __u8 inward, __u32 identity)
{
	struct connection *c, first = {};
	struct flow back = {};

	/* An answer: what came in goes out, and the other way round. */
	back.source = flow->destination;
	back.destination = flow->source;
	back.source_port = flow->destination_port;
	back.destination_port = flow->source_port;
	back.protocol = flow->protocol;
	back.inward = !inward;
	c = bpf_map_lookup_elem(&connection_by_flow, &back);
	if (c) {
		saw(c, skb);
		return true;
	}
	if (!allowed(identity, flow))
		return false;
	flow->inward = inward;
	c = bpf_map_lookup_elem(&connection_by_flow, flow);
	if (c) {
		saw(c, skb);
		return true;
	}
	first.packets = 1;
	first.bytes = skb->len;
	first.last_ns = bpf_ktime_get_ns();
	return !bpf_map_update_elem(&connection_by_flow, flow, &first, BPF_ANY);
}

/* hop does what a router does to a packet: time to live, checksum and MAC addresses. */
static __always_inline int hop(struct __sk_buff *skb, const __u8 *to, const __u8 *from)
{
	__u8 ttl, next;

	if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &ttl, 1))
		return -1;
	next = ttl - 1;
	if (bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), ttl, next, 2) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &next, 1, 0))
		return -1;
	if (!to)
		return 0;
	if (bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_dest), to, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_source), from, ETH_ALEN, 0))
		return -1;
	return 0;
}

/* deliver hands a packet to a container of this node. */
static __always_inline int deliver(struct __sk_buff *skb, struct flow *flow, const struct endpoint *e,
                                   __u32 identity)
{
	__u32 ifindex = e->ifindex;

	if (!track(skb, flow, 1, identity) || hop(skb, e->mac, e->node_mac))
		return count(PATH_DROPPED, TC_ACT_SHOT);
	return count(PATH_DELIVERED, bpf_redirect_peer(ifindex, 0));
}

/* route sends a packet out of the underlay device, by the node's routing table and past its
 * stack. */
static __always_inline int route(struct __sk_buff *skb, const struct flow *flow)
{
	struct bpf_fib_lookup fib = {};
	int result;

	fib.family = AF_INET;
	fib.l4_protocol = flow->protocol;
	fib.ipv4_src = flow->source;
	fib.ipv4_dst = flow->destination;
	fib.ifindex = skb->ifindex;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result == BPF_FIB_LKUP_RET_SUCCESS) {
		if (hop(skb, fib.dmac, fib.smac))
			return count(PATH_DROPPED, TC_ACT_SHOT);
		return count(PATH_ROUTED, bpf_redirect(fib.ifindex, 0));
	}
	if (result == BPF_FIB_LKUP_RET_NO_NEIGH) {
		if (hop(skb, NULL, NULL))
			return count(PATH_DROPPED, TC_ACT_SHOT);
		return count(PATH_ROUTED, bpf_redirect_neigh(fib.ifindex, NULL, 0, 0));
	}
	return count(PATH_STACK, TC_ACT_OK);
}

static __always_inline int tunnel(struct __sk_buff *skb, const struct remote *r)
{
	struct bpf_tunnel_key key = {};

	key.tunnel_id = r->identity; /* the sender's, as Cilium does it; here all containers are of one */
	key.remote_ipv4 = r->tunnel_to;
	key.tunnel_ttl = 64;
	if (bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX))
		return count(PATH_DROPPED, TC_ACT_SHOT);
	return count(PATH_TUNNELLED, bpf_redirect(vxlan_ifindex, 0));
}

/* On the node's end of a container's veth: what the container sends. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct flow flow = {};
	struct prefix to = {};
	struct endpoint *e;
	struct remote *r;

	if (!headers(skb, &flow))
		return TC_ACT_OK;
	to.bits = 32;
	to.address = flow.destination;
	r = bpf_map_lookup_elem(&remote_by_prefix, &to);
	if (!r)
		return TC_ACT_OK; /* to no container: neighbours and multicast groups that the kernel asks about by itself */
	if (!track(skb, &flow, 0, r->identity))
		return count(PATH_DROPPED, TC_ACT_SHOT);
	e = bpf_map_lookup_elem(&endpoint_by_address, &flow.destination);
	if (e)
		return deliver(skb, &flow, e, r->identity);
	if (r->tunnel_to)
		return tunnel(skb, r);
	return route(skb, &flow);
}

/* to_containers is for what comes from other nodes. */
static __always_inline int to_containers(struct __sk_buff *skb, __u32 identity)
{
	struct flow flow = {};
	struct endpoint *e;

	if (!headers(skb, &flow))
		return TC_ACT_OK;
	e = bpf_map_lookup_elem(&endpoint_by_address, &flow.destination);
	if (!e)
		return TC_ACT_OK;
	return deliver(skb, &flow, e, identity);
}

/* On the underlay device. The sender's identity goes by its address. */
SEC("tc")
int from_underlay(struct __sk_buff *skb)
{
	struct prefix from = {};
	struct remote *r;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;

	if (skb->protocol != bpf_htons(ETH_P_IP) || (void *)(ip + 1) > end)
		return TC_ACT_OK;
	from.bits = 32;
	from.address = ip->saddr;
	r = bpf_map_lookup_elem(&remote_by_prefix, &from);
	if (!r)
		return TC_ACT_OK; /* the node's own traffic, or VXLAN's */
	return to_containers(skb, r->identity);
}

/* On the VXLAN device. The sender's identity came along. */
SEC("tc")
int from_vxlan(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key = {};

	if (bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
		return TC_ACT_OK;
	bpf_skb_change_type(skb, PACKET_HOST);
	return to_containers(skb, key.tunnel_id);
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Every map: who writes it, who reads it, what bounds it. All are pinned by name
 * (docs/protocols/pins.md). */
#ifndef HEDDLE_MAPS_H
#define HEDDLE_MAPS_H

#include "include/abi/account.h"
#include "include/abi/endpoint.h"
#include "include/abi/firewall.h"
#include "include/abi/flow.h"
#include "include/abi/flow_set.h"
#include "include/abi/limit.h"
#include "include/abi/multicast.h"
#include "include/abi/packets.h"
#include "include/abi/policy.h"
#include "include/abi/portbind.h"
#include "include/abi/reason.h"
#include "include/abi/reserved_ports.h"
#include "include/abi/route.h"
#include "include/abi/service.h"
#include "include/abi/stack.h"
#include "include/abi/stack_settings.h"
#include "include/abi/underlay.h"
#include "include/tag.h"

/* A hash of which entries take memory as they come, and one that is full from the beginning and
 * then pushes out what was used least lately. */
#define HASH(name, key_type, value_type, entries)                                                            \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_HASH);                                                             \
		__uint(max_entries, entries);                                                                \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                        \
		__type(key, key_type);                                                                       \
		__type(value, value_type);                                                                   \
	} name SEC(".maps")
#define LRU_HASH(name, key_type, value_type, entries)                                                        \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                                         \
		__uint(max_entries, entries);                                                                \
		__type(key, key_type);                                                                       \
		__type(value, value_type);                                                                   \
	} name SEC(".maps")

/* Endpoints of this node. Written by the agent. 16,384 endpoints a node. */
HASH(endpoint_by_id, __u32, struct endpoint, 16384);

/* The same by overlay address, for packets. Written by the agent. */
HASH(endpoint_by_addr, struct address, struct endpoint, 16384);

/* The same by the node side of its veth. Written by the agent. */
HASH(endpoint_by_ifindex, __u32, struct endpoint, 16384);

/* Node side of the veth of an endpoint whose TCP a stack module runs -> the module's device, and
 * the other way round. Written by the agent. Two entries an endpoint. */
HASH(stack_by_ifindex, __u32, struct stack_device, 32768);

/* What the agent noted of sockets whose TCP a stack module runs. It goes where the socket goes
 * (dup, fork, SCM_RIGHTS), and outlives the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct stack_note);
} note_by_sock SEC(".maps");

/* Overlay prefix -> node, longest match. Written by the agent: one entry a node and family, one for
 * each endpoint that is not intercepted, one for each address of this node. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct route_key);
	__type(value, struct route);
} route_by_prefix SEC(".maps");

/* Known nodes by underlay address, this one too. Written by the agent. 16,384 nodes. */
HASH(node_by_underlay, struct address, struct route, 16384);

/* Overlay devices of other nodes, by the same address. Written by the agent. 16,384 nodes. */
HASH(vtep_by_underlay, struct address, struct vtep, 16384);

/* Addresses between which the node's firewall translates, as with the services of others: what
 * goes between them needs the node's stack. Written and read by tc/redirect.h. LRU: as many as
 * containers have peers by such services, and a packet of each brings it back. */
LRU_HASH(translated_pairs, struct address_pair, __u32, 65536);
/* Next hops to nodes, by underlay address. Written and read by tc/tunnel.h. LRU: all nodes that
 * containers talk to at a time; one more costs a look at the node's routes. */
LRU_HASH(way_by_underlay, __be32, struct way, 16384);
/* Nodes that packets go to, or come from, without a tunnel, by underlay address. Written and read
 * by tc/native.h; the agent reads who is to be probed. LRU, as above. */
LRU_HASH(neighbour_by_underlay, __be32, struct neighbour, 16384);
/* When they last answered a probe by IPv6, ns since boot. Written and read by tc/native.h. */
LRU_HASH(answered6_by_underlay, __be32, __u64, 16384);

/* What packets without a tunnel need, of addresses that this processor saw lately: else each would
 * look for its route, its node and whether it is one of this node. Written and read by
 * tc/native.h. What has the same place in it pushes out. */
#define NEAR_BITS  8
#define NEAR_SLOTS (4 << NEAR_BITS) /* of each address four: both ways, of both families */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NEAR_SLOTS);
	__type(key, __u32);
	__type(value, struct near_address);
} near_by_address SEC(".maps");

/* When a packet of the overlay was last left to its device by this processor, ns since boot, by the
 * sender's port. Written and read by tc/tunnel.h. */
#define LEFT_SLOTS 256
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LEFT_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} left_to_device SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tunnel_scratch);
} tunnel_scratch SEC(".maps");

/* The same by what they are called within nodes and, on an IPv6 underlay, by their addresses there;
 * empty on another. Written by the agent. 16,384 nodes. */
HASH(mapped_by_inner, __be32, struct mapped_node, 16384);
HASH(mapped_by_outer, struct address, struct mapped_node, 16384);

/* Direct connections not yet accepted, relayed ones, and those from a container's own namespace to
 * a listener of the same node that are not yet accepted (keyed by overlay addresses). Written here.
 * LRU: who floods pushes out what he has himself (include/flow_table.h), which then can no longer
 * be completed by a SYN cookie, or relayed. */
LRU_HASH(flow_by_wire, struct flow_key, struct flow, 131072);

/* Relayed connections as the container sees them (saddr: container), for the way back. Written
 * here. */
LRU_HASH(wire_by_relay, struct flow_key, struct flow_key, 65536);

/* Which entries of these two are whose, by who began them. Written and read by
 * include/flow_table.h. LRU, of 32 times the sets that one owner has: what is pushed out is
 * remembered still, but nobody's. */
LRU_HASH(wires_by_owner, struct flow_set_key, struct tuple_set, 32 * TUPLE_SETS);

/* Bind reservations: ports that bound sockets have, where the kernel cannot tell that two conflict.
 * Written and read by bind and close; an entry goes with the last socket. When it is full,
 * conflicts between addresses are not seen. */
HASH(claims_by_port, struct port_key, struct portbinds, 262144);

/* How many sockets an endpoint has, by id. Entries are made and deleted by the agent with the
 * endpoint; counted in by sock/socket_quota.h, read by the agent. 16,384 endpoints a node. */
HASH(sockets_by_endpoint, __u32, __u64, 16384);

/* The port of the node that a socket keeps from everybody's connect(): of those that bound one, or
 * listen, and what they accept. Written and read by sock/reserved_ports.h. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct reserved_port);
} port_by_sock SEC(".maps");

/* Ports of listeners with what they accepted, by the listener's cookie and the port. Written and
 * read by sock/reserved_ports.h; an entry goes with the last socket. When it is full, no further
 * listener stays (end_over_quota). */
HASH(group_by_listener, __u64, struct port_group, 262144);

/* How many of the node's ports an endpoint holds, by id. Entries are made and deleted by the agent
 * with the endpoint; counted in by sock/reserved_ports.h, read by the agent. 16,384 endpoints a
 * node. */
HASH(ports_by_endpoint, __u32, struct port_account, 16384);

/* The same of the ports that the node keeps for its own connects (sock/node_ports.h). */
HASH(node_ports_by_endpoint, __u32, struct port_account, 16384);

/* How many of those all containers hold, each port once. Written and read by
 * sock/reserved_ports.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct port_account);
} node_ports_held SEC(".maps");

/* The sockets that hold each of them, by the port's lower bits. Written and read by
 * sock/reserved_ports.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NODE_PORTS_MAX);
	__type(key, __u32);
	__type(value, struct node_port);
} node_port_by_number SEC(".maps");

/* Endpoints with a listener above their limit of ports, by id, 4 bytes each. Written here, read by
 * the agent, which ends the listeners. When it is full, what comes is lost: there is enough to
 * do. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* bytes */
} surplus SEC(".maps");

/* What happens to connections: struct flow_event. Written by sock/flow_events.h, read by the agent.
 * When it is full, what comes is lost, and counted. */
#define FLOW_EVENTS_BYTES (2 << 20)
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, FLOW_EVENTS_BYTES);
} flow_events SEC(".maps");

/* How much of flow_events somebody has had in a window. */
struct event_share {
	__u64 window;
	__u64 count;
};

enum event_sharer {
	SHARER_ENDPOINT, /* by id */
	SHARER_ADDRESS,  /* of a container, or 0: all others */
};

/* By sharer and its number. What is pushed out begins a new window. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct event_share);
} event_shares SEC(".maps");

/* Counts by enum heddle_reason. Written here, read by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_MAX);
	__type(key, __u32);
	__type(value, __u64);
} count_by_reason SEC(".maps");

/* Accounts by endpoint id. Entries are made and deleted by the agent with the endpoint; counted in
 * by sock/account.h, read by the agent. 16,384 endpoints a node. */
HASH(account_by_endpoint, __u32, struct account, 16384);

/* Whether there is policy, and which side of its tables is in force: enum policy_flags. Written by
 * the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} policy_state SEC(".maps");

/* Classes of single addresses, of both sides. Written by the agent: one entry an overlay address
 * and side. */
HASH(class_by_addr, struct class_key, struct class_info, 262144);

/* Classes of all others: longest match. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct class_prefix_key);
	__type(value, struct class_info);
} class_by_prefix SEC(".maps");

/* Verdicts on pairs of classes, of both sides. Written by the agent: those with an endpoint of this
 * node. */
HASH(verdict_by_pair, struct pair_key, struct pair_verdict, 1048576);

/* Verdicts on ports where a pair's differ. Written by the agent; pairs with equal ones share a
 * set. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct port_range_key);
	__type(value, __u32);
} verdict_by_port SEC(".maps");

/* TCP connections that packets have shown to be opened, for as long as they are heard of. Written
 * here, policy or not: who opened a connection decides it when there is one. LRU, of 16 times the
 * sets that one owner can have: a connection that is pushed out is judged by its ports. */
LRU_HASH(openers_by_owner, struct flow_set_key, struct flow_set, 16 * OWNER_SETS);

/* Datagrams that were let through while there is policy, and when last: answers may follow. Written
 * here. LRU, as openers_by_owner. */
LRU_HASH(datagrams_by_owner, struct flow_set_key, struct flow_set, 16 * OWNER_SETS);

/* Work space of policy/filter.h. Its programs run with softirqs off, so none is interrupted by
 * another on its CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct filter_state);
} filter_scratch SEC(".maps");

/* Nodes to which a connect went over the overlay because no probe has been answered yet, or to
 * which a direct one met with no answer or a refusal: underlay addresses, 4 bytes each. Written
 * here, read by the agent, which probes them. When it is full, what comes is lost: probes come
 * round without it. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536); /* bytes */
} suspects SEC(".maps");

/* When a node was last put there, in ns since boot. Written here. 16,384 nodes. */
HASH(suspected_by_node, __be32, __u64, 16384);

/* Limits of endpoints. Written by the agent, read by tc/limit.bpf.c. 16,384 endpoints a node. */
HASH(limit_by_endpoint, __u32, struct limit, 16384);

/* What endpoints' sockets have by their stack profiles. Written by the agent, read by
 * sock/stack_settings.h. 16,384 endpoints a node. */
HASH(stack_by_endpoint, __u32, struct stack_settings, 16384);

/* Connections that have a class of their own, by the first of their classes. Entries are made and
 * deleted by the agent, written by tc/limit.bpf.c. As many as minor numbers leave room for. */
HASH(slots_by_class, __u32, struct limit_slots, 128);

/* Services. Written by the agent, read by sock/service.h. 65,536 addresses and ports. */
HASH(service_by_addr, struct service_key, struct service, 65536);

/* Their backends. Written by the agent, read by sock/service.h. 524,288 of all services. */
HASH(backend_by_slot, struct backend_key, struct backend, 524288);

/* The same backends by what they are, for affinity: slots move. The value is not used. Written by
 * the agent, read by sock/service.h. */
HASH(member_by_backend, struct member_key, __u8, 524288);

/* Which backend an endpoint of this node had last, of services with affinity. Written and read by
 * sock/service.h. LRU: one that is pushed out is picked anew. */
LRU_HASH(affinity_by_client, struct affinity_key, struct affinity, 16384);

/* The address and port of the service that a connecting socket asked for. Written by
 * sock/service.h, read by sock/names.bpf.c. Not in the tag: few sockets have one. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct service_key);
} service_by_sock SEC(".maps");

/* What stands behind a crossing address, by connection as its packets to it show it. Written when
 * it sends its SYN, read for what is in TIME_WAIT: when one is pushed out, an end that waits is not
 * answered. */
LRU_HASH(crossed_by_wire, struct flow_key, struct address, 65536);

/* Whether an endpoint, by the lower bits of its id, ever had such a connection: 1. Written by
 * sock/connect_crossing.h and the agent, read by include/once.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, __u32);
} crossed_by_id SEC(".maps");

/* What was done at least once on this node, by enum once. Written and read by include/once.h, and
 * written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ONCE_MAX);
	__type(key, __u32);
	__type(value, __u32);
} happened_once SEC(".maps");

/* When the nodes' firewalls last let a connection from a container to an address and port pass, in
 * nanoseconds of CLOCK_MONOTONIC. Written and read by sock/firewall.h. When one is pushed out, the
 * next connection goes by the firewalls again. */
LRU_HASH(passed_firewall_at, struct firewall_key, __u64, 65536);

/* Probes of the firewalls that are under way, by what their SYNs show. Made and removed by the
 * agent; tc/firewall.h notes what becomes of them. The agent has no more at a time. */
HASH(firewall_probes, struct flow_key, struct firewall_probe, 4096);

/* What the firewalls forbid now, while connections that went past them are ended. Written and
 * emptied by the agent. */
HASH(forbidden_by_firewall, struct firewall_key, __u32, 65536);

/* The multicast groups that a program joined by the socket. Written and read by sock/multicast.h.
 * Accepted sockets have none. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct joined_groups);
} groups_by_sock SEC(".maps");

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Types and numbers shared with user space. bpf2go turns them into Go types in internal/plane/tcp/datapath, so
 * that there is one source. Addresses are four words in network byte order; IPv4 ones are v4-mapped
 * (::ffff:a.b.c.d), so that every map and tag has room for both families. */
#ifndef HEDDLE_ABI_H
#define HEDDLE_ABI_H

#include <linux/types.h>

/* How a connection travels; internal/model.Path has the meanings. */
enum heddle_path {
	PATH_NONE,
	PATH_DIRECT,
	PATH_LOCAL,
	PATH_LOOPBACK,
	PATH_OVERLAY,
	PATH_NODE,
	PATH_OUTSIDE,
	PATH_LISTEN,
};

/* Why something was counted; internal/model.Reasons has the meanings. */
enum heddle_reason {
	REASON_NONE,
	REASON_CONNECT_DIRECT,
	REASON_CONNECT_LOCAL,
	REASON_CONNECT_LOOPBACK,
	REASON_CONNECT_NODE,
	REASON_CONNECT_OUTSIDE,
	REASON_ACCEPT_DIRECT,
	REASON_ACCEPT_LOCAL,
	REASON_DELIVER_OVERLAY,
	REASON_DELIVER_NODE,
	REASON_RELAY_OPENED,
	REASON_FALLBACK_BOUND,
	REASON_FALLBACK_NODE_OVERLAY_ONLY,
	REASON_FALLBACK_PEER_PLAIN,
	REASON_FALLBACK_LOCAL_PLAIN,
	REASON_FALLBACK_RECONNECT,
	REASON_DROP_OPTION_MALFORMED,
	REASON_DROP_OPTION_VERSION,
	REASON_DROP_OPTION_NETWORK,
	REASON_DROP_UNKNOWN_NODE,
	REASON_DROP_SOURCE_NOT_OF_NODE,
	REASON_DROP_NO_ENDPOINT,
	REASON_DROP_FORGED_DIRECT,
	REASON_DROP_SPOOFED_SOURCE,
	REASON_DROP_RELAY_CONFLICT,
	REASON_REFUSE_BIND_FOREIGN,
	REASON_REFUSE_IPV6_UNREACHABLE,
	REASON_REFUSE_SOCKOPT,
	REASON_REFUSE_UNKNOWN_ENDPOINT,
	REASON_REFUSE_LISTEN_UNBOUND,
	REASON_DROP_FORGED_OVERLAY,
	REASON_FALLBACK_FASTOPEN,
	REASON_FALLBACK_OWN_PLAIN,
	REASON_DROP_FORGED_LOOPBACK,
	REASON_TIME_WAIT_ENDED,
	REASON_CUT_UNKNOWN_PEER,
	REASON_DROP_OVERLAY_STRANGER,
	REASON_DROP_OVERLAY_SOURCE,
	REASON_DROP_HIDDEN_TCP,
	REASON_DROP_NOT_IP,
	REASON_REFUSE_STORE,
	REASON_REFUSE_POLICY_REJECTED,
	REASON_REFUSE_POLICY_DROPPED,
	REASON_REFUSE_POLICY_LATE,
	REASON_CUT_POLICY,
	REASON_DROP_POLICY_REJECTED,
	REASON_DROP_POLICY_DROPPED,
	REASON_DROP_UNDECIDABLE,
	REASON_DROP_NOT_REMEMBERED,
	REASON_REFUSE_SOCKET_QUOTA,
	REASON_CUT_SOCKET_QUOTA,
	REASON_FALLBACK_UNPROVEN,
	REASON_FALLBACK_STRIPPED,
	REASON_FALLBACK_BLOCKED,
	REASON_PROBE_LISTENER,
	REASON_PROBE_ANSWERED,
	REASON_CUT_PATH_BLOCKED,
	REASON_REFUSE_NODE_PORT,
	REASON_DROP_FORGED_ERROR,
	REASON_REFUSE_PORT_QUOTA,
	REASON_CUT_PORT_QUOTA,
	REASON_REFUSE_NO_BACKEND,
	REASON_CUT_MIGRATED,
	REASON_REFUSE_DEVICE,
	REASON_MEND_STRAY_ENTRY,
	REASON_DROP_FORGED_CHECKSUM,
	REASON_FALLBACK_CROSSED,
	REASON_REFUSE_NO_STORAGE,
	REASON_CUT_RELAY_FORGOTTEN,
	REASON_REFUSE_LISTENER_GONE,
	REASON_DROP_SYN_WAITS,
	REASON_MAX,
};

/* What keeps hostile containers off; internal/model.Protections has the meanings. */
enum heddle_protection {
	PROTECT_BIND,
	PROTECT_SOURCE,
	PROTECT_DIRECT_PORTS,
	PROTECT_SOCKET_OPTIONS,
	PROTECT_NETNS,
	PROTECT_UNKNOWN_PEER,
	PROTECT_NODE_ADDRESS,
	PROTECT_IOCTLS,
	PROTECT_STORE,
	PROTECT_STORE_CERTIFICATES,
	PROTECT_OVERLAY,
	PROTECT_FRAMES,
	PROTECT_INCARNATION,
	PROTECT_SOCKET_QUOTA,
	PROTECT_SYN_SENDER,
	PROTECT_LISTENER,
	PROTECT_WILDCARD,
	PROTECT_LOOPBACK,
	PROTECT_USER,
	PROTECT_PORTS,
	PROTECT_ERRORS,
	PROTECT_PROBES,
	PROTECT_LATE,
	PROTECT_PORT_QUOTA,
	PROTECT_FLOW_MEMORY,
	PROTECT_LIMITS,
	PROTECT_MIGRATED,
	PROTECT_AGENT_OPTION,
	PROTECT_CRATES,
	PROTECT_HOOKS,
	PROTECT_CHECKSUM,
	PROTECT_OVERLAY_PORT,
	PROTECT_PROC_NET,
	PROTECT_MAX,
};

/* An address of either family, network byte order. */
struct address {
	__be32 word[4];
};

/* sock_tag.flags */
enum sock_tag_flags {
	TAG_BOUND = 1 << 0,    /* the program called bind() */
	TAG_WILD = 1 << 1,     /* ... with 0.0.0.0 or ::, or listened without */
	TAG_V6ONLY = 1 << 2,   /* the program set IPV6_V6ONLY; the kernel's own flag stays off */
	TAG_LOCAL = 1 << 3,    /* getsockname shows tag.local instead of the kernel's address */
	TAG_REMOTE = 1 << 4,   /* getpeername shows tag.remote and remote_port */
	TAG_ROUTED = 1 << 5,   /* SO_MARK is the overlay mark: routed as if it were no node socket */
	TAG_NAMES = 1 << 6,    /* connecting: the accepting side must be told the addresses shown here */
	TAG_ANY6 = 1 << 7,     /* bound to ::, so that IPv6 connections reach it */
	TAG_BOUND6 = 1 << 8,   /* bound to an IPv6 address, or accepted there: then IPV6_V6ONLY is set */
	TAG_ACCEPTED = 1 << 9, /* the peer opened the connection */
	TAG_DROPPED = 1 << 10, /* SO_MARK is the drop mark: policy lets nothing of the socket out */
	TAG_COUNTED = 1 << 11, /* counted in sockets_by_endpoint */
	TAG_PROBE =
	        1 << 12, /* of the agent, no endpoint's: a probe of a direct path, or the listener for them */
	TAG_SERVICE = 1 << 13, /* getpeername shows service_by_sock */
	TAG_UNPACED = 1 << 14, /* TCP_CONGESTION is "reno", and shown as "bbr" (unpaced.h) */
};

/* sock_tag.options: what the program set that the kernel must not do to a socket of the node. It is read
 * back as it was set. */
enum sock_tag_options {
	OPTION_TRANSPARENT = 1 << 0,   /* IP_TRANSPARENT; the kernel's own is always on */
	OPTION_RECVERR4 = 1 << 1,      /* IP_RECVERR */
	OPTION_RECVERR6 = 1 << 2,      /* IPV6_RECVERR */
	OPTION_PKTINFO = 1 << 3,       /* IP_PKTINFO */
	OPTION_SAVE_SYN = 1 << 4,      /* TCP_SAVE_SYN, a value of two bits; the kernel's own is never set */
	OPTION_FASTOPEN = 1 << 6,      /* TCP_FASTOPEN_CONNECT; the kernel does it as well */
	OPTION_MPTCP = 1 << 7,         /* the program asked for IPPROTO_MPTCP */
	OPTION_PKTINFO6 = 1 << 9,      /* IPV6_RECVPKTINFO */
	OPTION_PKTINFO6_OLD = 1 << 10, /* IPV6_2292PKTINFO */
	OPTION_TSONLY = 1 << 8,        /* SOF_TIMESTAMPING_OPT_TSONLY; the kernel's own is always on */
	OPTION_CONGESTION = 1 << 11,   /* the program set TCP_CONGESTION; the kernel does it as well */
	OPTION_ORIGDST6 = 1 << 12,     /* IPV6_RECVORIGDSTADDR */
};

/* What Heddle knows of one socket. Lives in socket-local storage: it goes where the socket goes
 * (dup, fork, SCM_RIGHTS) and accepted sockets start with a copy of their listener's. */
struct sock_tag {
	__u32 endpoint_id; /* of the endpoint whose process asked for the socket */
	__u32 flags;       /* enum sock_tag_flags */
	struct address local;
	struct address remote;
	__be16 local_port; /* shown instead of the kernel's if not 0 */
	__be16 remote_port;
	__u8 path;        /* enum heddle_path */
	__u8 reason;      /* enum heddle_reason: why not direct */
	__u8 claim;       /* enum claim_kind: the claim counted for this socket */
	__u8 claim_wish;  /* enum claim_kind: what bind() asks for */
	__u8 claim_flags; /* enum claim_flags */
	__u8 pad;
	__u16 claim_port;  /* host byte order */
	__u32 claim_uid;   /* of the process that bound it */
	__u32 mark;        /* SO_MARK as the program set it; the kernel's is the node's */
	__u32 ifindex;     /* device of the container to which the program bound the socket, or 0 */
	__u32 options;     /* enum sock_tag_options */
	__u32 priority;    /* SO_PRIORITY above 6, which the kernel's is not; 0: as the kernel's */
	__u32 incarnation; /* of that endpoint: ids are given anew */
};

/* What the agent demands of the thread that is to have a socket, when it asks for that to be counted (sockets.bpf.c). */
enum admission_flags {
	ADMIT_OWNER = 1 << 0, /* uid and gid are its effective ones */
};

struct admission {
	__u32 thread; /* its number in the initial PID namespace; 0: nothing is demanded */
	__u32 netns;  /* inode of the network namespace that it is in; 0: any */
	__u32 uid;    /* as the initial user namespace numbers them */
	__u32 gid;
	__u32 flags; /* enum admission_flags */
};

/* Which addresses of its container a bound socket holds a port of. Those at the same node address need no
 * claim against each other: the kernel knows. */
enum claim_kind {
	CLAIM_NONE,      /* not bound, or an address that overlaps with no other node address */
	CLAIM_ANY4,      /* 0.0.0.0 */
	CLAIM_ANY,       /* ::, IPv4 included */
	CLAIM_ANY6,      /* :: with IPV6_V6ONLY */
	CLAIM_LOOPBACK4, /* in 127.0.0.0/8 */
	CLAIM_LOOPBACK6, /* ::1 */
	CLAIM_OWN6,      /* the IPv6 overlay address */
	CLAIM_KINDS = 8,
};

enum claim_flags {
	CLAIM_REUSEADDR = 1 << 0, /* SO_REUSEADDR is set */
	CLAIM_REUSEPORT = 1 << 1, /* SO_REUSEPORT is set */
	CLAIM_LISTENS = 1 << 2,   /* shares with no other address, whatever SO_REUSEADDR says */
	CLAIM_PORT_ZERO = 1 << 3, /* the kernel chose the port */
};

/* A port of a container. */
struct port_key {
	__u32 endpoint_id;
	__u16 port; /* host byte order */
	__u16 pad;
};

/* The sockets of one container bound to one port, by what they hold. */
struct port_claims {
	struct {
		__u32 sockets;
		__u32 exclusive; /* those that SO_REUSEADDR does not open to others */
		__u32 alone;     /* those without SO_REUSEPORT */
	} by_kind[CLAIM_KINDS];
	__u32 uid; /* of the last one */
};

#define GROUPS_MAX 20 /* as the kernel's igmp_max_memberships */

/* A multicast group that a program joined by a TCP socket. */
struct joined_group {
	struct address addr;
	__u32 ifindex; /* of the container's device; 0: none */
};

struct joined_groups {
	struct joined_group group[GROUPS_MAX];
};

/* The port of the node that a socket keeps from everybody's connect(). Lives in socket-local storage; accepted sockets
 * start with a copy of their listener's. */
struct held_port {
	__u64 group; /* key in group_by_listener; 0: it holds the port by itself */
	__u32 port;  /* host byte order; 0: it holds none */
	__u32 flags; /* enum held_flags */
};

/* held_port.flags */
enum held_flags {
	HELD_CLOSED = 1 << 0,   /* no connection holds it: never connected, or in state CLOSE again */
	HELD_RELEASED = 1 << 1, /* no program holds it */
	HELD_ACCEPTED = 1 << 2, /* of an accepted connection: gone with it */
	HELD_WAITS = 1 << 3,    /* a connection of it may be in TIME_WAIT */
	HELD_CROSSED = 1 << 4,  /* both ends connected at once */
	HELD_SURPLUS = 1 << 5,  /* of a listener above the limit, which the agent ends */
};

/* A listener's port, which its accepted connections keep when it is gone. */
struct port_group {
	__u32 sockets; /* it and they */
	__u32 waits;   /* not 0: one of them may be in TIME_WAIT */
};

#define PORT_SLOT_SECONDS 5
#define PORT_SLOTS        16 /* more than the 60 seconds of TIME_WAIT */

/* The node's ports that an endpoint holds. */
struct port_account {
	struct bpf_spin_lock lock;
	__u32 held;
	struct {
		__u32 when; /* in units of PORT_SLOT_SECONDS since boot */
		__u32 ports;
	} waiting[PORT_SLOTS]; /* given up while a connection may be in TIME_WAIT, which holds them, too */
};

#define NODE_PORTS_MAX 8192 /* an eighth of all ports */

/* A port that the node keeps for its own connects, and sockets of containers hold all the same. */
struct node_port {
	struct bpf_spin_lock lock;
	__u32 sockets; /* listeners with what they accepted are one */
	__u32 waits;   /* not 0: since one of them had it, a connection may be in TIME_WAIT */
};

/* endpoint.flags */
enum endpoint_flags {
	ENDPOINT_INTERCEPTED = 1 << 0,
	ENDPOINT_CARRIED = 1 << 1, /* device and address are another network's */
};

/* One endpoint of this node. */
struct endpoint {
	struct address addr4; /* its IPv4 overlay address, v4-mapped */
	__u32 id;
	__u32 flags;             /* enum endpoint_flags */
	__u32 ifindex;           /* node side of its veth */
	__u32 netns;             /* inode of the container's network namespace */
	__u32 container_ifindex; /* container side of its veth */
	char device[16];         /* its name there */
	__s32 nsid;              /* of that namespace as the node names it; -1: none */
	__s32 node_nsid;         /* of the node's as the container's names it; -1: none */
	__u32 incarnation;       /* tells it from others that have had its id */
	__be16 resolver_port;    /* of Docker's DNS over TCP at 127.0.0.11 in that namespace; 0: none */
	__u16 unused;
};

/* route.flags */
enum route_flags {
	ROUTE_SELF = 1 << 0,      /* the prefix of this node's own endpoints */
	ROUTE_NODE_ADDR = 1 << 1, /* an address of this node itself */
	ROUTE_DIRECT = 1 << 2,    /* the node takes direct connections */
	ROUTE_PLAIN = 1 << 3, /* one endpoint that is not intercepted, or addresses of a carried network */
	/* Why the overlay carries what could be direct: what probes of the path say. */
	ROUTE_UNPROVEN = 1 << 4, /* none has been answered yet */
	ROUTE_STRIPPED = 1 << 5, /* SYNs arrive without the option */
	ROUTE_BLOCKED = 1 << 6,  /* SYNs or their answers do not arrive */
	ROUTE_NOT_PROVEN = ROUTE_UNPROVEN | ROUTE_STRIPPED | ROUTE_BLOCKED,
	ROUTE_CARRIED = 1 << 7, /* another network carries what is not direct: it comes by any device */
};

struct route_key {
	__u32 prefixlen; /* bits of addr that count: 96 + n for an IPv4 prefix of n bits */
	struct address addr;
};

/* Where an overlay prefix lives. */
struct route {
	struct address underlay; /* of its node */
	__u32 flags;             /* enum route_flags */
	__u16 port_first;        /* the node's direct ports, host byte order */
	__u16 port_last;
};

/* A connection as its packets show it, remote end first. */
struct flow_key {
	__be32 saddr; /* of IPv6 packets: what the overlay addresses embed */
	__be32 daddr;
	__be16 sport;
	__be16 dport;
	__u32 ipv6; /* 1 if the packets are IPv6 */
};

/* flow.kind */
enum flow_kind {
	FLOW_PLAIN,      /* neither of what follows */
	FLOW_RELAY,      /* rewritten and handed to the endpoint's veth */
	FLOW_CONTAINERS, /* between containers' own stacks, past a node socket in TIME_WAIT */
	FLOW_NAMES,      /* both ends are one container's: src and dst are what its programs see */
};

/* What the SYN of a direct connection asked for. Kept until it is accepted, because a SYN cookie
 * loses the option, and for the life of a relayed connection. */
struct flow {
	__be32 src; /* overlay addresses */
	__be32 dst;
	__be16 dst_port;
	__u8 kind;         /* enum flow_kind */
	__u8 ipv6;         /* 1 if src and dst stand for their IPv6 forms */
	__u32 ifindex;     /* of that veth, if relayed */
	__be16 relay_port; /* source port there, if relayed */
	__u16 ended;       /* enum flow_ended, if relayed */
};

/* flow.ended: who said by a FIN that a relayed connection ends; a RST says it for both. */
enum flow_ended {
	ENDED_BY_SENDER = 1 << 0,
	ENDED_BY_ENDPOINT = 1 << 1,
	ENDED = ENDED_BY_SENDER | ENDED_BY_ENDPOINT,
};

/* What policy says of a connection or datagram; internal/model.Verdict has the meanings. The greater forbids more. */
enum heddle_verdict {
	VERDICT_ALLOW,
	VERDICT_REJECT,
	VERDICT_DROP,
};

/* policy_state. Every table but that of ports is there twice, so that a change comes into force at once: programs
 * read the side in force, the agent writes the other one. */
enum policy_flags {
	POLICY_ACTIVE = 1 << 0, /* there are rules: without it nothing else is looked up */
	POLICY_SIDE = 1 << 1,   /* the side in force: 0 or 1 */
};

struct class_key {
	__u32 side;
	struct address addr;
};

struct class_prefix_key {
	__u32 prefixlen; /* of side and addr: 128 + n for an IPv4 prefix of n bits */
	__u32 side;      /* 2 more for IPv6: ::/0 holds no v4-mapped addresses */
	struct address addr;
};

/* The class of an address, and what holds where no pair says otherwise. */
struct class_info {
	__u32 class_id;
	__u8 egress; /* enum heddle_verdict */
	__u8 ingress;
	__u16 pad;
};

/* The classes of the two ends of a connection, the one that opens it first. */
struct pair_key {
	__u32 from;
	__u32 to;
	__u32 side;
};

struct pair_verdict {
	__u32 ports;   /* the set of port ranges that differ; 0: none */
	__u32 verdict; /* enum heddle_verdict: for all others */
};

/* Ranges of ports are cut into prefixes. A set never changes while a pair has it, so sets have no sides. */
struct port_range_key {
	__u32 prefixlen; /* of what follows: 48 + n for n bits of the port */
	__u32 ports;     /* the set */
	__u8 protocol;   /* as model.Protocol: ICMPv6 is ICMP */
	__u8 pad;
	__be16 port;
};

/* Who talks to whom, as the packets of the end that began show it. */
struct flow_id {
	struct address from;
	struct address to;
	__be16 sport; /* of an ICMP echo: its identifier, in both */
	__be16 dport;
	__u8 protocol; /* as model.Protocol */
	__u8 kind;     /* 1: not a flow, but the fragments of a packet; the ports are its identification */
	__u16 pad;
};

/* Remembered flows are kept by who began them, so that nobody's flood pushes out those of others. Each owner has
 * OWNER_SETS sets; a flow has its place in one of them. */
#define OWNER_SETS 4096
#define SET_FLOWS  4

struct flow_set_key {
	__be32 owner; /* the overlay address that the flow is from; 0: all hosts and nodes outside */
	__u32 set;
};

struct flow_set {
	struct {
		__u64 id;    /* a digest of struct flow_id; 0: nothing */
		__u32 value; /* what is remembered of it */
		__u32 seen;  /* when it was last heard of, in units of 2^30 ns since boot */
	} flow[SET_FLOWS];
};

/* Flows of flow_by_wire by who began them: each owner has WIRE_SETS sets of SET_WIRES of its keys. */
#define WIRE_SETS 1024
#define SET_WIRES 8

struct wire_slot {
	__u32 id;   /* a digest of the key; WIRE_FREE, WIRE_BUSY */
	__u32 seen; /* when it was put here, in units of 2^30 ns since boot */
	struct flow_key key;
};

struct wire_set {
	struct wire_slot wire[SET_WIRES];
};

enum fragment {
	FRAGMENT_NONE,
	FRAGMENT_FIRST,
	FRAGMENT_LATER,
};

/* Where filter.bpf.c works: its callers' stacks are full. */
struct filter_state {
	struct flow_id flow;
	struct flow_id other;
	__u32 offset;   /* of the transport header in the frame */
	__u32 fragment; /* enum fragment */
	__be32 ident;
	__u8 next; /* what the last header said comes next */
	__u8 pad[3];
};

/* An address and a TCP port that stand for backends. */
struct service_key {
	struct address addr;
	__be16 port;
	__u16 pad;
};

struct service {
	__u32 id;       /* names its backends */
	__u32 backends; /* slots 0 to backends - 1; 0: connects are refused */
	__u32 affinity_s; /* for how long after its last connect a client keeps its backend; 0: each connect picks anew */
};

struct backend_key {
	__u32 service_id;
	__u32 slot;
};

/* Of the service's family. */
struct backend {
	struct address addr;
	__be16 port;
	__u16 pad;
};

/* One of the backends that a service has now. */
struct member_key {
	__u32 service_id;
	struct backend backend;
};

struct affinity_key {
	__u32 service_id;
	__u32 endpoint_id; /* of the client */
};

struct affinity {
	struct backend backend;
	__u32 last_s; /* when the client last connected, on the clock that starts at boot */
};

/* The SYN option of docs/protocols/syn-option.md, as on the wire. */
struct syn_option {
	__u8 kind;
	__u8 length;
	__be16 exid;
	__be16 version_network; /* version in the upper 4 bits, network id in the lower 12 */
	__be16 dst_port;
	__be32 dst;
	__be32 src;
};

/* One record of the connection listing (list.bpf.c). */
struct connection_record {
	struct sock_tag tag;
	struct address node_local; /* as the kernel has it */
	struct address node_remote;
	__be16 node_local_port;
	__be16 node_remote_port;
	__u8 state;  /* the kernel's TCP state */
	__u8 family; /* AF_INET or AF_INET6 */
	__u16 pad;
	__u64 bytes_sent; /* acknowledged by the peer */
	__u64 bytes_received;
	__u64 cookie;
	__u32 receive_queue; /* bytes not read yet; of a listener: connections not accepted yet */
	__u32 send_queue;    /* bytes not acknowledged yet; of a listener: how many connections may wait */
	__u32 retransmits;
	__u32 pad2;
};

/* A descriptor that holds a socket of an endpoint in a process whose ioctls nobody traps (holders.bpf.c). */
struct holder_record {
	__u32 endpoint_id;
	__u32 pid;
};

/* What an endpoint's sockets did. Bytes and retransmits are those of connections that have ended. */
struct account {
	__u64 opened;    /* connections made by connect() */
	__u64 accepted;  /* connections taken by a listener */
	__u64 refused;   /* connects that ended in ECONNREFUSED */
	__u64 timed_out; /* connects that ended in ETIMEDOUT */
	__u64 failed;    /* connects that ended otherwise: unreachable, given up by the program */
	__u64 closed;    /* of those opened and accepted */
	__u64 broken;    /* of those closed, by an error: RST, timeout */
	__u64 bytes_sent;
	__u64 bytes_received;
	__u64 retransmits;
};

/* A block of classes of one endpoint and direction: of what is no connection, of one connection each, and, last, of
 * all of these together. */
#define LIMIT_SLOTS 256

/* A cap in one direction. Classes are minor numbers in the shaping device's HTB qdisc. */
struct limit_side {
	__u64 rate;        /* the tighter of its caps, bytes a second; 0: none */
	__u32 class;       /* of what is no connection, or of everything; 0: no cap */
	__u32 connections; /* first of LIMIT_SLOTS classes; 0: no cap a connection */
};

/* limit.flags */
enum limit_flags {
	LIMIT_DSCP = 1 << 0,     /* dscp is written into what the endpoint sends */
	LIMIT_PRIORITY = 1 << 1, /* so is priority into skb->priority */
};

/* What the operator allows one endpoint. */
struct limit {
	struct limit_side egress; /* what it sends */
	struct limit_side ingress;
	__u32 priority; /* of the kernel's TC_PRIO_* */
	__u32 flags;    /* enum limit_flags */
	__u32 dscp;     /* 0..63 */
	__u32 pad;
};

/* Which connection has which class. */
struct limit_slots {
	__u64 owner[LIMIT_SLOTS];   /* addresses and ports, mixed; 0: nobody */
	__u64 seen_ns[LIMIT_SLOTS]; /* its last packet, on the monotonic clock */
};

#endif

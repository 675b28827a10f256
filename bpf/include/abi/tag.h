/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The tag of a node socket, and how the agent asks for a socket to have one, and to be counted. */
#ifndef HEDDLE_ABI_TAG_H
#define HEDDLE_ABI_TAG_H

#include <linux/types.h>
#include "include/abi/address.h"

/* sock_tag.flags */
enum sock_tag_flags {
	TAG_BOUND = 1 << 0,  /* the program called bind() */
	TAG_WILD = 1 << 1,   /* ... with 0.0.0.0 or ::, or listened without */
	TAG_V6ONLY = 1 << 2, /* the program set IPV6_V6ONLY; the kernel's own flag stays off */
	TAG_LOCAL = 1 << 3,  /* getsockname shows tag.local instead of the kernel's address */
	TAG_REMOTE = 1 << 4, /* getpeername shows tag.remote and remote_port */
	/* SO_MARK is the overlay mark: routed as if it were no node socket */
	TAG_ROUTED = 1 << 5,
	/* connecting: the accepting side must be told the addresses shown here */
	TAG_NAMES = 1 << 6,
	TAG_ANY6 = 1 << 7, /* bound to ::, so that IPv6 connections reach it */
	/* bound to an IPv6 address, or accepted there: then IPV6_V6ONLY is set */
	TAG_BOUND6 = 1 << 8,
	TAG_ACCEPTED = 1 << 9, /* the peer opened the connection */
	TAG_DROPPED = 1 << 10, /* SO_MARK is the drop mark: policy lets nothing of the socket out */
	TAG_COUNTED = 1 << 11, /* counted in sockets_by_endpoint */
	TAG_PROBE =
	        /* of the agent, no endpoint's: a probe of a direct path, or the listener for
	         * them */
	1 << 12,
	TAG_SERVICE = 1 << 13, /* getpeername shows service_by_sock */
	/* TCP_CONGESTION is "reno", and shown as "bbr" (sock/congestion.h) */
	TAG_RENO_FOR_BBR = 1 << 14,
	/* of the verbs plane, in the endpoint's name: what is told of it is told of RDMA */
	TAG_RDMA = 1 << 15,
	/* its opening is to be told yet: claim_uid and claim_port, which only a bound socket has, say
	 * when it was (sock/untold.h) */
	TAG_UNTOLD = 1 << 16,
};

/* sock_tag.options: what the program set that the kernel must not do to a socket of the node. It is
 * read back as it was set. */
enum sock_tag_options {
	OPTION_TRANSPARENT = 1 << 0, /* IP_TRANSPARENT; the kernel's own is always on */
	OPTION_RECVERR4 = 1 << 1,    /* IP_RECVERR */
	OPTION_RECVERR6 = 1 << 2,    /* IPV6_RECVERR */
	OPTION_PKTINFO = 1 << 3,     /* IP_PKTINFO */
	/* TCP_SAVE_SYN, a value of two bits; the kernel's own is never set */
	OPTION_SAVE_SYN = 1 << 4,
	OPTION_FASTOPEN = 1 << 6,      /* TCP_FASTOPEN_CONNECT; the kernel does it as well */
	OPTION_MPTCP = 1 << 7,         /* the program asked for IPPROTO_MPTCP */
	OPTION_PKTINFO6 = 1 << 9,      /* IPV6_RECVPKTINFO */
	OPTION_PKTINFO6_OLD = 1 << 10, /* IPV6_2292PKTINFO */
	/* SOF_TIMESTAMPING_OPT_TSONLY; the kernel's own is always on */
	OPTION_TSONLY = 1 << 8,
	/* the program set TCP_CONGESTION; the kernel does it as well */
	OPTION_CONGESTION = 1 << 11,
	OPTION_ORIGDST6 = 1 << 12, /* IPV6_RECVORIGDSTADDR */
	/* bits 13 to 19: settings that a stack profile may have and that the program has set itself;
	 * bits 20 to 30: those that one has set (include/stack_settings.h) */
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
	__u8 claim;       /* enum portbind_kind: the bind reservation counted for this socket */
	__u8 claim_wish;  /* enum portbind_kind: what bind() asks for */
	__u8 claim_flags; /* enum portbind_flags */
	__u8 pad;
	__u16 claim_port;  /* host byte order */
	__u32 claim_uid;   /* of the process that bound it */
	__u32 mark;        /* SO_MARK as the program set it; the kernel's is the node's */
	__u32 ifindex;     /* device of the container to which the program bound the socket, or 0 */
	__u32 options;     /* enum sock_tag_options */
	__u32 priority;    /* SO_PRIORITY above 6, which the kernel's is not; 0: as the kernel's */
	__u32 incarnation; /* of that endpoint: ids are given anew */
};

/* What the agent demands of the thread that is to have a socket, when it asks for that to be
 * counted (sock/socket_quota.h). */
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

/* The agent's request to make a new socket one of an endpoint's (sock/tagging.h). */
struct tagging {
	__u64 key; /* config_agent_key: what only the agent knows */
	__u32 endpoint_id;
	__u32 incarnation;
	__u32 options; /* enum sock_tag_options */
	__u32 pad;
};

#endif

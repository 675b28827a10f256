/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The few kernel structs that the programs read, relocated at load time (CO-RE). Each has no more
 * than the members that are read. */
#ifndef HEDDLE_KERNEL_TYPES_H
#define HEDDLE_KERNEL_TYPES_H

#include "include/kernel.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

#define UID_EXTENTS 5 /* of a map; one with more has them elsewhere */

struct sk_buff {
	__u8 ip_summed : 2;
	__u16 csum_start; /* from its buffer's beginning, as mac_header */
	__u16 csum_offset;
	__u16 mac_header;
};

struct net;

struct sock_common {
	struct {
		struct net *net;
	} skc_net;
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	int skc_bound_dev_if;
	volatile unsigned char skc_state;
	struct {
		union {
			__be32 u6_addr32[4];
		} in6_u;
	} skc_v6_daddr, skc_v6_rcv_saddr;
	unsigned long skc_flags; /* bits of enum sock_flags */
	__u32 skc_tw_rcv_nxt;    /* of one in TIME_WAIT: the sequence number it expects */
};

struct inet_timewait_sock {
	struct sock_common __tw_common;
};

struct tcp_timewait_sock {
	struct inet_timewait_sock tw_sk;
	__u32 tw_ts_recent;     /* the latest timestamp of the other end */
	int tw_ts_recent_stamp; /* 0: the connection had no timestamps */
};

struct sock {
	int sk_err;
	/* of a listener: connections that wait for accept(), and how many may */
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
	void *sk_socket; /* NULL: no program has it */
	struct {
		__u32 val;
	} sk_uid; /* of who holds it */
	struct {
		int owned; /* a system call has the lock */
	} sk_lock;
};

struct inode {
	unsigned long i_ino;
};

/* What a struct socket is the first part of. */
struct socket_alloc {
	struct inode vfs_inode;
};

struct inet_connection_sock {
	__u8 icsk_retransmits; /* of what is not acknowledged now */
};

struct inet_sock {
	/* of an IPv4 connection that is just accepted: the device by which its last ACK came */
	int mc_index;
};

struct tcp_options_received {
	__u16 user_mss; /* what the program set by TCP_MAXSEG, or 0 */
};

struct tcp_sock {
	struct tcp_options_received rx_opt;
	__u32 rcv_nxt;
	__u32 copied_seq; /* up to here the program has read */
	__u32 write_seq;  /* up to here it has written */
	__u32 snd_una;
	__u32 total_retrans; /* segments */
	__u32 srtt_us;       /* smoothed round trip time, times 8 */
	__u64 bytes_acked;
	__u64 bytes_received;
	__u64 bytes_sent; /* payload, retransmissions included */
	__u64 bytes_retrans;
	void *fastopen_req; /* set while MSG_FASTOPEN connects */
};

struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
	__u64 seq_num; /* how many came before */
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

struct bpf_map;
struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	struct sock *sk;
	void *value;
};

struct socket {
	struct sock *sk;
};

struct task_struct;
struct file;
struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

typedef struct {
	__u32 val;
} kuid_t;

typedef struct {
	__u32 val;
} kgid_t;

typedef struct {
	__u64 val;
} kernel_cap_t;

struct uid_gid_extent {
	__u32 first; /* inside */
	__u32 lower_first;
	__u32 count;
};

struct uid_gid_map {
	__u32 nr_extents;
	struct uid_gid_extent extent[UID_EXTENTS];
};

struct user_namespace {
	struct uid_gid_map uid_map;
	struct user_namespace *parent;
	int level;
	kuid_t owner;
};

struct cred {
	kuid_t euid;
	kgid_t egid;
	kernel_cap_t cap_effective;
	struct user_namespace *user_ns;
};

struct ns_common {
	unsigned int inum;
};

struct netns_ipv4 {
	int sysctl_ip_prot_sock;
};

struct net {
	__u64 net_cookie;
	struct user_namespace *user_ns;
	struct ns_common ns;
	struct netns_ipv4 ipv4;
};

struct nsproxy {
	struct net *net_ns;
};

struct notification;

struct seccomp_filter {
	struct seccomp_filter *prev;
	struct notification *notif;
};

struct seccomp {
	struct seccomp_filter *filter;
};

struct task_struct {
	const struct cred *cred;
	struct nsproxy *nsproxy;
	struct seccomp seccomp;
	int tgid;
};

#pragma clang attribute pop

#endif

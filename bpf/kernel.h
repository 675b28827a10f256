/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the UAPI headers lack: constants that live in glibc's headers, and the few kernel structs that
 * the iterator reads, relocated at load time (CO-RE). */
#ifndef HEDDLE_KERNEL_H
#define HEDDLE_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>

#define bool _Bool
#define true 1
#define false 0
#define NULL                 ((void *)0)
#define WRITE_ONCE(x, value) (*(volatile typeof(x) *)&(x) = (value))
#define barrier()            asm volatile("" ::: "memory")

#define AF_UNSPEC      0
#define AF_INET        2
#define AF_INET6       10
#define ETH_P_IP       0x0800
#define ETH_P_IPV6     0x86dd
#define ETH_HLEN       14
#define IPPROTO_ICMP_  1
#define IPPROTO_TCP_   6
#define IPPROTO_UDP_   17
#define SOL_IP_        0
#define SOL_SOCKET_    1
#define SOL_TCP_       6
#define SOL_IPV6_      41
#define IPPROTO_MPTCP_ 262
#define EPERM_         1
#define ENOENT_        2
#define EACCES_        13
#define ENODEV_        19
#define EINVAL_        22
#define ENFILE_        23
#define ENOPROTOOPT_   92
#define EOPNOTSUPP_    95
#define EAFNOSUPPORT_  97
#define EADDRINUSE_    98
#define EADDRNOTAVAIL_ 99
#define ENETDOWN_      100
#define ENETUNREACH_   101
#define ENOBUFS_       105
#define ETIMEDOUT_     110
#define ECONNREFUSED_  111
#define EHOSTUNREACH_  113
/* What the kernel keeps as the IPv4 address of a socket with an IPv6 one that is not v4-mapped. */
#define LOOPBACK4_IPV6 bpf_htonl(0x7f000006)
#define TC_ACT_UNSPEC  -1
#define TC_ACT_OK      0
#define TC_ACT_SHOT    2

struct sockaddr_in_ {
	__u16 family;
	__be16 port;
	__be32 addr;
	__u8 zero[8];
};

struct sockaddr_in6_ {
	__u16 family;
	__be16 port;
	__be32 flowinfo;
	__be32 addr[4];
	__u32 scope_id;
};

struct iphdr_ {
	__u8 version_ihl;
	__u8 tos;
	__be16 tot_len;
	__be16 id;
	__be16 frag_off;
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	__be32 saddr;
	__be32 daddr;
};

struct ip6hdr_ {
	__be32 version_class_flow;
	__be16 payload_len;
	__u8 next_header;
	__u8 hop_limit;
	__be32 saddr[4];
	__be32 daddr[4];
};

struct tcphdr_ {
	__be16 source;
	__be16 dest;
	__be32 seq;
	__be32 ack_seq;
	__u8 doff_res; /* data offset in the upper 4 bits */
	__u8 flags;
	__be16 window;
	__u16 check;
	__be16 urg;
};

struct icmphdr_ {
	__u8 type;
	__u8 code;
	__u16 check;
	__be16 id; /* of an echo */
	__be16 seq;
};

#define LOOPBACK_IFINDEX 1

#define CHECKSUM_PARTIAL_ 3 /* sk_buff.ip_summed: the kernel will write the checksum when the packet leaves */

#define SOCK_DONE_ 1 /* bit of skc_flags: the peer's FIN has come */

#define TCP_FLAG_FIN_ 0x01
#define TCP_FLAG_SYN_ 0x02
#define TCP_FLAG_RST_ 0x04
#define TCP_FLAG_ACK_ 0x10

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

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
	__u32 sk_ack_backlog; /* of a listener: connections that wait for accept(), and how many may */
	__u32 sk_max_ack_backlog;
	void *sk_socket; /* NULL: no program has it */
	struct {
		__u32 val;
	} sk_uid; /* of who holds it */
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
	int mc_index; /* of an IPv4 connection that is just accepted: the device by which its last ACK came */
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

#pragma clang attribute pop

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the UAPI headers lack: constants that live in glibc's headers. */
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

#define AF_UNSPEC        0
#define AF_INET          2
#define AF_INET6         10
#define ETH_P_IP         0x0800
#define ETH_P_IPV6       0x86dd
#define ETH_HLEN         14
#define IPPROTO_ICMP_    1
#define IPPROTO_TCP_     6
#define IPPROTO_UDP_     17
#define SOL_IP_          0
#define SOL_SOCKET_      1
#define SOL_TCP_         6
#define SOL_IPV6_        41
#define IPPROTO_MPTCP_   262
#define EPERM_           1
#define ENOENT_          2
#define EACCES_          13
#define ENODEV_          19
#define EINVAL_          22
#define ENFILE_          23
#define ENOPROTOOPT_     92
#define EPROTONOSUPPORT_ 93
#define EOPNOTSUPP_      95
#define EAFNOSUPPORT_    97
#define EADDRINUSE_      98
#define EADDRNOTAVAIL_   99
#define ENETDOWN_        100
#define ENETUNREACH_     101
#define ENOBUFS_         105
#define ETIMEDOUT_       110
#define ECONNRESET_      104
#define ECONNREFUSED_    111
#define EHOSTUNREACH_    113
/* What the kernel keeps as the IPv4 address of a socket with an IPv6 one that is not v4-mapped. */
#define LOOPBACK4_IPV6   bpf_htonl(0x7f000006)
#define TC_ACT_UNSPEC    -1
#define TC_ACT_OK        0
#define TC_ACT_SHOT      2

#define LOOPBACK_IFINDEX 1 /* of lo in every namespace */

#define CHECKSUM_PARTIAL_ 3 /* sk_buff.ip_summed: the kernel will write the checksum when the packet leaves */

#define SOCK_DONE_ 1 /* bit of skc_flags: the peer's FIN has come */

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Headers of packets, and addresses of sockets, as on the wire. */
#ifndef HEDDLE_HEADERS_H
#define HEDDLE_HEADERS_H

#include "include/kernel.h"

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

#define TCP_FLAG_FIN_ 0x01
#define TCP_FLAG_SYN_ 0x02
#define TCP_FLAG_RST_ 0x04
#define TCP_FLAG_ACK_ 0x10

#define PACKET_HOST_      0 /* skb->pkt_type: to this host's hardware address */
#define PACKET_MULTICAST_ 2 /* to many stations */
#define ETH_P_ARP         0x0806
#define ETH_P_8021Q       0x8100
#define ETH_P_8021AD      0x88a8
#define IP_MF_            0x2000
#define IP_OFFSET_        0x1fff
#define ICMP_CHECK_OFFSET 2
#define IPPROTO_ICMPV6_   58
#define ICMPV6_FIRST_INFO 128 /* below are errors */
#define NEXTHDR_HOP_      0
#define NEXTHDR_ROUTING_  43
#define NEXTHDR_FRAGMENT_ 44
#define NEXTHDR_AUTH_     51
#define NEXTHDR_DEST_     60

struct arp_ {
	__be16 hardware, protocol;
	__u8 hardware_length, protocol_length;
	__be16 operation;
	__u8 sender_hardware[6];
	__u8 sender[4];
};

struct udphdr_ {
	__be16 source, dest, length;
	__u16 check;
};

struct vxlanhdr_ {
	__be32 flags;
	__be32 vni; /* in the upper 24 bits */
};

#endif

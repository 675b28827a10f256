/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Settings of this node, written once before the programs are loaded. Constants to the verifier, so
 * what a node does not use costs nothing. */
#ifndef HEDDLE_CONFIG_H
#define HEDDLE_CONFIG_H

#include "include/kernel.h"

#define CONFIG_POOLS 16

/* This node's underlay address. */
const volatile __be32 config_underlay = 0;
/* The network's IPv6 prefix of 96 bits; an overlay address's IPv6 form is it and the IPv4 address.
 * All 0 on a network or node without IPv6. */
const volatile __be32 config_prefix6[3] = {0};
/* The network's IPv4 overlay prefixes, as addresses and masks; the rest is 0. */
const volatile __be32 config_pool[CONFIG_POOLS] = {0};
const volatile __be32 config_pool_mask[CONFIG_POOLS] = {0};
/* Network id, 1..4095, host byte order. */
const volatile __u16 config_network_id = 0;
/* This node's direct port range, host byte order, inclusive. */
const volatile __u16 config_port_first = 0;
const volatile __u16 config_port_last = 0;
/* SO_MARK and skb mark that make the node treat overlay addresses of intercepted endpoints as
 * local. */
const volatile __u32 config_mark = 0;
/* SO_MARK of a socket that must reach an address of this node's prefix through its veth instead. */
const volatile __u32 config_overlay_mark = 0;
/* SO_MARK of a socket whose packets nftables drops: its connect is one that policy says nothing
 * to. */
const volatile __u32 config_drop_mark = 0;
/* skb mark of a packet that nftables answers by a RST or an ICMP error: policy rejects it. */
const volatile __u32 config_reject_mark = 0;
/* skb mark of a packet to a service, of which policy is asked about its backends; with the lowest
 * bit, all of them may be sent to (policy/service.h). */
const volatile __u32 config_service_mark = 0;
/* How many sockets an endpoint may have. */
const volatile __u64 config_endpoint_sockets = 0;
/* Ports that containers' sockets do not get, host byte order, inclusive. First 0: none. */
const volatile __u16 config_node_port_first = 0;
const volatile __u16 config_node_port_last = 0;
/* How many of the node's ephemeral ports an endpoint may hold, and which these are: host byte
 * order, inclusive. */
const volatile __u32 config_endpoint_ports = 0;
const volatile __u16 config_ephemeral_first = 0;
const volatile __u16 config_ephemeral_last = 0;
/* This node's firewall sees connections of its containers, and for how many nanoseconds what it let
 * pass may go past it (sock/firewall.h). 0: it does not. */
const volatile __u64 config_firewall_ns = 0;
/* UDP port of the overlay, host byte order. */
const volatile __u16 config_vxlan_port = 0;
/* VXLAN network identifier of the overlay, host byte order. */
const volatile __u32 config_vni = 0;
/* Device whose ingress hands packets of the node's own processes to node sockets, and the
 * underlay's. */
const volatile __u32 config_divert_ifindex = 0;
const volatile __u32 config_underlay_ifindex = 0;
/* The overlay's device, and its hardware address. */
const volatile __u32 config_overlay_ifindex = 0;
const volatile __u8 config_vtep[6] = {0};
/* The underlay's device has no Ethernet header: what comes and leaves there begins with IP. */
const volatile __u32 config_underlay_raw = 0;
/* config_underlay is an inner address, which nothing has on the network that joins the nodes: what
 * is for it comes by config_underlay_ifindex only. */
const volatile __u32 config_underlay_inner = 0;
/* On an IPv6 underlay: this node's address there, and its device. All 0 on another. */
const volatile __be32 config_outer[4] = {0};
const volatile __u32 config_outer_ifindex = 0;
/* This kernel assigns no packet to a listener that has SO_REUSEPORT (before Linux 6.6): direct
 * connections reach those by the relay. */
const volatile __u32 config_relay_groups = 0;
/* The agent's process, in the initial PID namespace, if programs at socket options may look for
 * threads (bpf_task_from_pid); 0: they may not. */
const volatile __u32 config_agent = 0;
/* A number of this agent's choice, by which programs know its requests to tag sockets: a process
 * that came to have the number of an agent that has ended lacks it. */
const volatile __u64 config_agent_key = 0;

#endif

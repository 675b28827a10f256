/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a pass over sockets does with one, whether or not it has its lock (unlocked.bpf.c). */
#ifndef HEDDLE_ITER_PASS_H
#define HEDDLE_ITER_PASS_H

#include "include/abi/path.h"
#include "include/abi/record.h"
#include "include/config.h"
#include "include/endpoint.h"
#include "include/kernel_types.h"
#include "include/payload.h"
#include "include/protection.h"
#include "include/tag.h"
#include "include/socket.h"
#include "policy/decide.h"
#include "sock/reserved_ports.h"

/* Whether a pass is to end, or to list, a tagged socket. */
typedef bool condition(struct sock_common *sk, const struct sock_tag *tag);

/* The endpoint that leaves this node. Set by the agent. */
volatile __u32 leaving_endpoint = 0;

static __always_inline bool is_leaving(struct sock_common *sk, const struct sock_tag *tag)
{
	return tag->endpoint_id == leaving_endpoint;
}

/* Whether a program still has the connection of an endpoint that is gone, as another container may:
 * no rule speaks of it any more, so it must not go on where rules decide. What no program has only
 * sends its rest. */
static __always_inline bool outlives(struct sock_common *sk, const struct sock_tag *tag)
{
	struct tcp_sock *tcp;

	if (tag->flags & TAG_PROBE || tagged_endpoint(tag))
		return false;
	tcp = bpf_skc_to_tcp_sock(sk);
	return tcp && ((struct sock *)tcp)->sk_socket;
}

/* Whether policy forbids that the connection of a tagged socket goes on. */
static __always_inline bool is_forbidden(struct sock_common *sk, const struct sock_tag *tag)
{
	struct address local, remote;
	__u32 ports;

	if (!has_policy() || !protects(PROTECT_LATE) || sk->skc_state == BPF_TCP_LISTEN)
		return false;
	addresses_of(sk, &local, &remote);
	ports = (__u32)bpf_ntohs(sk->skc_dport) << 16 | sk->skc_num;
	return outlives(sk, tag) || decide_tagged(tag, &remote, ports) != VERDICT_ALLOW;
}

/* Whether a direct connection is older than this node's encryption: it has an address that the node
 * is reached by in the clear. */
static __always_inline bool in_the_clear(struct sock_common *sk, const struct sock_tag *tag)
{
	struct address local, remote;

	addresses_of(sk, &local, &remote);
	return config_underlay_raw && sk->skc_state != BPF_TCP_LISTEN && tag->path == PATH_DIRECT &&
	       !(tag->flags & TAG_PROBE) && local.word[3] && local.word[3] != config_underlay;
}

/* Whether a connection that went past the nodes' firewalls is one that they forbid now. Its other
 * end hears of it. */
static __always_inline bool firewall_forbids(struct sock_common *sk, const struct sock_tag *tag)
{
	const struct endpoint *ep = tagged_endpoint(tag);
	struct firewall_key k = {};
	struct address local;

	addresses_of(sk, &local, &k.dst);
	k.port = sk->skc_dport;
	if (!ep || sk->skc_state == BPF_TCP_LISTEN || tag->flags & (TAG_PROBE | TAG_ACCEPTED) ||
	    (tag->path != PATH_DIRECT && tag->path != PATH_LOCAL))
		return false;
	k.src = ep->addr4.word[3];
	if (tag->path == PATH_DIRECT) {
		k.dst = tag->remote;
		k.port = tag->remote_port;
	}
	return bpf_map_lookup_elem(&forbidden_by_firewall, &k);
}

/* Writes the connection_record of a socket. */
static __always_inline void list_socket(struct bpf_iter_meta *meta, struct sock_common *sk,
                                        struct sock_tag *tag, struct tcp_sock *tcp)
{
	struct connection_record r = {};

	r.tag = *tag;
	addresses_of(sk, &r.node_local, &r.node_remote);
	r.node_local_port = bpf_htons(sk->skc_num);
	r.node_remote_port = sk->skc_dport;
	r.state = sk->skc_state;
	r.family = sk->skc_family;
	r.bytes_sent = payload_sent(tcp);
	r.bytes_received = payload_received(tcp);
	r.retransmits = tcp->total_retrans;
	queues_of(tcp, r.state, &r.receive_queue, &r.send_queue);
	r.cookie = bpf_get_socket_cookie(tcp);
	bpf_seq_write(meta->seq, &r, sizeof(r));
}

#endif

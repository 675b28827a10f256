/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Policy for packets: those of processes that are not intercepted, of the node's own and of hosts
 * outside, and those that open a connection to an intercepted one. Connections of node sockets are
 * decided by connect() and the cut instead, so nothing of theirs comes here once they are
 * established.
 *
 *   TCP        the SYN is decided and remembered (openers_by_owner); what follows is decided as its
 *              SYN would be now, so that a changed policy ends it: by a RST
 *   datagrams  each is decided; an answer passes if what it answers passed lately and still would
 *              (datagrams_by_owner)
 *   fragments  only the first has ports: the others pass if it did
 *
 * What goes to a service is asked about by policy/service.h. */
#ifndef HEDDLE_POLICY_FILTER_H
#define HEDDLE_POLICY_FILTER_H

#include "include/address.h"
#include "include/count.h"
#include "include/maps.h"
#include "policy/decide.h"
#include "policy/flow_set.h"
#include "policy/packet_events.h"
#include "policy/service.h"
#include "tc/packet.h"

/* What the filters give for a packet that may go on. All else is an action. */
#define FILTER_PASS (-1)

/* After enum heddle_verdict: the packet cannot be read. */
#define VERDICT_UNDECIDABLE 3

/* In units of 2^30 nanoseconds: 120 and 30 seconds. */
#define ANSWER_TIME   112
#define FRAGMENT_TIME 28

/* What openers_by_owner and datagrams_by_owner say of a flow: that its opener is who its packets
 * say, or else the overlay address of the container that it is; or that it goes to a service: then
 * it is asked about as the node's rules have made it. */
#define OPENER_AS_SENT 1
#define OPENER_SERVICE 2

/* A datagram key that stands for the fragments of one packet. */
#define FLOW_FRAGMENT 1

#define ICMP_ECHO_REPLY   0
#define ICMP_UNREACHABLE  3
#define ICMP_ECHO         8
#define ICMP_EXCEEDED     11
#define ICMP_PARAMETER    12
#define ICMPV6_ECHO       128
#define ICMPV6_ECHO_REPLY 129
#define ICMPV6_SOLICIT    133 /* to 136: the neighbour protocol */
#define ICMPV6_ADVERTISE  136

/* As model.Protocol has it. */
static __always_inline __u8 policy_protocol(bool ipv6, __u8 protocol)
{
	if (protocol == IPPROTO_TCP_ || protocol == IPPROTO_UDP_)
		return protocol;
	if (protocol == (ipv6 ? IPPROTO_ICMPV6_ : IPPROTO_ICMP_))
		return IPPROTO_ICMP_;
	return 0;
}

static __always_inline struct filter_state *filter_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&filter_scratch, &zero);
}

/* The same flow as packets of the other direction show it. */
static __always_inline void reverse_flow(const struct flow_id *f, struct flow_id *to)
{
	to->from = f->to;
	to->to = f->from;
	to->sport = f->dport;
	to->dport = f->sport;
	to->protocol = f->protocol;
	to->kind = f->kind;
	to->pad = 0;
}

static __always_inline __u32 decide_id(const struct flow_id *f)
{
	return decide(&f->from, &f->to, f->protocol, f->protocol == IPPROTO_ICMP_ ? 0 : bpf_ntohs(f->dport));
}

/* The verdict on what f's other end may open to this one. */
static __always_inline __u32 decide_back(const struct flow_id *f)
{
	return decide(&f->to, &f->from, f->protocol, f->protocol == IPPROTO_ICMP_ ? 0 : bpf_ntohs(f->sport));
}

/* Remembers f as of now, and who opened it. This and the next are not static for decide's
 * reason. */
__noinline int note_flow(const struct flow_id *f, __u32 opener)
{
	return remember_flow(&datagrams_by_owner, f, opener);
}

__noinline __u32 noted(const struct flow_id *f, __u32 units)
{
	return recall_flow(&datagrams_by_owner, f, units, false, false);
}

/* Finds what is behind the IPv6 header: protocol, its offset, and whether this is a fragment. */
static __noinline bool read_extensions(struct __sk_buff *skb, struct filter_state *s)
{
	__u8 head[8];
	int i;

	if (!s)
		return false;
	s->offset = ETH_HLEN + sizeof(struct ip6hdr_);
	for (i = 0; i < 4; i++) {
		if (s->next != NEXTHDR_FRAGMENT_ && s->next != NEXTHDR_HOP_ && s->next != NEXTHDR_DEST_ &&
		    s->next != NEXTHDR_ROUTING_ && s->next != NEXTHDR_AUTH_)
			return true;
		if (bpf_skb_load_bytes(skb, s->offset, head, sizeof(head)))
			return false;
		if (s->next == NEXTHDR_FRAGMENT_) {
			if (head[2] || head[3] & 0xf8)
				s->fragment = FRAGMENT_LATER;
			else if (head[3] & 1)
				s->fragment = FRAGMENT_FIRST;
			__builtin_memcpy(&s->ident, head + 4, sizeof(s->ident));
			s->offset += sizeof(head);
		} else if (s->next == NEXTHDR_AUTH_) {
			s->offset += (head[1] + 2) * 4;
		} else {
			s->offset += (head[1] + 1) * 8;
		}
		s->next = head[0];
		if (s->fragment == FRAGMENT_LATER)
			return true;
	}
	return false;
}

/* sender: the overlay address of the container that the packet comes out of, or 0. It is decided by
 * that, also what has another source: none yet, or a link-local one. receiver: the same of the one
 * that it goes into, by whatever address. */
static __always_inline void start(const struct packet *p, struct filter_state *s, __be32 sender,
                                  __be32 receiver)
{
	if (p->ipv6) {
		s->flow.from = p->src6;
		s->flow.to = p->dst6;
	} else {
		set_mapped(&s->flow.from, p->ip.saddr);
		set_mapped(&s->flow.to, p->ip.daddr);
	}
	if (sender)
		set_overlay(&s->flow.from, p->ipv6, sender);
	if (receiver)
		set_overlay(&s->flow.to, p->ipv6, receiver);
	s->flow.sport = 0;
	s->flow.dport = 0;
	s->flow.protocol = IPPROTO_TCP_;
	s->flow.kind = 0;
	s->flow.pad = 0;
	s->fragment = FRAGMENT_NONE;
	s->ident = 0;
	s->next = p->ip.protocol;
	if (p->ipv6)
		return;
	s->offset = ETH_HLEN + (p->ip.version_ihl & 0xf) * 4;
	s->ident = p->ip.id;
	if (p->ip.frag_off & bpf_htons(IP_OFFSET_))
		s->fragment = FRAGMENT_LATER;
	else if (p->ip.frag_off & bpf_htons(IP_MF_))
		s->fragment = FRAGMENT_FIRST;
}

/* Remembers who opened f. This and the next are not static for decide's reason. */
__noinline int note_opener(const struct flow_id *f, __u32 opener)
{
	return remember_flow(&openers_by_owner, f, opener);
}

/* Who opened f: OPENER_AS_SENT, an overlay address, or 0: nothing is known of it. flags are those
 * of the packet that asks. */
__noinline __u32 opener_of(const struct flow_id *f, __u32 flags)
{
	return recall_flow(&openers_by_owner, f, ANY_TIME, true, flags & (TCP_FLAG_FIN_ | TCP_FLAG_RST_));
}

/* The verdict on a flow that opener opened, as f says or in the name of another. */
static __always_inline __u32 decide_opened(const struct flow_id *f, __u32 opener)
{
	struct address from;

	if (opener == OPENER_AS_SENT)
		return decide_id(f);
	if (opener == OPENER_SERVICE)
		return VERDICT_ALLOW;
	set_overlay(&from, !is_mapped(&f->to), opener);
	return decide(&from, &f->to, f->protocol, f->protocol == IPPROTO_ICMP_ ? 0 : bpf_ntohs(f->dport));
}

/* decide_tcp for what a container sends to a service, of which verdict is decide_service's. Answers
 * come in the service's name: they pass by what is remembered here. */
static __always_inline __u32 decide_to_service(struct filter_state *s, __u32 flags, __u32 verdict)
{
	__u32 opener = opener_of(&s->flow, flags);

	if (verdict >= VERDICT_LATER) {
		if (opener != OPENER_SERVICE || (flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_)
			note_opener(&s->flow, OPENER_SERVICE);
		return verdict;
	}
	if (!opener || (flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_)
		return verdict;
	return flags & TCP_FLAG_RST_ ? VERDICT_BACKENDS : VERDICT_REJECT;
}

/* The verdict on the TCP packet of s with these flags; own: it comes out of a container.
 * translated: as filter_tcp's. Not static for decide's reason. */
__noinline __u32 decide_tcp(struct filter_state *s, __u32 flags, __be32 translated, bool own)
{
	__u32 verdict, opener;
	bool forward = true;

	if (!s)
		return VERDICT_DROP;
	verdict = own ? decide_service(&s->flow) : VERDICT_NO_SERVICE;
	if (verdict != VERDICT_NO_SERVICE)
		return decide_to_service(s, flags, verdict);
	if ((flags & (TCP_FLAG_SYN_ | TCP_FLAG_ACK_)) == TCP_FLAG_SYN_) {
		opener = translated ? translated : OPENER_AS_SENT;
		verdict = has_policy() ? decide_opened(&s->flow, opener) : VERDICT_ALLOW;
		if (verdict == VERDICT_ALLOW)
			note_opener(&s->flow, opener);
		return verdict;
	}
	reverse_flow(&s->flow, &s->other);
	opener = opener_of(&s->flow, flags);
	if (!opener) {
		opener = opener_of(&s->other, flags);
		forward = false;
	}
	/* What ends a connection may pass: it was let through when it was opened. */
	if (opener && flags & TCP_FLAG_RST_)
		return VERDICT_ALLOW;
	if (!opener) {
		/* Forgotten, or older than this program. What a service answers is asked about as what
		 * it answers. */
		verdict = decide_service(&s->other);
		if (verdict == VERDICT_LATER || verdict == VERDICT_BACKENDS)
			return VERDICT_ALLOW;
		/* Services have the lower ports. */
		forward = bpf_ntohs(s->flow.dport) <= bpf_ntohs(s->flow.sport);
		return forward ? decide_id(&s->flow) : decide_id(&s->other);
	}
	verdict = forward ? decide_opened(&s->flow, opener) : decide_opened(&s->other, opener);
	return verdict ? VERDICT_REJECT : VERDICT_ALLOW;
}

/* Whether f is known to go to a service. */
static __always_inline bool goes_to_service(const struct flow_id *f)
{
	__u32 opener = f->protocol == IPPROTO_TCP_ ? opener_of(f, 0) : noted(f, ANSWER_TIME);

	return opener == OPENER_SERVICE;
}

/* Whether an ICMP error is about a packet that one of its ends may send to the other. From a
 * container (own) it must be about one to itself. */
static __noinline bool is_related(struct __sk_buff *skb, struct filter_state *s, bool ipv6, bool own)
{
	__u32 offset;
	__be16 ports[2];
	__u8 next;
	int i;

	if (!s)
		return false;
	offset = s->offset + 8;
	if (ipv6) {
		struct ip6hdr_ h;

		if (bpf_skb_load_bytes(skb, offset, &h, sizeof(h)))
			return false;
		for (i = 0; i < 4; i++) {
			s->other.from.word[i] = h.saddr[i];
			s->other.to.word[i] = h.daddr[i];
		}
		next = h.next_header;
		offset += sizeof(h);
	} else {
		struct iphdr_ h;

		if (bpf_skb_load_bytes(skb, offset, &h, sizeof(h)))
			return false;
		set_mapped(&s->other.from, h.saddr);
		set_mapped(&s->other.to, h.daddr);
		next = h.protocol;
		offset += (h.version_ihl & 0xf) * 4;
	}
	if (!same_address(&s->other.from, &s->flow.to) || (own && !same_address(&s->other.to, &s->flow.from)))
		return false;
	if (bpf_skb_load_bytes(skb, offset, ports, sizeof(ports)))
		return false;
	s->other.protocol = policy_protocol(ipv6, next);
	s->other.sport = ports[0];
	s->other.dport = ports[1];
	return decide_id(&s->other) == VERDICT_ALLOW || decide_back(&s->other) == VERDICT_ALLOW ||
	       goes_to_service(&s->other);
}

/* ICMP: what identifies an echo, and whether the packet passes whatever the rules are. */
static __noinline bool read_icmp(struct __sk_buff *skb, struct filter_state *s, bool ipv6, bool own)
{
	struct icmphdr_ icmp;
	__u8 hops;

	if (!s || bpf_skb_load_bytes(skb, s->offset, &icmp, sizeof(icmp)))
		return false;
	if (!ipv6) {
		if (icmp.type == ICMP_ECHO || icmp.type == ICMP_ECHO_REPLY)
			s->flow.sport = s->flow.dport = icmp.id;
		if (icmp.type == ICMP_UNREACHABLE || icmp.type == ICMP_EXCEEDED ||
		    icmp.type == ICMP_PARAMETER)
			return is_related(skb, s, false, own);
		return false;
	}
	if (icmp.type == ICMPV6_ECHO || icmp.type == ICMPV6_ECHO_REPLY)
		s->flow.sport = s->flow.dport = icmp.id;
	/* Neighbours: of this link, not forwarded. */
	if (icmp.type >= ICMPV6_SOLICIT && icmp.type <= ICMPV6_ADVERTISE)
		return !bpf_skb_load_bytes(skb, ETH_HLEN + 7, &hops, sizeof(hops)) && hops == 255;
	return icmp.type < ICMPV6_ECHO && is_related(skb, s, true, own);
}

/* An echo request is nobody's answer, although it may have the number of one that went the other
 * way. */
static __noinline bool asks_for_echo(struct __sk_buff *skb, struct filter_state *s, bool ipv6)
{
	__u8 type;

	if (!s || bpf_skb_load_bytes(skb, s->offset, &type, sizeof(type)))
		return true;
	return type == (ipv6 ? ICMPV6_ECHO : ICMP_ECHO);
}

/* The verdict on the datagram of s if opener sends it, and does not answer by it. If it passes it
 * is remembered. */
static __always_inline __u32 decide_sent(struct filter_state *s, __u32 opener, bool own)
{
	__u32 verdict = own ? decide_service(&s->flow) : VERDICT_NO_SERVICE;

	if (verdict == VERDICT_NO_SERVICE)
		verdict = decide_opened(&s->flow, opener);
	else
		opener = OPENER_SERVICE;
	if (!passes(verdict) || !note_flow(&s->flow, opener))
		return verdict;
	reverse_flow(&s->flow, &s->other);
	if (!noted(&s->other, ANSWER_TIME)) /* an answer is told of by its question */
		report_packet(&s->flow, 0, own);
	return verdict;
}

/* A packet of which TCP's header was not read, or that is not TCP. translated: as filter_tcp's. Not
 * static for decide's reason. */
__noinline __u32 decide_datagram(struct __sk_buff *skb, struct filter_state *s, bool ipv6, bool own,
                                 __be32 translated)
{
	__u32 verdict, opener;
	__be16 ports[2];

	if (!s || (ipv6 && !read_extensions(skb, s)))
		return VERDICT_UNDECIDABLE;
	s->flow.protocol = policy_protocol(ipv6, s->next);
	if (s->fragment == FRAGMENT_LATER) {
		s->flow.kind = FLOW_FRAGMENT;
		s->flow.sport = (__be16)s->ident;
		s->flow.dport = (__be16)(s->ident >> 16);
		return noted(&s->flow, FRAGMENT_TIME) ? VERDICT_ALLOW : VERDICT_UNDECIDABLE;
	}
	if (s->flow.protocol == IPPROTO_TCP_)
		return VERDICT_UNDECIDABLE;
	if (s->flow.protocol == IPPROTO_UDP_) {
		if (bpf_skb_load_bytes(skb, s->offset, ports, sizeof(ports)))
			return VERDICT_UNDECIDABLE;
		s->flow.sport = ports[0];
		s->flow.dport = ports[1];
	}
	if (s->flow.protocol == IPPROTO_ICMP_ && read_icmp(skb, s, ipv6, own))
		return VERDICT_ALLOW;
	verdict = decide_sent(s, translated ? translated : OPENER_AS_SENT, own);
	if (passes(verdict) || (s->flow.protocol == IPPROTO_ICMP_ && asks_for_echo(skb, s, ipv6)))
		return verdict;
	reverse_flow(&s->flow, &s->other);
	opener = noted(&s->other, ANSWER_TIME);
	if (opener && decide_opened(&s->other, opener) == VERDICT_ALLOW)
		return VERDICT_ALLOW;
	return verdict;
}

/* Lets the rest of a packet's fragments follow the first. */
static __always_inline void note_fragment(struct filter_state *s)
{
	s->flow.kind = FLOW_FRAGMENT;
	s->flow.sport = (__be16)s->ident;
	s->flow.dport = (__be16)(s->ident >> 16);
	note_flow(&s->flow, OPENER_AS_SENT);
}

/* Why a packet with a verdict that does not allow it is stopped. */
static __always_inline __u32 reason_of(__u32 verdict)
{
	return verdict == VERDICT_DROP ? REASON_DROP_POLICY_DROPPED : REASON_DROP_POLICY_REJECTED;
}

/* What becomes of a packet with this verdict: FILTER_PASS or an action. told: that it is stopped is
 * an event; out: as report_packet's. */
static __always_inline int conclude(struct __sk_buff *skb, struct filter_state *s, __u32 verdict, bool told,
                                    bool out)
{
	if (passes(verdict)) {
		if (!has_policy())
			return FILTER_PASS;
		if (s->fragment == FRAGMENT_FIRST)
			note_fragment(s);
		if (verdict != VERDICT_ALLOW && protects(PROTECT_SERVICES)) {
			barrier(); /* the compiler must not write the mark through a moved context pointer */
			skb->mark = service_mark(verdict);
		}
		return FILTER_PASS;
	}
	if (verdict == VERDICT_UNDECIDABLE) {
		count(REASON_DROP_UNDECIDABLE);
		return TC_ACT_SHOT;
	}
	if (told)
		report_packet(&s->flow, reason_of(verdict), out);
	return stop(skb, verdict);
}

/* What to do with a TCP packet by policy. sender and receiver: as start's. translated: the overlay
 * address of the container that sends it in the name of another, or 0. */
static __noinline int filter_tcp(struct __sk_buff *skb, const struct packet *p, __be32 sender,
                                 __be32 receiver, __be32 translated)
{
	struct filter_state *s;
	bool first;
	__u32 verdict;

	if (!p)
		return TC_ACT_SHOT;
	if (!has_policy() && !is_syn(p))
		return FILTER_PASS;
	s = filter_state();
	if (!s)
		return TC_ACT_SHOT;
	start(p, s, sender, receiver);
	s->flow.sport = p->tcp.source;
	s->flow.dport = p->tcp.dest;
	first = is_syn(p) && sender && !opener_of(&s->flow, 0);
	verdict = decide_tcp(s, p->tcp.flags, translated, sender != 0);
	if (first && passes(verdict))
		report_packet(&s->flow, 0, true);
	return conclude(skb, s, verdict, is_syn(p), sender != 0);
}

/* The same of any other IP packet. */
static __noinline int filter_other(struct __sk_buff *skb, const struct packet *p, __be32 sender,
                                   __be32 receiver, __be32 translated)
{
	struct filter_state *s;

	if (!p)
		return TC_ACT_SHOT;
	if (!has_policy())
		return FILTER_PASS;
	s = filter_state();
	if (!s)
		return TC_ACT_SHOT;
	start(p, s, sender, receiver);
	return conclude(skb, s, decide_datagram(skb, s, p->ipv6, sender != 0, translated), true, sender != 0);
}

/* The same for a packet to endpoint to (NULL: none of this node). kind is read_packet's. What is
 * for an intercepted one is asked about when it is known which socket it is for, unless it opens a
 * connection. */
static __always_inline int filter_for(struct __sk_buff *skb, const struct packet *p, int kind, __be32 sender,
                                      const struct endpoint *to)
{
	if (kind != PACKET_TCP)
		return filter_other(skb, p, sender, 0, 0);
	if (!is_syn(p) && to && to->flags & ENDPOINT_INTERCEPTED)
		return FILTER_PASS;
	return filter_tcp(skb, p, sender, 0, 0);
}

/* The connection that the SYN option behind flow asks for, with a source port. */
static __always_inline void set_asked(struct flow_id *to, const struct flow *flow, __be16 sport)
{
	set_overlay(&to->from, flow->ipv6, flow->src);
	set_overlay(&to->to, flow->ipv6, flow->dst);
	to->sport = sport;
	to->dport = flow->dst_port;
	to->protocol = IPPROTO_TCP_;
	to->kind = 0;
	to->pad = 0;
}

/* Remembers who opened a connection that the relay hands on. */
static __noinline void note_relay(const struct flow *flow)
{
	struct filter_state *s = filter_state();

	if (!s || !flow)
		return;
	set_asked(&s->flow, flow, flow->relay_port);
	note_opener(&s->flow, OPENER_AS_SENT);
}

/* Reports that policy stops a direct SYN. */
static __noinline void report_stopped(const struct flow *flow, __be16 sport, __u32 verdict)
{
	struct filter_state *s = filter_state();

	if (!s || !flow)
		return;
	set_asked(&s->flow, flow, sport);
	report_packet(&s->flow, reason_of(verdict), false);
}

/* Whether a packet that leaves by an endpoint's veth is the node's own answer to one that was
 * stopped: nothing that was forwarded. */
static __always_inline bool is_refusal(struct __sk_buff *skb, const struct packet *p, int kind)
{
	__u8 type, offset;

	if (skb->ingress_ifindex)
		return false;
	if (kind == PACKET_TCP)
		return p->tcp.flags & TCP_FLAG_RST_;
	if (p->ipv6)
		return p->ip.protocol == IPPROTO_ICMPV6_ &&
		       !bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ip6hdr_), &type, sizeof(type)) &&
		       type < ICMPV6_ECHO;
	offset = ETH_HLEN + (p->ip.version_ihl & 0xf) * 4;
	return p->ip.protocol == IPPROTO_ICMP_ && !(p->ip.frag_off & bpf_htons(IP_OFFSET_)) &&
	       !bpf_skb_load_bytes(skb, offset, &type, sizeof(type)) && type == ICMP_UNREACHABLE;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reading the options of a TCP segment. */
#ifndef HEDDLE_TC_TCP_OPTION_H
#define HEDDLE_TC_TCP_OPTION_H

#include "include/syn_option.h"
#include "tc/packet.h"

#define TCP_OPTIONS_MAX             40 /* bytes: so many NOPs at most */
#define TCP_OPTION_END              0
#define TCP_OPTION_NOP              1
#define TCP_OPTION_TIMESTAMP        8
#define TCP_OPTION_TIMESTAMP_LENGTH 10

/* A walk over a segment's options, which the kernel has no helper for in tc programs. By bpf_loop,
 * so that the verifier looks at a step once and not at forty with all that its caller knows. */
struct option_walk {
	struct __sk_buff *skb;
	__u32 offset; /* in the frame; in the end, of the option that was found */
	__u32 end;
	__u32 kind;   /* to be found; of OPTION_KIND, Heddle's */
	__u32 length; /* of what was found */
	int found;    /* 1; -1: the one of that kind is malformed */
};

static int step_option(__u32 i, struct option_walk *w)
{
	__u8 head[4] = {};
	bool is;

	if (w->offset >= w->end || bpf_skb_load_bytes(w->skb, w->offset, head, 1) ||
	    head[0] == TCP_OPTION_END)
		return 1;
	if (head[0] == TCP_OPTION_NOP) {
		w->offset++;
		return 0;
	}
	if (w->offset + 2 > w->end || bpf_skb_load_bytes(w->skb, w->offset, head, 2))
		return 1;
	if (head[1] < 2 || w->offset + head[1] > w->end) {
		w->found = head[0] == w->kind ? -1 : 0;
		return 1;
	}
	is = head[0] == w->kind;
	if (is && w->kind == OPTION_KIND) {
		if (head[1] >= 4 && bpf_skb_load_bytes(w->skb, w->offset, head, 4))
			return 1;
		is = head[1] >= 4 && head[2] == (OPTION_EXID >> 8) && head[3] == (OPTION_EXID & 0xff);
	}
	if (!is) {
		w->offset += head[1];
		return 0;
	}
	w->length = head[1];
	w->found = 1;
	return 1;
}

/* Finds an option among those from offset to end of the frame. Gives its length and puts where it
 * is into *at; 0 if it is absent, -1 if malformed. Not static, so that to the verifier offset is
 * any number: it would count a known one up. */
__noinline int walk_options(struct __sk_buff *skb, __u32 offset, __u32 end, __u32 kind, __u32 *at)
{
	struct option_walk w = {.skb = skb, .kind = kind, .offset = offset, .end = end};

	if (!at)
		return 0;
	bpf_loop(TCP_OPTIONS_MAX, step_option, &w, 0);
	*at = w.offset;
	return w.found > 0 ? (int)w.length : w.found;
}

/* Finds the Heddle option. Gives 1 if found, 0 if absent, -1 if malformed. */
static __always_inline int find_option(struct __sk_buff *skb, const struct packet *p, struct syn_option *o)
{
	__u32 end = p->tcp_offset + (p->tcp.doff_res >> 4) * 4, at = 0;
	int length = walk_options(skb, p->tcp_offset + sizeof(p->tcp), end, OPTION_KIND, &at);

	if (length <= 0)
		return length;
	return length != sizeof(*o) || bpf_skb_load_bytes(skb, at, o, sizeof(*o)) ? -1 : 1;
}

/* The SYN's own timestamp; gives 0 if it has none. */
static __noinline int read_timestamp(struct __sk_buff *skb, __u32 offset, __u32 end, __u32 *timestamp)
{
	__be32 value;
	__u32 at = 0;

	if (!timestamp ||
	    walk_options(skb, offset, end, TCP_OPTION_TIMESTAMP, &at) != TCP_OPTION_TIMESTAMP_LENGTH ||
	    bpf_skb_load_bytes(skb, at + 2, &value, sizeof(value)))
		return 0;
	*timestamp = bpf_ntohl(value);
	return 1;
}

#endif

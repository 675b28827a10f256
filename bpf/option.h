/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The SYN option: docs/protocols/syn-option.md is normative. */
#ifndef HEDDLE_OPTION_H
#define HEDDLE_OPTION_H

#define OPTION_KIND  253    /* RFC 4727: experiments */
#define OPTION_EXID  0x4864 /* "Hd", RFC 6994 experiment identifier */
#define OPTION_IPV4  1      /* versions: src and dst are addresses */
#define OPTION_IPV6  2      /* ... stand for their IPv6 forms */
#define OPTION_PROBE 3      /* ... are the nodes' gateways: asks whether options arrive, for no connection */

static __always_inline struct syn_option make_option(bool ipv6, __be32 src, __be32 dst, __be16 dst_port)
{
	struct syn_option o = {
	        .kind = OPTION_KIND,
	        .length = sizeof(o),
	        .exid = bpf_htons(OPTION_EXID),
	        .version_network = bpf_htons((ipv6 ? OPTION_IPV6 : OPTION_IPV4) << 12 | config_network_id),
	        .dst_port = dst_port,
	        .dst = dst,
	        .src = src,
	};
	return o;
}

static __always_inline bool option_is_ipv6(const struct syn_option *o)
{
	return bpf_ntohs(o->version_network) >> 12 == OPTION_IPV6;
}

static __always_inline bool option_is_probe(const struct syn_option *o)
{
	return bpf_ntohs(o->version_network) >> 12 == OPTION_PROBE;
}

/* Why a receiver must reject o; REASON_NONE if it may not. o has the right kind and ExID. */
static __always_inline __u32 reject_option(const struct syn_option *o)
{
	__u16 vn = bpf_ntohs(o->version_network);

	if (vn >> 12 != OPTION_IPV4 && vn >> 12 != OPTION_PROBE &&
	    (vn >> 12 != OPTION_IPV6 || !has_overlay6()))
		return REASON_DROP_OPTION_VERSION;
	if (o->length != sizeof(*o) || o->dst_port == 0)
		return REASON_DROP_OPTION_MALFORMED;
	if ((vn & 0xfff) != config_network_id)
		return REASON_DROP_OPTION_NETWORK;
	return REASON_NONE;
}

#define TCP_OPTIONS_MAX             40 /* bytes: so many NOPs at most */
#define TCP_OPTION_END              0
#define TCP_OPTION_NOP              1
#define TCP_OPTION_TIMESTAMP        8
#define TCP_OPTION_TIMESTAMP_LENGTH 10

/* A walk over a segment's options, which the kernel has no helper for in tc programs. By bpf_loop, so that the verifier looks at a
 * step once and not at forty with all that its caller knows. */
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

#endif

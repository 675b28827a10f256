/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Socket options: an allow-list, because the socket lives in the node's namespace and what the kernel
 * checks there are the node's rules. Three kinds of answer besides the kernel's own: EPERM for options
 * that would reach the node, success without effect for hints Heddle cannot take, and IPV6_V6ONLY,
 * which is kept in the tag (the kernel's own flag would forbid the v4-mapped addresses underneath). */

#define OPTVAL_PAGE 4096

enum sockopt_verdict {
	SOCKOPT_DENY,
	SOCKOPT_PASS,
	SOCKOPT_IGNORE,
	SOCKOPT_V6ONLY,
};

static __always_inline int socket_level(int name)
{
	switch (name) {
	case 36: /* SO_MARK */
	case 25: /* SO_BINDTODEVICE */
	case 62: /* SO_BINDTOIFINDEX */
	case 32: /* SO_SNDBUFFORCE */
	case 33: /* SO_RCVBUFFORCE */
	case 1:  /* SO_DEBUG */
	case 52: /* SO_ATTACH_REUSEPORT_EBPF */
	case 50: /* SO_ATTACH_BPF */
	case 71: /* SO_NETNS_COOKIE */
		return SOCKOPT_DENY;
	}
	return name > 0 && name <= 76 ? SOCKOPT_PASS : SOCKOPT_DENY;
}

static __always_inline int ip_level(int name)
{
	switch (name) {
	case 1:  /* IP_TOS */
	case 2:  /* IP_TTL */
	case 8:  /* IP_PKTINFO */
	case 10: /* IP_MTU_DISCOVER */
	case 12: /* IP_RECVTTL */
	case 13: /* IP_RECVTOS */
	case 14: /* IP_MTU */
	case 15: /* IP_FREEBIND: bind() still refuses foreign addresses */
	case 21: /* IP_MINTTL */
	case 24: /* IP_BIND_ADDRESS_NO_PORT */
	case 51: /* IP_LOCAL_PORT_RANGE */
		return SOCKOPT_PASS;
	}
	return SOCKOPT_DENY;
}

static __always_inline int ipv6_level(int name)
{
	switch (name) {
	case 26: /* IPV6_V6ONLY */
		return SOCKOPT_V6ONLY;
	case 16: /* IPV6_UNICAST_HOPS */
	case 23: /* IPV6_MTU_DISCOVER */
	case 24: /* IPV6_MTU */
	case 33: /* IPV6_FLOWINFO_SEND */
	case 49: /* IPV6_RECVPKTINFO */
	case 51: /* IPV6_RECVHOPLIMIT */
	case 66: /* IPV6_RECVTCLASS */
	case 67: /* IPV6_TCLASS */
	case 70: /* IPV6_AUTOFLOWLABEL */
	case 72: /* IPV6_ADDR_PREFERENCES */
	case 73: /* IPV6_MINHOPCOUNT */
	case 78: /* IPV6_FREEBIND */
		return SOCKOPT_PASS;
	}
	return SOCKOPT_DENY;
}

static __always_inline int tcp_level(int name)
{
	switch (name) {
	case 14: /* TCP_MD5SIG */
	case 32: /* TCP_MD5SIG_EXT */
	case 19: /* TCP_REPAIR */
	case 20: /* TCP_REPAIR_QUEUE */
	case 21: /* TCP_QUEUE_SEQ */
	case 22: /* TCP_REPAIR_OPTIONS */
	case 29: /* TCP_REPAIR_WINDOW */
	case 27: /* TCP_SAVE_SYN: on for every listener */
	case 28: /* TCP_SAVED_SYN: the SYN as it was on the underlay */
		return SOCKOPT_DENY;
	case 30: /* TCP_FASTOPEN_CONNECT: an optimisation; the option has no room beside a cookie */
		return SOCKOPT_IGNORE;
	}
	return name > 0 && name <= 37 ? SOCKOPT_PASS : SOCKOPT_DENY;
}

static __always_inline int sockopt_verdict(int level, int name)
{
	switch (level) {
	case SOL_SOCKET_:
		return socket_level(name);
	case SOL_IP_:
		return ip_level(name);
	case SOL_IPV6_:
		return ipv6_level(name);
	case SOL_TCP_:
		return tcp_level(name);
	case SOL_TLS_:
		return SOCKOPT_PASS;
	}
	return SOCKOPT_DENY;
}

/* Levels the kernel does not know answer ENOPROTOOPT; denied options of known levels EPERM. */
static __always_inline int deny_sockopt(int level)
{
	bool known = level == SOL_SOCKET_ || level == SOL_IP_ || level == SOL_IPV6_ || level == SOL_TCP_;

	return refuse(REASON_REFUSE_SOCKOPT, known ? EPERM_ : ENOPROTOOPT_);
}

static __always_inline int set_v6only(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	__u8 *value = ctx->optval;
	int on;

	if (ctx->sk->family != AF_INET6) {
		bpf_set_retval(-ENOPROTOOPT_);
		return 0;
	}
	if (ctx->optlen < (int)sizeof(int) || (void *)(value + sizeof(int)) > ctx->optval_end ||
	    ctx->sk->src_port) {
		bpf_set_retval(-EINVAL_);
		return 0;
	}
	on = *(int *)value;
	if (on)
		tag->flags |= TAG_V6ONLY;
	else
		tag->flags &= ~TAG_V6ONLY;
	ctx->optlen = -1;
	return 1;
}

/* SO_REUSEADDR and SO_REUSEPORT decide about conflicts between addresses, too. */
static __always_inline void note_reuse(struct bpf_sockopt *ctx, struct sock_tag *tag)
{
	__u8 *value = ctx->optval;
	__u8 flag;

	if (ctx->level != SOL_SOCKET_ || ctx->optlen < (int)sizeof(int) ||
	    (void *)(value + sizeof(int)) > ctx->optval_end)
		return;
	if (ctx->optname == 2 /* SO_REUSEADDR */)
		flag = CLAIM_REUSEADDR;
	else if (ctx->optname == 15 /* SO_REUSEPORT */)
		flag = CLAIM_REUSEPORT;
	else
		return;
	set_claim_flag(tag, flag, *(int *)value != 0);
}

SEC("cgroup/setsockopt")
int setsockopt(struct bpf_sockopt *ctx)
{
	struct sock_tag *tag;

	if (!ctx->sk)
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, 0);
	if (!tag)
		goto pass;
	switch (sockopt_verdict(ctx->level, ctx->optname)) {
	case SOCKOPT_PASS:
		note_reuse(ctx, tag);
		goto pass;
	case SOCKOPT_IGNORE:
		ctx->optlen = -1;
		return 1;
	case SOCKOPT_V6ONLY:
		return set_v6only(ctx, tag);
	}
	return deny_sockopt(ctx->level);
pass:
	/* Longer values than a page are not shown to programs; 0 lets the kernel read them itself. */
	if (ctx->optlen > OPTVAL_PAGE)
		ctx->optlen = 0;
	return 1;
}

SEC("cgroup/getsockopt")
int getsockopt(struct bpf_sockopt *ctx)
{
	struct sock_tag *tag;
	__u8 *value = ctx->optval;

	if (!ctx->sk)
		return 1;
	tag = bpf_sk_storage_get(&tag_by_sock, ctx->sk, 0, 0);
	if (!tag)
		goto pass;
	switch (sockopt_verdict(ctx->level, ctx->optname)) {
	case SOCKOPT_V6ONLY:
		if (ctx->sk->family == AF_INET6 && (void *)(value + sizeof(int)) <= ctx->optval_end)
			*(int *)value = !!(tag->flags & TAG_V6ONLY);
		return 1;
	case SOCKOPT_PASS:
	case SOCKOPT_IGNORE:
		goto pass;
	}
	return deny_sockopt(ctx->level);
pass:
	if (ctx->optlen > OPTVAL_PAGE)
		ctx->optlen = 0;
	return 1;
}

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Brings live sockets to a profile that has changed: run by the agent after each change. One byte
 * for each socket that was brought there. */

#include "include/kernel_types.h"
#include "include/socket.h"
#include "sock/stack_settings.h"

/* What can be changed of a socket that is in use. */
#define STACK_LIVE                                                                                           \
	(STACK_CONGESTION | STACK_RECEIVE_BUFFER | STACK_SEND_BUFFER | STACK_PACING | STACK_KEEPALIVE |      \
	 STACK_USER_TIMEOUT | STACK_NOTSENT_LOWAT | STACK_DELAYED_ACK)

SEC("iter/tcp")
int follow_profile(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct stack_settings *s;
	__u32 among = STACK_LIVE;
	struct sock_tag *tag;
	__u8 done = 1;

	if (!sk || sk->skc_state == BPF_TCP_TIME_WAIT || sk->skc_state == BPF_TCP_NEW_SYN_RECV ||
	    sk->skc_state == BPF_TCP_CLOSE)
		return 0;
	tag = bpf_sk_storage_get(&tag_by_sock, sk, 0, 0);
	if (!tag || tag->flags & TAG_PROBE)
		return 0;
	s = stack_of(tag);
	if (!has_stack(tag, s))
		return 0;
	if (sk->skc_state == BPF_TCP_LISTEN)
		among |= STACK_MSS;
	follow_stack(sk, tag, s, among);
	bpf_seq_write(ctx->meta->seq, &done, sizeof(done));
	return 0;
}

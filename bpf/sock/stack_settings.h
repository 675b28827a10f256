/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Gives a socket what its endpoint's stack profile says, where bpf_setsockopt() can: at connect()
 * and listen(), which what is accepted inherits from, so that a socket made ahead, and one made
 * before the profile changed, has what is in force when it is put to use. */
#ifndef HEDDLE_SOCK_STACK_SETTINGS_H
#define HEDDLE_SOCK_STACK_SETTINGS_H

#include "include/abi/path.h"
#include "include/congestion.h"
#include "include/count.h"
#include "include/kernel.h"
#include "include/stack_settings.h"

#define SO_SNDBUF_          7
#define SO_RCVBUF_          8
#define SO_KEEPALIVE_       9
#define SO_SNDBUFFORCE_     32
#define SO_RCVBUFFORCE_     33
#define SO_MAX_PACING_RATE_ 47
#define SO_BUF_LOCK_        72
#define TCP_MAXSEG_         2
#define TCP_KEEPIDLE_       4
#define TCP_KEEPINTVL_      5
#define TCP_KEEPCNT_        6
#define TCP_CONGESTION_     13
#define TCP_USER_TIMEOUT_   18
#define TCP_NOTSENT_LOWAT_  25
#define TCP_DELACK_MAX_US_  46 /* Linux 6.15 */
#define TCP_BPF_IW_         1001
#define TCP_BPF_DELACK_MAX_ 1003
#define DELAYED_ACK_DEFAULT 200000 /* microseconds: TCP_DELACK_MAX */
#define PACING_NONE         (~0U)

/* The congestion control that the node gives sockets. Set by the agent. */
volatile const char config_congestion[STACK_CONGESTION_SIZE] = {};

static __always_inline int set_int(void *ctx, int level, int name, __u32 value)
{
	return bpf_setsockopt(ctx, level, name, &value, sizeof(value));
}

static __always_inline int set_congestion(void *ctx, const volatile char *name)
{
	char copy[STACK_CONGESTION_SIZE];
	int i;

	for (i = 0; i < STACK_CONGESTION_SIZE; i++)
		copy[i] = name[i];
	return bpf_setsockopt(ctx, SOL_TCP_, TCP_CONGESTION_, copy, sizeof(copy));
}

/* Whether a name is "bbr". Within a node BBR, which paces by timers, moves a fraction of what
 * others do: decision 0037. */
static __always_inline bool is_bbr(const volatile char *name)
{
	return name[0] == 'b' && name[1] == 'b' && name[2] == 'r' && !name[3];
}

static __always_inline bool within_node(const struct sock_tag *tag)
{
	return tag->path == PATH_LOCAL || tag->path == PATH_LOOPBACK;
}

/* Gives a socket the node's congestion control, as it would have it without a profile
 * (sock/congestion.h). */
static __always_inline void take_back_congestion(void *ctx, struct sock_tag *tag)
{
	struct congestion reno;

	if (!within_node(tag) || !is_bbr(config_congestion)) {
		set_congestion(ctx, config_congestion);
	} else {
		congestion_from(&reno, CONGESTION_RENO);
		if (!bpf_setsockopt(ctx, SOL_TCP_, TCP_CONGESTION_, &reno, sizeof(reno)))
			__sync_fetch_and_or(&tag->flags, TAG_RENO_FOR_BBR);
	}
}

/* Takes back what a profile set that no profile sets now, and the program has not set since. */
static __always_inline void take_back(void *ctx, struct sock_tag *tag, __u32 gone)
{
	if (gone & STACK_CONGESTION)
		take_back_congestion(ctx, tag);
	if (gone & STACK_PACING)
		set_int(ctx, SOL_SOCKET_, SO_MAX_PACING_RATE_, PACING_NONE);
	if (gone & STACK_KEEPALIVE)
		set_int(ctx, SOL_SOCKET_, SO_KEEPALIVE_, 0);
	if (gone & STACK_USER_TIMEOUT)
		set_int(ctx, SOL_TCP_, TCP_USER_TIMEOUT_, 0);
	if (gone & STACK_NOTSENT_LOWAT)
		set_int(ctx, SOL_TCP_, TCP_NOTSENT_LOWAT_, 0);
	if (gone & STACK_DELAYED_ACK)
		set_int(ctx, SOL_TCP_, TCP_BPF_DELACK_MAX_, DELAYED_ACK_DEFAULT);
}

/* Sets what is to be of s, by bit. Gives what the kernel did not take. */
static __always_inline __u32 give(void *ctx, const struct stack_settings *s, __u32 what)
{
	__u32 failed = 0;

	if (what & STACK_CONGESTION && set_congestion(ctx, s->congestion))
		failed |= STACK_CONGESTION;
	if (what & STACK_RECEIVE_BUFFER && set_int(ctx, SOL_SOCKET_, SO_RCVBUF_, s->receive_buffer))
		failed |= STACK_RECEIVE_BUFFER;
	if (what & STACK_SEND_BUFFER && set_int(ctx, SOL_SOCKET_, SO_SNDBUF_, s->send_buffer))
		failed |= STACK_SEND_BUFFER;
	if (what & STACK_PACING && set_int(ctx, SOL_SOCKET_, SO_MAX_PACING_RATE_, s->pacing_rate))
		failed |= STACK_PACING;
	if (what & STACK_KEEPALIVE && (set_int(ctx, SOL_TCP_, TCP_KEEPIDLE_, s->keepalive_idle) ||
	                               set_int(ctx, SOL_TCP_, TCP_KEEPINTVL_, s->keepalive_interval) ||
	                               set_int(ctx, SOL_TCP_, TCP_KEEPCNT_, s->keepalive_count) ||
	                               set_int(ctx, SOL_SOCKET_, SO_KEEPALIVE_, 1)))
		failed |= STACK_KEEPALIVE;
	if (what & STACK_USER_TIMEOUT && set_int(ctx, SOL_TCP_, TCP_USER_TIMEOUT_, s->user_timeout))
		failed |= STACK_USER_TIMEOUT;
	if (what & STACK_NOTSENT_LOWAT && set_int(ctx, SOL_TCP_, TCP_NOTSENT_LOWAT_, s->notsent_lowat))
		failed |= STACK_NOTSENT_LOWAT;
	if (what & STACK_MSS && set_int(ctx, SOL_TCP_, TCP_MAXSEG_, s->mss))
		failed |= STACK_MSS;
	if (what & STACK_DELAYED_ACK && set_int(ctx, SOL_TCP_, TCP_BPF_DELACK_MAX_, s->delayed_ack))
		failed |= STACK_DELAYED_ACK;
	return failed;
}

/* Notes what a profile was to give a socket, and what of that the kernel did not take: the rest is
 * no longer the program's own. The hook of setsockopt() has no lock. Not static, so that to the
 * verifier both are any numbers: else it tells apart all that the calls before can have made of
 * them, 2^9. */
__noinline int note_given(struct sock_tag *tag, __u32 want, __u32 failed)
{
	__u32 given = want & ~failed;
	__u32 lost = (STACK_REVOCABLE & ~given) << STACK_APPLIED_SHIFT | (given & STACK_OWN_SETTINGS)
	                                                                         << STACK_OWN_SHIFT;

	if (!tag)
		return 0;
	if (failed)
		count(REASON_FALLBACK_STACK_SETTING);
	if (given & STACK_CONGESTION) {
		lost |= OPTION_CONGESTION;
		__sync_fetch_and_and(&tag->flags, ~TAG_RENO_FOR_BBR);
	}
	__sync_fetch_and_and(&tag->options, ~lost);
	__sync_fetch_and_or(&tag->options, (given & STACK_REVOCABLE) << STACK_APPLIED_SHIFT);
	return 0;
}

/* Brings a socket to its endpoint's profile, or to none. among says which settings the moment
 * allows. The caller has the socket's lock. */
static __always_inline void follow_stack(void *ctx, struct sock_tag *tag, const struct stack_settings *s,
                                         __u32 among)
{
	__u32 own = own_settings(tag), applied = tag->options >> STACK_APPLIED_SHIFT & STACK_REVOCABLE;
	__u32 want = 0, failed = 0, gone;

	if (s && within_node(tag) && is_bbr(s->congestion))
		among &= ~STACK_CONGESTION;
	if (s)
		want = s->set & (s->held | ~own) & among;
	gone = applied & ~want & ~own;
	if (gone)
		take_back(ctx, tag, gone);
	if (want)
		failed = give(ctx, s, want);
	note_given(tag, want, failed);
}

/* Whether anything is to be done for a socket. */
static __always_inline bool has_stack(const struct sock_tag *tag, const struct stack_settings *s)
{
	return s || tag->options >> STACK_APPLIED_SHIFT & STACK_REVOCABLE;
}

/* The settings of a profile that an option changes, by bit. */
static __always_inline __u32 setting_of(int level, int name)
{
	if (level == SOL_SOCKET_) {
		switch (name) {
		case SO_RCVBUF_:
		case SO_RCVBUFFORCE_:
			return STACK_RECEIVE_BUFFER;
		case SO_SNDBUF_:
		case SO_SNDBUFFORCE_:
			return STACK_SEND_BUFFER;
		case SO_KEEPALIVE_:
			return STACK_KEEPALIVE;
		case SO_MAX_PACING_RATE_:
			return STACK_PACING;
		case SO_BUF_LOCK_: /* lets the kernel tune buffers again */
			return STACK_RECEIVE_BUFFER | STACK_SEND_BUFFER;
		}
	} else if (level == SOL_TCP_) {
		switch (name) {
		case TCP_MAXSEG_:
			return STACK_MSS;
		case TCP_KEEPIDLE_:
		case TCP_KEEPINTVL_:
		case TCP_KEEPCNT_:
			return STACK_KEEPALIVE;
		case TCP_CONGESTION_:
			return STACK_CONGESTION;
		case TCP_USER_TIMEOUT_:
			return STACK_USER_TIMEOUT;
		case TCP_NOTSENT_LOWAT_:
			return STACK_NOTSENT_LOWAT;
		case TCP_DELACK_MAX_US_:
			return STACK_DELAYED_ACK;
		}
	}
	return 0;
}

/* Whether the profile keeps an option from the program, which is told that it is set. Otherwise it
 * is noted as its own, but for TCP_CONGESTION (note_congestion). Whether the kernel takes it is not
 * known yet: a value that it refuses leaves the socket as it is, without the profile's. */
static __always_inline bool stack_holds(struct sock_tag *tag, int level, int name)
{
	__u32 setting = setting_of(level, name);
	struct stack_settings *s;

	if (!setting)
		return false;
	s = stack_of(tag);
	if (s && s->set & s->held & setting) {
		count(REASON_REFUSE_STACK_SETTING);
		return true;
	}
	__sync_fetch_and_or(&tag->options, (setting & STACK_OWN_SETTINGS) << STACK_OWN_SHIFT);
	return false;
}

#endif

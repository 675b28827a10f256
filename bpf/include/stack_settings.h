/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Stack profiles: what an endpoint's sockets are to have of the kernel's TCP. */
#ifndef HEDDLE_STACK_SETTINGS_H
#define HEDDLE_STACK_SETTINGS_H

#include "include/abi/stack_settings.h"
#include "include/abi/tag.h"
#include "include/maps.h"

/* Not 0 since some endpoint had a profile. Written by the agent. */
volatile __u32 stacks_in_force = 0;

/* Where a socket's tag notes the settings that its program has set itself, and those of a profile
 * that can be taken back: bit n of enum stack_setting is bit n + this of sock_tag.options. */
#define STACK_OWN_SHIFT     12
#define STACK_APPLIED_SHIFT 20
#define STACK_OWN_SETTINGS                                                                                   \
	(STACK_RECEIVE_BUFFER | STACK_SEND_BUFFER | STACK_PACING | STACK_KEEPALIVE | STACK_USER_TIMEOUT |    \
	 STACK_NOTSENT_LOWAT | STACK_MSS)
/* Those that the kernel lets be taken back of a socket. */
#define STACK_REVOCABLE                                                                                      \
	(STACK_CONGESTION | STACK_PACING | STACK_KEEPALIVE | STACK_USER_TIMEOUT | STACK_NOTSENT_LOWAT |      \
	 STACK_DELAYED_ACK)

static __always_inline struct stack_settings *stack_of(const struct sock_tag *tag)
{
	if (!stacks_in_force)
		return NULL;
	return bpf_map_lookup_elem(&stack_by_endpoint, &tag->endpoint_id);
}

static __always_inline bool stack_refuses(const struct sock_tag *tag)
{
	struct stack_settings *s = stack_of(tag);

	return s && s->set & STACK_REFUSED;
}

/* The settings of a socket that its program has set itself. */
static __always_inline __u32 own_settings(const struct sock_tag *tag)
{
	__u32 own = tag->options >> STACK_OWN_SHIFT & STACK_OWN_SETTINGS;

	return tag->options & OPTION_CONGESTION ? own | STACK_CONGESTION : own;
}

#endif

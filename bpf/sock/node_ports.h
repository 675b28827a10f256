/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ports that the node keeps for its own connects: the last eighth of its ephemeral ports. All
 * sockets of the node's namespace share one table of ports, and the kernel gives no connect() a
 * port that a bind() or listen() took at whatever address: a container that binds every ephemeral
 * port would leave none to anybody. The kernel chooses none of them for containers' sockets, by
 * IP_LOCAL_PORT_RANGE, which the agent sets; of those that programs name, sock/reserved_ports.h
 * leaves the node enough. */
#ifndef HEDDLE_SOCK_NODE_PORTS_H
#define HEDDLE_SOCK_NODE_PORTS_H

#include "include/config.h"
#include "include/protection.h"

/* Whether a port is one of those. */
static __always_inline bool is_node_port(__be16 port)
{
	__u16 p = bpf_ntohs(port);

	return config_node_port_first && p >= config_node_port_first && p <= config_node_port_last &&
	       protects(PROTECT_PORTS);
}

/* IP_LOCAL_PORT_RANGE, lowest and highest port in one integer, 0 for none: what the program asks
 * for, but below the node's ports. What the kernel would refuse, it does. */
static __always_inline void cut_port_range(struct bpf_sockopt *ctx)
{
	__u32 *p = ctx->optval, last = config_node_port_first - 1, low, high;

	if (!config_node_port_first || !protects(PROTECT_PORTS) || ctx->optlen != sizeof(*p) ||
	    (void *)(p + 1) > ctx->optval_end)
		return;
	low = *p & 0xffff;
	high = *p >> 16;
	if (low && high && low > high)
		return;
	if (!high || high > last)
		high = last;
	if (low > high)
		low = high;
	*p = low | high << 16;
}

/* The first bytes of the range, for which alone the program has room. The kernel gives a number
 * below 256 as one byte then. */
static __always_inline void show_short_port_range(struct bpf_sockopt *ctx)
{
	__u8 *p = ctx->optval;

	if ((void *)(p + 2) > ctx->optval_end)
		return;
	if ((void *)(p + 3) <= ctx->optval_end) {
		if (p[2] != (__u8)(config_node_port_first - 1))
			return;
		p[2] = 0;
	}
	if (!p[1])
		ctx->optlen = 1;
}

/* The range as the program set it: a limit that is the agent's is none. */
static __always_inline void show_port_range(struct bpf_sockopt *ctx)
{
	__u32 *p = ctx->optval;

	if (!config_node_port_first || !protects(PROTECT_PORTS))
		return;
	if ((void *)(p + 1) > ctx->optval_end) {
		show_short_port_range(ctx);
		return;
	}
	if (*p >> 16 == config_node_port_first - 1)
		*p &= 0xffff;
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Devices of modules that run endpoints' TCP. What is for such an endpoint leaves the way to its
 * container at the node's side of its veth (into_own_stack, into_container); what comes from there
 * goes on as if the container had sent it. */

#include "include/maps.h"
#include "tc/packet.h"

/* Ingress of a module's device. The veth's own programs look at it next. */
SEC("tc")
int from_stack(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct stack_device *veth = bpf_map_lookup_elem(&stack_by_ifindex, &ifindex);

	return veth ? bpf_redirect(veth->ifindex, BPF_F_INGRESS) : TC_ACT_SHOT;
}

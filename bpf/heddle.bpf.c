/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* One object, so that all programs share one set of maps. One file a hook, in the order a connection
 * meets them. */
#include "kernel.h"
#include "abi.h"
#include "config.h"
#include "protection.h"
#include "maps.h"
#include "address.h"
#include "credential.h"
#include "mirror.h"
#include "option.h"
#include "packet.h"
#include "policy.h"
#include "remember.h"
#include "wire.h"

#include "suspect.h"

#include "ports.bpf.c"
#include "ownstack.bpf.c"
#include "sockets.bpf.c"
#include "held.bpf.c"
#include "claim.bpf.c"
#include "bind.bpf.c"
#include "listener.bpf.c"
#include "forbid.bpf.c"
#include "segments.bpf.c"
#include "service.bpf.c"
#include "across.bpf.c"
#include "loopback.bpf.c"
#include "connect.bpf.c"
#include "account.bpf.c"
#include "unpaced.h"
#include "accept.bpf.c"
#include "sockops.bpf.c"
#include "guard.bpf.c"
#include "filter.bpf.c"
#include "relay6.bpf.c"
#include "relay.bpf.c"
#include "probe.bpf.c"
#include "steer.bpf.c"
#include "pod.bpf.c"
#include "cross.bpf.c"
#include "capture.bpf.c"
#include "lo.bpf.c"
#include "limit.bpf.c"
#include "names.bpf.c"
#include "hidden.h"
#include "sockopt.h"
#include "groups.bpf.c"
#include "setsockopt.bpf.c"
#include "getsockopt.bpf.c"
#include "list.bpf.c"
#include "proc.bpf.c"
#include "holders.bpf.c"
#include "cut.bpf.c"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Types that only user space names in full: pointers to them keep them in the object's type
 * information, from which bpf2go makes the Go types. */
const struct connection_record *type_connection_record __attribute__((unused));
const struct holder_record *type_holder_record __attribute__((unused));
const struct syn_option *type_syn_option __attribute__((unused));
const enum heddle_path *type_heddle_path __attribute__((unused));
const enum heddle_reason *type_heddle_reason __attribute__((unused));
const enum heddle_protection *type_heddle_protection __attribute__((unused));
const enum sock_tag_flags *type_sock_tag_flags __attribute__((unused));
const enum sock_tag_options *type_sock_tag_options __attribute__((unused));
const enum admission_flags *type_admission_flags __attribute__((unused));
const struct admission *type_admission __attribute__((unused));
const enum endpoint_flags *type_endpoint_flags __attribute__((unused));
const enum heddle_verdict *type_heddle_verdict __attribute__((unused));
const enum policy_flags *type_policy_flags __attribute__((unused));
const enum limit_flags *type_limit_flags __attribute__((unused));
const enum route_flags *type_route_flags __attribute__((unused));

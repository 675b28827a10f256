/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* One object, so that all programs share one set of maps. A file that ends in .bpf.c has hooks,
 * programs that the kernel calls; headers have parts of them. Each file includes what it uses, so
 * these may be in any order. */
#include "include/abi/flow_event.h"
#include "include/abi/path.h"
#include "include/abi/protection.h"
#include "include/abi/reason.h"
#include "include/abi/record.h"
#include "include/abi/syn_option.h"
#include "include/maps.h"

#include "sock/bind.bpf.c"
#include "sock/connect.bpf.c"
#include "sock/getsockopt.bpf.c"
#include "sock/names.bpf.c"
#include "sock/release.bpf.c"
#include "sock/setsockopt.bpf.c"
#include "sock/sockops.bpf.c"

#include "tc/divert.bpf.c"
#include "tc/endpoint.bpf.c"
#include "tc/limit.bpf.c"
#include "tc/lo.bpf.c"
#include "tc/loopback.bpf.c"
#include "tc/overlay.bpf.c"
#include "tc/stack.bpf.c"
#include "tc/underlay.bpf.c"

#include "iter/cut.bpf.c"
#include "iter/list.bpf.c"
#include "iter/proc.bpf.c"
#include "iter/socket_owners.bpf.c"
#include "iter/stack_settings.bpf.c"
#include "iter/unlocked.bpf.c"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Types that only user space names in full: pointers to them keep them in the object's type
 * information, from which bpf2go makes the Go types. */
const struct connection_record *type_connection_record __attribute__((unused));
const struct flow_event *type_flow_event __attribute__((unused));
const enum flow_event_kind *type_flow_event_kind __attribute__((unused));
const struct whole_flow *type_whole_flow __attribute__((unused));
const enum whole_flow_flags *type_whole_flow_flags __attribute__((unused));
const struct socket_owner_record *type_socket_owner_record __attribute__((unused));
const struct socket_record *type_socket_record __attribute__((unused));
const struct syn_option *type_syn_option __attribute__((unused));
const enum neighbour_times *type_neighbour_times __attribute__((unused));
const enum once *type_once __attribute__((unused));
const enum heddle_path *type_heddle_path __attribute__((unused));
const enum heddle_reason *type_heddle_reason __attribute__((unused));
const enum heddle_protection *type_heddle_protection __attribute__((unused));
const enum sock_tag_flags *type_sock_tag_flags __attribute__((unused));
const enum sock_tag_options *type_sock_tag_options __attribute__((unused));
const enum admission_flags *type_admission_flags __attribute__((unused));
const struct admission *type_admission __attribute__((unused));
const struct tagging *type_tagging __attribute__((unused));
const enum endpoint_flags *type_endpoint_flags __attribute__((unused));
const enum heddle_verdict *type_heddle_verdict __attribute__((unused));
const enum policy_flags *type_policy_flags __attribute__((unused));
const enum limit_flags *type_limit_flags __attribute__((unused));
const enum stack_setting *type_stack_setting __attribute__((unused));
const enum route_flags *type_route_flags __attribute__((unused));
const enum service_flags *type_service_flags __attribute__((unused));

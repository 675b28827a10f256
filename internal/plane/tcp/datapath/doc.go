// Package datapath loads, attaches, pins and upgrades Heddle's BPF programs and gives typed access
// to their maps. It is the only importer of cilium/ebpf; nothing else in the agent knows a map's
// layout.
//
// The programs and the types they share with this package are in bpf/; bpf2go turns them into
// heddle_bpfel.go and an object file, both committed, both checked by `make check`.
package datapath

//go:generate go tool bpf2go -go-package datapath -cc clang -target bpfel -type heddle_path -type heddle_reason -type sock_tag -type sock_tag_flags -type sock_tag_options -type admission -type tagging -type admission_flags -type endpoint -type endpoint_flags -type route -type route_key -type route_flags -type flow -type flow_key -type syn_option -type connection_record -type flow_event -type flow_event_kind -type whole_flow -type whole_flow_flags -type socket_owner_record -type socket_record -type account -type port_account -type limit -type limit_side -type limit_flags -type limit_slots -type heddle_verdict -type policy_flags -type class_key -type class_prefix_key -type class_info -type pair_key -type pair_verdict -type port_range_key -type flow_id -type flow_set -type flow_set_key -type stack_settings -type stack_setting -type address -type vtep -type address_pair -type once -type neighbour -type neighbour_times -type mapped_node -type service_flags heddle ../../../../bpf/heddle.bpf.c -- -O2 -mcpu=v3 -Wall -Werror -I../../../../bpf -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -go-package datapath -cc clang -target bpfel lsm ../../../../bpf/lsm.bpf.c -- -O2 -mcpu=v3 -Wall -Werror -I../../../../bpf -I/usr/include/x86_64-linux-gnu

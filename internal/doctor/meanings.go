package doctor

// meaning says what lacking a thing means.
type meaning struct {
	required bool   // Heddle does not work without it
	cost     string // what is lost
	remedy   string // what to do
}

// noIPv6 is what is lost where a node goes on with IPv4 alone.
const noIPv6 = "this node's containers have no IPv6 overlay addresses; IPv4 works, for IPv6 sockets too"

// meanings has an entry for every check. The versions are those of the mainline kernel that has the
// thing.
var meanings = map[string]meaning{
	"privileges": {true, "nothing works, and the checks that need privileges were left out",
		"run as root, in the machine's own user namespace"},
	"kernel": {true, "socket() calls cannot be answered in one step", "boot Linux 5.14 or later, better 6.6 or later"},
	"cgroup2": {true, "BPF programs cannot be attached to the agent's sockets",
		"boot with systemd.unified_cgroup_hierarchy=1, or mount one beside v1: mount -t cgroup2 none /sys/fs/cgroup/unified"},
	"pid_namespace": {false, "containers outside the agent's PID namespace get no sockets of the node",
		"run the agent in the machine's own PID namespace (--pid=host in a container)"},

	"bpf_btf":  {true, "the BPF programs cannot be fitted to this kernel", "use a kernel with CONFIG_DEBUG_INFO_BTF=y"},
	"bpf_maps": {true, "the datapath cannot keep routes, flows and counters", "use a kernel with CONFIG_BPF_SYSCALL=y, 4.11 or later"},
	"bpf_sk_storage": {true, "sockets cannot be tagged with their endpoint",
		"use Linux 5.8 or later with CONFIG_CGROUP_BPF=y and CONFIG_BPF_SYSCALL=y"},
	"bpf_connect": {true, "connects cannot be sent direct", "use Linux 4.17 or later with CONFIG_CGROUP_BPF=y"},
	"bpf_bind":    {true, "binds cannot be moved to the overlay address", "use Linux 4.17 or later with CONFIG_CGROUP_BPF=y"},
	"bpf_getname": {true, "programs would see underlay addresses", "use Linux 5.8 or later with CONFIG_CGROUP_BPF=y"},
	"bpf_sockopt": {true, "containers could set any option on sockets of the node", "use Linux 5.3 or later with CONFIG_CGROUP_BPF=y"},
	"bpf_header_option": {true, "a SYN cannot say which endpoint it is for: no direct connections",
		"use Linux 5.10 or later with CONFIG_CGROUP_BPF=y"},
	"bpf_sk_assign": {true, "direct connections cannot be handed to their listener", "use Linux 5.7 or later with CONFIG_NET_CLS_BPF=y"},
	"bpf_sk_assign_reuseport": {false, "of several listeners that share a port (SO_REUSEPORT) only one gets direct connections",
		"use Linux 6.6 or later"},
	"bpf_loop":             {true, "the datapath, which walks over options and sets by it, does not load", "use Linux 5.17 or later"},
	"bpf_tcp_iterator":     {true, "the datapath, which lists connections by it, does not load", "use Linux 5.9 or later with CONFIG_DEBUG_INFO_BTF=y"},
	"bpf_storage_iterator": {true, "the datapath, which makes containers' /proc/net/tcp by it, does not load", "use Linux 5.9 or later with CONFIG_DEBUG_INFO_BTF=y"},
	"bpf_sock_destroy":     {false, "connections cannot be ended from outside, as when a policy forbids them later", "use Linux 6.5 or later with CONFIG_DEBUG_INFO_BTF=y"},
	"bpf_task_from_pid":    {false, "socket() asks /proc who its caller is, which takes some 5 microseconds longer", "use Linux 6.10 or later"},
	"bpf_lsm": {false, "no second check of what may be done with sockets of the node: the first ones hold, but a container of another runtime that is passed one can list the node's devices, and with CAP_NET_ADMIN change them",
		"use a kernel with CONFIG_BPF_LSM=y that lets root load such programs, booted with bpf in the list lsm="},
	"bpf_jit": {false, "BPF programs are interpreted: every connect, and every packet at the tc programs, is slower",
		"sysctl -w net.core.bpf_jit_enable=1, or use a kernel with CONFIG_BPF_JIT=y"},
	"bpffs": {true, "the datapath cannot outlive the agent: a restart would end all connections",
		"use a kernel with CONFIG_BPF_SYSCALL=y, and let the agent mount (CAP_SYS_ADMIN)"},

	"seccomp_notify": {true, "socket() calls cannot be intercepted",
		"use a kernel with CONFIG_SECCOMP_FILTER=y, 5.14 or later, outside any container that is intercepted itself"},
	"seccomp_addfd": {true, "socket() calls cannot be answered with a socket", "use Linux 5.9 or later"},
	"seccomp_sync_wake_up": {false, "socket() takes about twice as long: caller and agent wake each other across cores",
		"use Linux 6.6 or later"},
	"seccomp_wait_killable": {false, "a signal without SA_RESTART interrupts (EINTR) socket() calls more often: also those that the agent is answering",
		"use Linux 5.19 or later"},

	"net_namespace": {true, "no network namespaces: no containers", "use a kernel with CONFIG_NET_NS=y, and let the agent make them (CAP_SYS_ADMIN)"},
	"net_veth":      {true, "containers cannot be attached to the overlay", "modprobe veth, or use a kernel with CONFIG_VETH"},
	"net_vxlan":     {true, "no overlay between nodes", "modprobe vxlan, or use a kernel with CONFIG_VXLAN"},
	"net_clsact":    {true, "packets cannot be caught before routing", "modprobe sch_ingress, or use a kernel with CONFIG_NET_SCH_INGRESS"},
	"net_cls_bpf":   {true, "packets cannot be handed to BPF programs", "modprobe cls_bpf, or use a kernel with CONFIG_NET_CLS_BPF"},
	"net_rule_fwmark": {true, "packets for sockets of the node cannot be delivered",
		"use a kernel with CONFIG_IP_MULTIPLE_TABLES=y"},
	"net_rule_fwmark_ipv6": {false, noIPv6,
		"use a kernel with CONFIG_IPV6_MULTIPLE_TABLES=y, booted without ipv6.disable=1"},
	"net_nft_masquerade": {true, "containers cannot reach addresses outside the overlay",
		"modprobe nft_masq nft_chain_nat, or use a kernel with CONFIG_NFT_MASQ and CONFIG_NFT_NAT"},
	"net_nft_guards": {true, "containers cannot be kept from the nodes' store",
		"modprobe nft_reject_inet nft_objref, or use a kernel with CONFIG_NFT_REJECT and CONFIG_NFT_OBJREF"},
	"net_nft_socket": {true, "packets of the overlay cannot be told from those for sockets of the node",
		"modprobe nft_socket, or use a kernel with CONFIG_NFT_SOCKET"},
	"net_shape": {false, "no limits on endpoints: `heddle limit set` is refused",
		"modprobe ifb sch_htb, or use a kernel with CONFIG_IFB and CONFIG_NET_SCH_HTB"},
	"net_mirred": {false, "no limits on endpoints: `heddle limit set` is refused",
		"modprobe act_mirred, or use a kernel with CONFIG_NET_ACT_MIRRED"},

	"memlock": {true, "BPF maps cannot be made: this kernel counts them against RLIMIT_MEMLOCK",
		"use Linux 5.11 or later, or raise the limit (LimitMEMLOCK=infinity in the agent's unit)"},
	"nofile": {false, "the agent holds few seccomp listeners, and containers soon get ENFILE from socket()",
		"raise the limit (LimitNOFILE=65536 in the agent's unit)"},
	"sysctls": {true, "the agent cannot make the settings that its devices need",
		"run where /proc/sys is writable (a container needs it mounted read-write)"},
	"ip_forward": {true, "containers reach neither each other's node nor the outside, but for direct connections",
		"sysctl -w net.ipv4.ip_forward=1"},
	"tcp_syncookies": {false, "under a flood of SYNs the node's listeners stop accepting",
		"sysctl -w net.ipv4.tcp_syncookies=1"},
	"tcp_fwmark_accept": {true, "accepted sockets take the mark of a packet instead of their listener's, and their answers go astray",
		"sysctl -w net.ipv4.tcp_fwmark_accept=0"},
	"ipv6": {false, "programs cannot make IPv6 sockets, dual-stack listeners included", "boot without ipv6.disable=1"},
	"ipv6_enabled": {false, noIPv6,
		"sysctl -w net.ipv6.conf.all.disable_ipv6=0, boot without ipv6.disable=1, and start the agent again"},
	"ipv6_forwarding": {false, noIPv6,
		"use Linux 6.17 or later, or make the host a router: give devices that take router advertisements accept_ra=2 first, then sysctl -w net.ipv6.conf.all.forwarding=1, and start the agent again"},
	"overlayfs": {false, "lab containers have no root file system: `heddle lab` and `heddle bench` do not work",
		"modprobe overlay, or use a kernel with CONFIG_OVERLAY_FS"},
	"runc": {true, "no containers can be started through heddle-runtime", "apt-get install runc (1.1 or later)"},
	"verbs_router": {false, "no RDMA devices for containers that ask for them (`heddle endpoints add --verbs`)",
		"install heddle-rdma beside heddled (`make build` builds it), on a kernel with CONFIG_CROSS_MEMORY_ATTACH"},
	"verbs_library": {false, "containers that ask for an RDMA device do not start",
		"install libheddle-verbs.so beside heddle-runtime, or in ../lib/heddle from there (`make build` builds it)"},
	"runc_libseccomp": {false, "a signal without SA_RESTART interrupts (EINTR) socket() calls more often: also those that the agent is answering",
		"use a runc that is built with libseccomp 2.6 or later (runc features: supportedFlags)"},
}

package model

import "fmt"

// Reason names why a packet was dropped, a call refused or a connection not sent direct. The
// numbers are those of enum heddle_reason in bpf/include/abi/reason.h; a test in
// internal/plane/tcp/datapath ties the two. Each is a counter of the datapath, a metric label and a
// line of `heddle status`.
type Reason uint32

// Kind groups reasons by what happened.
type Kind string

// Kinds.
const (
	KindPath     Kind = "path"     // a connection took this path: no fault
	KindFallback Kind = "fallback" // a connection went over the overlay instead of direct
	KindDrop     Kind = "drop"     // a packet was dropped
	KindRefusal  Kind = "refusal"  // a system call was refused
	KindCut      Kind = "cut"      // a live connection was ended
	KindMend     Kind = "mend"     // the agent put right what it found on the node
)

// Kinds lists them, in the order in which they are shown.
var Kinds = []Kind{KindPath, KindFallback, KindDrop, KindRefusal, KindCut, KindMend}

// ReasonInfo describes one Reason.
type ReasonInfo struct {
	Reason Reason
	Name   string // metric label
	Kind   Kind
	Help   string // one sentence for operators
}

// Reasons lists every reason in the order of enum heddle_reason.
var Reasons = []ReasonInfo{
	{0, "none", KindPath, "no reason"},
	{1, "connect_direct", KindPath, "connects sent direct"},
	{2, "connect_local", KindPath, "connects to an intercepted listener on the same node, over lo"},
	{3, "connect_loopback", KindPath, "connects of a container to its own 127.0.0.1 or ::1"},
	{4, "connect_node", KindPath, "connects to the container's own node"},
	{5, "connect_outside", KindPath, "connects to addresses outside the overlay"},
	{6, "accept_direct", KindPath, "connections accepted direct"},
	{7, "accept_local", KindPath, "connections accepted over lo, the overlay or a veth"},
	{8, "deliver_overlay", KindPath, "packets from the overlay device or a veth handed to a node socket"},
	{9, "deliver_node", KindPath, "packets from the node's own stack handed to a node socket: node processes, SYN-ACKs on one node"},
	{10, "relay_opened", KindPath, "direct connections relayed into a container's own namespace (its listener is not intercepted)"},
	{11, "fallback_bound", KindFallback, "socket was bound before it connected, so its source address is fixed"},
	{12, "fallback_node_overlay_only", KindFallback, "peer's node takes no direct connections"},
	{13, "fallback_peer_plain", KindFallback, "peer endpoint is not intercepted"},
	{14, "fallback_local_plain", KindFallback, "peer on the same node has no intercepted listener at that port"},
	{15, "fallback_reconnect", KindFallback, "socket kept the source address of an earlier connect that failed"},
	{16, "drop_option_malformed", KindDrop, "SYN to a direct port with a malformed Heddle option"},
	{17, "drop_option_version", KindDrop, "SYN with an unknown version of the Heddle option"},
	{18, "drop_option_network", KindDrop, "SYN of another Heddle network"},
	{19, "drop_unknown_node", KindDrop, "SYN with a Heddle option from an address that is no known node"},
	{20, "drop_source_not_of_node", KindDrop, "SYN whose overlay source does not live on the node that sent it"},
	{21, "drop_no_endpoint", KindDrop, "SYN for an overlay address that is not on this node"},
	{22, "drop_forged_direct", KindDrop, "packet from a container's own namespace to a direct port of a node, or with a SYN option"},
	{23, "drop_spoofed_source", KindDrop, "packet from a container's own namespace with a source that is not its own, or packet with an overlay source that did not come by the overlay"},
	{24, "drop_relay_conflict", KindDrop, "relayed connection for which no free source port was found behind the relay"},
	{25, "refuse_bind_foreign", KindRefusal, "bind to an address that is not the container's, or connect of a socket that was bound with AF_UNSPEC to loopback (EADDRNOTAVAIL)"},
	{26, "refuse_ipv6_unreachable", KindRefusal, "connect of an IPv6 socket to what it cannot reach: link-local addresses, IPv6 where the network has none, the family that it is not bound to (ENETUNREACH)"},
	{27, "refuse_sockopt", KindRefusal, "socket option outside the allow-list (EPERM)"},
	{28, "refuse_unknown_endpoint", KindRefusal, "socket of an endpoint the agent has removed (ENETDOWN)"},
	{29, "refuse_listen_unbound", KindRefusal, "listen without bind of a socket that is at no address of its container: the listener cannot be reached"},
	{30, "drop_forged_overlay", KindDrop, "packet from a container's own namespace to the overlay's port"},
	{31, "fallback_fastopen", KindFallback, "the program asked for TCP Fast Open, whose cookie takes the option's room in the SYN"},
	{32, "fallback_own_plain", KindFallback, "connect of a container to itself where only a process that is not intercepted listens"},
	{33, "drop_forged_loopback", KindDrop, "packet with an address of a container's loopback that is not its own"},
	{34, "time_wait_ended", KindPath, "connections, direct or within the node, that took the place of one in TIME_WAIT with the same addresses and ports underneath"},
	{35, "cut_unknown_peer", KindCut, "direct connection whose SYN was pushed out of memory, by a flood of others, before it was accepted"},
	{36, "drop_overlay_stranger", KindDrop, "VXLAN packet from an address that is no known node"},
	{37, "drop_overlay_source", KindDrop, "VXLAN packet with something else inside than IP from an overlay address of the node that sent it"},
	{38, "drop_hidden_tcp", KindDrop, "packet from a container's own namespace with its TCP header cut up by fragments or behind IPv6 extension headers"},
	{39, "drop_not_ip", KindDrop, "frame from a container's own namespace that is neither IP nor ARP for its own address"},
	{40, "refuse_store", KindRefusal, "packet of a container to the port of the nodes' store (RST)"},
	{41, "refuse_policy_rejected", KindRefusal, "connect that policy rejects (ECONNREFUSED)"},
	{42, "refuse_policy_dropped", KindRefusal, "connect that policy leaves without an answer (ETIMEDOUT)"},
	{43, "refuse_policy_late", KindRefusal, "connection that a policy forbids which changed while it was being made or accepted (ETIMEDOUT)"},
	{44, "cut_policy", KindCut, "live connection ended because a changed policy forbids it (ECONNABORTED)"},
	{45, "drop_policy_rejected", KindDrop, "packet that policy rejects; its sender is answered by a RST or an ICMP error"},
	{46, "drop_policy_dropped", KindDrop, "packet that policy drops"},
	{47, "drop_undecidable", KindDrop, "packet whose protocol or ports cannot be read while there is policy: a fragment without the first one, too many extension headers"},
	{48, "drop_not_remembered", KindDrop, "SYN that the kernel's table of new connections had no room for at that moment: the sender sends it again"},
	{49, "refuse_socket_quota", KindRefusal, "socket(), or connect() of an accepted socket that was dead, of an endpoint that has as many sockets as it may (ENFILE)"},
	{50, "cut_socket_quota", KindCut, "accepted connection ended because its endpoint has as many sockets as it may"},
	{51, "fallback_unproven", KindFallback, "no probe of the direct path to the peer's node has been answered yet"},
	{52, "fallback_stripped", KindFallback, "SYNs to the peer's node arrive without the Heddle option"},
	{53, "fallback_blocked", KindFallback, "direct ports of the peer's node do not answer"},
	{54, "probe_listener", KindPath, "probes of the direct path from other nodes, given to the agent's listener"},
	{55, "probe_answered", KindPath, "probes of the direct path from other nodes, answered by the program because no agent listens"},
	{56, "cut_path_blocked", KindCut, "connects that were in flight when the direct path was found to be blocked: they end within seconds (ETIMEDOUT)"},
	{57, "refuse_node_port", KindRefusal, "bind to a port of those that the node connects from, when containers hold as many of them as they may (EADDRINUSE)"},
	{58, "drop_forged_error", KindDrop, "ICMP error out of a container about a packet that was not sent to it"},
	{59, "refuse_port_quota", KindRefusal, "bind of an endpoint that holds as many of the node's ephemeral ports as it may (EADDRINUSE)"},
	{60, "cut_port_quota", KindCut, "listener ended because its endpoint holds as many of the node's ephemeral ports as it may, or because its port could not be counted"},
	{61, "refuse_no_backend", KindRefusal, "connect to a service that has no backend (ECONNREFUSED)"},
	{62, "cut_migrated", KindCut, "connection, or listener, that was still there when its endpoint migrated to another node"},
	{63, "refuse_device", KindRefusal, "connect of a socket that is bound to a device which does not lead there (ETIMEDOUT, ENODEV, ENETUNREACH), or bind to an IPv6 address that the device does not have"},
	{64, "mend_stray_entry", KindMend, "map entries of endpoints that are not there, left by an agent that was killed, found and removed"},
	{65, "drop_forged_checksum", KindDrop, "frame out of a container that has the kernel write a checksum where none belongs"},
	{66, "fallback_crossed", KindFallback, "socket bound to [::], which is at an IPv4 address underneath, to an IPv6 destination; or bound with AF_UNSPEC"},
	{67, "refuse_no_storage", KindRefusal, "bind, or connect to a service, of a socket that the kernel has no room to remember it by (ENOBUFS)"},
	{68, "cut_relay_forgotten", KindCut, "relayed connection forgotten because whoever opened it has more of them than a node remembers of one"},
	{69, "refuse_listener_gone", KindRefusal, "SYN within the node, or last ACK of a handshake, for a container where nothing of it listens any more (RST)"},
	{70, "drop_syn_waits", KindDrop, "SYN within the node that was sent again while its answer is under way, or that a connection in TIME_WAIT is in the way of"},
}

// String gives the reason's metric label.
func (r Reason) String() string {
	if int(r) < len(Reasons) {
		return Reasons[r].Name
	}
	return fmt.Sprintf("reason(%d)", uint32(r))
}

package model

import (
	"fmt"
	"strings"
)

// Protection is one thing that keeps a hostile container from the node, from other containers or
// from the network. All are always in force in the programs that are built for use. Agents built
// with the tag "attack" can do without some, so that the attack suite shows that what it tries
// fails because of them. The numbers are those of enum heddle_protection in
// bpf/include/abi/protection.h; a test in internal/plane/tcp/datapath ties the two.
type Protection uint8

// Protections.
const (
	ProtectBind              Protection = 0
	ProtectSource            Protection = 1
	ProtectDirectPorts       Protection = 2
	ProtectSocketOptions     Protection = 3
	ProtectNetns             Protection = 4
	ProtectUnknownPeer       Protection = 5
	ProtectNodeAddress       Protection = 6
	ProtectIoctls            Protection = 7
	ProtectStore             Protection = 8
	ProtectStoreCertificates Protection = 9
	ProtectOverlay           Protection = 10
	ProtectFrames            Protection = 11
	ProtectIncarnation       Protection = 12
	ProtectSocketQuota       Protection = 13
	ProtectSYNSender         Protection = 14
	ProtectListener          Protection = 15
	ProtectWildcard          Protection = 16
	ProtectLoopback          Protection = 17
	ProtectUser              Protection = 18
	ProtectPorts             Protection = 19
	ProtectErrors            Protection = 20
	ProtectProbes            Protection = 21
	ProtectLate              Protection = 22
	ProtectPortQuota         Protection = 23
	ProtectFlowMemory        Protection = 24
	ProtectLimits            Protection = 25
	ProtectMigrated          Protection = 26
	ProtectAgentOption       Protection = 27
	ProtectBatches           Protection = 28
	ProtectHooks             Protection = 29
	ProtectChecksum          Protection = 30
	ProtectOverlayPort       Protection = 31
	ProtectProcNet           Protection = 32
	ProtectLocks             Protection = 33
	ProtectPeerKeys          Protection = 34
	ProtectFlowShare         Protection = 35
	ProtectPublished         Protection = 36
	ProtectServices          Protection = 37
)

// ProtectionInfo describes one Protection.
type ProtectionInfo struct {
	Protection Protection
	Name       string // as HEDDLE_WITHOUT has it
	Help       string // what holds thanks to it
}

// Protections lists every protection in the order of enum heddle_protection. There are 64 at most.
var Protections = []ProtectionInfo{
	{ProtectBind, "bind", "a container binds its own addresses only"},
	{ProtectSource, "source", "packets that leave a container's namespace have its source address"},
	{ProtectDirectPorts, "direct_ports", "packets of a container's namespace do not reach direct ports of nodes, and have no SYN option"},
	{ProtectSocketOptions, "socket_options", "socket options that reach or show the node are refused or kept"},
	{ProtectNetns, "netns", "only threads in an endpoint's network namespace get its sockets"},
	{ProtectUnknownPeer, "unknown_peer", "no direct connection lives whose peer is not known"},
	{ProtectNodeAddress, "node_address", "a container that connects to an address of its node does not pass for the node"},
	{ProtectIoctls, "ioctls", "ioctls of sockets act on the caller's network namespace with the caller's rights"},
	{ProtectStore, "store", "containers do not reach the nodes' store"},
	{ProtectStoreCertificates, "store_certificates", "the embedded store answers to holders of the network's certificate only"},
	{ProtectOverlay, "overlay", "the overlay is taken from known nodes only, with a source of theirs inside"},
	{ProtectFrames, "frames", "no frame of a container passes unread: VLAN tags, cut-up TCP headers, ARP for others"},
	{ProtectIncarnation, "incarnation", "a socket that outlives its endpoint is not taken for one of the next with its id"},
	{ProtectSocketQuota, "socket_quota", "an endpoint has no more sockets than it may"},
	{ProtectSYNSender, "syn_sender", "SYN options are taken from known nodes only, for sources of their own prefixes"},
	{ProtectListener, "listener", "a packet for a container is given to its own sockets only, not to processes of the node on a wildcard"},
	{ProtectWildcard, "wildcard", "a SYN within the node, the first one or one sent again, is given to sockets of the container it is for only, not to processes of the node on a wildcard"},
	{ProtectLoopback, "loopback", "packets of a container do not reach the loopback addresses of the node or of other containers"},
	{ProtectUser, "user", "a node socket has the user of the process that asked for it: SO_REUSEPORT is for one user"},
	{ProtectPorts, "ports", "a container cannot take all the ports that the node connects from"},
	{ProtectErrors, "errors", "an ICMP error that leaves a container is about a packet that was sent to it"},
	{ProtectProbes, "probes", "containers' connects that fail do not show that a direct path fails: only probes do"},
	{ProtectLate, "late", "what connect() was allowed is decided again when its SYN is sent, when it is accepted, and when rules change"},
	{ProtectPortQuota, "port_quota", "a container cannot take all the ports that the node's other containers connect from"},
	{ProtectFlowMemory, "flow_memory", "no flood of one container's makes the node forget who opened connections of others, or whom they asked"},
	{ProtectLimits, "limits", "a container does not choose its own way past the caps of its operator"},
	{ProtectMigrated, "migrated", "no socket of an endpoint that has migrated goes on on the node that it left"},
	{ProtectAgentOption, "agent_option", "only the agent makes sockets an endpoint's and has them counted, and learns by that what a process of the node is"},
	{ProtectBatches, "batches", "only containers that may have sockets by the batch get them, so many, by a socket that leads to no process of the node"},
	{ProtectHooks, "hooks", "sockets keep their hooks when the agent's cgroup is removed and made anew"},
	{ProtectChecksum, "checksum", "what the kernel has yet to do to a packet of a container changes nothing that was judged"},
	{ProtectOverlayPort, "overlay_port", "containers send nothing to the overlay's port, and take nothing that is for it"},
	{ProtectProcNet, "proc_net", "a program reads in /proc/net/tcp the sockets of the endpoint in whose network namespace it is, and no others"},
	{ProtectLocks, "locks", "a program that holds the lock of its socket for ever keeps neither cuts of others' connections nor lists waiting"},
	{ProtectPeerKeys, "peer_keys", "an agent answers over the network to agents with the key of one of its network's nodes only"},
	{ProtectFlowShare, "flow_share", "no flood of one container's takes the room of what is told of others' connections and packets"},
	{ProtectPublished, "published", "a port of the node leads to a container where and while it is published: at 127.0.0.1 to the node alone, and after it is withdrawn nobody"},
	{ProtectServices, "services", "what a container sends to a service's address leaves the node as one of its backends' only, which policy has been asked about"},
}

// String gives the protection's name.
func (p Protection) String() string {
	if int(p) < len(Protections) {
		return Protections[p].Name
	}
	return fmt.Sprintf("protection(%d)", uint8(p))
}

// ParseProtections gives the set of the protections named in list, separated by commas: bit i for
// Protection i. An empty list is the empty set.
func ParseProtections(list string) (set uint64, err error) {
	if list == "" {
		return 0, nil
	}
next:
	for name := range strings.SplitSeq(list, ",") {
		for _, p := range Protections {
			if p.Name == name {
				set |= 1 << p.Protection
				continue next
			}
		}
		return 0, fmt.Errorf("no protection is called %q", name)
	}
	return set, nil
}

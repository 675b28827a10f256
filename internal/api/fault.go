package api

import "time"

// FaultReason names what is wrong.
type FaultReason string

// The reasons of faults that are no plane's alone, which each plane declares (plane.Declaration).
// docs/protocols/agent-api.md documents each; a test ties the two.
const (
	// FaultEndpoint: an endpoint of an earlier agent could not be taken over. Its container keeps
	// what it had, if its device was there, or has no network.
	FaultEndpoint FaultReason = "endpoint_not_restored"
	// FaultAddrs: the store does not take an endpoint's addresses of the families that its node has
	// now.
	FaultAddrs FaultReason = "addresses_not_stored"
	// FaultLimits: limits could not be taken over. Those in force before stay; where parts of them
	// are gone, the packets of limited endpoints are dropped.
	FaultLimits FaultReason = "limits_not_restored"
	// FaultLimitsTighter: there is no place left for an endpoint's caps a connection, so that all
	// its connections share one.
	FaultLimitsTighter FaultReason = "limits_tighter"
	// FaultStack: this node cannot serve an endpoint's stack profile as it stands. The endpoint has
	// what the profile's fallback says.
	FaultStack FaultReason = "stack_not_served"
	// FaultExport: flows do not reach the collector of OpenTelemetry, or not all of them.
	FaultExport FaultReason = "flows_not_exported"
	// FaultKey: other nodes' agents have not said for a minute that they accept the node's next key
	// of encryption.
	FaultKey FaultReason = "key_not_changed"
	// FaultEncryption: the device of encryption is gone, or cannot be read.
	FaultEncryption FaultReason = "encryption_device"
	// FaultFirewall: Heddle's nftables table is gone or changed, and could not be written again.
	FaultFirewall FaultReason = "firewall_not_restored"
	// FaultRouting: so with the node's routing rules and routes.
	FaultRouting FaultReason = "routing_not_restored"
	// FaultFirewallFought: another program takes the table away again and again.
	FaultFirewallFought FaultReason = "firewall_fought"
	// FaultRoutingFought: so with the node's routing rules and routes.
	FaultRoutingFought FaultReason = "routing_fought"
	// FaultKeptOnce: the service manager's store of descriptors has no room for listeners of more
	// processes in containers. The fd keeper alone has them.
	FaultKeptOnce FaultReason = "listeners_kept_once"
	// FaultNotResumed: the fd keeper does not give what an earlier agent left with it.
	FaultNotResumed FaultReason = "listeners_not_resumed"
)

// FaultReasons lists them.
var FaultReasons = []FaultReason{FaultEndpoint, FaultLimits, FaultLimitsTighter, FaultStack, FaultExport, FaultKey, FaultEncryption, FaultFirewall, FaultRouting, FaultFirewallFought, FaultRoutingFought, FaultKeptOnce, FaultNotResumed, FaultAddrs}

// Fault is something on this node that is not as it should be. The agent tries it again until it
// is.
type Fault struct {
	Reason FaultReason `json:"reason"`
	// Endpoint is the name of that which is affected; "" for all of the node.
	Endpoint string `json:"endpoint,omitempty"`
	// Error is what the last try met.
	Error string    `json:"error"`
	Since time.Time `json:"since"`
}

// MendedThing is a part of the node's network that the agent puts back when others take it away.
type MendedThing string

// Such parts: Heddle's nftables table; its routing rules, and routes.
const (
	MendedFirewall MendedThing = "nftables"
	MendedRouting  MendedThing = "routing"
)

// Reason gives the name of the reason by which it is counted.
func (t MendedThing) Reason() string {
	if t == MendedFirewall {
		return "mend_firewall"
	}
	return "mend_routing"
}

// Fault gives what is said while it cannot be put back.
func (t MendedThing) Fault() FaultReason {
	if t == MendedFirewall {
		return FaultFirewall
	}
	return FaultRouting
}

// Fought gives what is said while it is taken away again and again.
func (t MendedThing) Fought() FaultReason {
	if t == MendedFirewall {
		return FaultFirewallFought
	}
	return FaultRoutingFought
}

// Mended says that something was put back since the agent's start.
type Mended struct {
	What MendedThing `json:"what"`
	// Times is how often, Last when last; the rest is of that time.
	Times uint64    `json:"times"`
	Last  time.Time `json:"last"`
	// Gone is what was not there.
	Gone string `json:"gone"`
	// By is the process that had changed rules of nftables before; "" if that is not known.
	By string `json:"by,omitempty"`
}

package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// DefaultSocket is where a node's agent listens unless it is told otherwise.
const DefaultSocket = "/run/heddle/api.sock"

// Version is the path prefix of everything but /metrics. It changes when a change would break a
// client.
const Version = "v1"

// Agent is what the server needs of the node's agent. Implementations are called from many
// goroutines at once. An error that is, or wraps, an [*Error] keeps its code on the wire; every
// other is CodeInternal.
type Agent interface {
	// Status reports the node's state, counters and probed features.
	Status(ctx context.Context) (Status, error)
	// Endpoints lists this node's endpoints.
	Endpoints(ctx context.Context) ([]model.Endpoint, error)
	// NetworkEndpoints lists a page of the endpoints of all nodes, as this agent last heard of it.
	NetworkEndpoints(ctx context.Context, q EndpointQuery) (EndpointPage, error)
	// CreateEndpoint attaches a container. It is idempotent: the same name, netns_path and
	// intercepted give the endpoint that is there already. The same name with others is
	// CodeConflict.
	CreateEndpoint(ctx context.Context, req EndpointRequest) (model.Endpoint, error)
	// DeleteEndpoint detaches a container and gives its addresses back; or ends a migration to this
	// node that nothing has taken up. ErrNotFound if there is neither of that name.
	DeleteEndpoint(ctx context.Context, name string) error
	// EndpointDevice looks up how an endpoint is attached now. ErrNotFound if there is none of that
	// name.
	EndpointDevice(ctx context.Context, name string) (EndpointDevice, error)
	// SetLimits holds an endpoint to limits, in place of those it had, and returns it; the zero
	// Limits lift them. ErrNotFound if there is none of that name, ErrConflict (IsChanged) if it
	// had others than was said.
	SetLimits(ctx context.Context, name string, change LimitsChange) (model.Endpoint, error)
	// SetVerbs says what an endpoint has of the verbs plane, and returns it: an endpoint that wants
	// verbs has a socket for its containers when it returns. ErrNotFound if there is none of that
	// name, CodeUnavailable if the node cannot have a router, ErrConflict (IsChanged) as SetLimits.
	SetVerbs(ctx context.Context, name string, change VerbsChange) (model.Endpoint, error)
	// SetPorts makes ports of this node lead to an endpoint, in place of those that did, and
	// returns it: requests without a host port, or with a range, get one that is free. ErrNotFound
	// if there is no endpoint of that name, CodeConflict if somebody has a port; then nothing has
	// changed.
	SetPorts(ctx context.Context, name string, ports []model.PortRequest) (model.Endpoint, error)
	// LimitUse reports the limits in force on this node's endpoints and what waited for them.
	LimitUse(ctx context.Context) ([]model.LimitUse, error)
	// Nodes lists every node of the network, this one included.
	Nodes(ctx context.Context) ([]Node, error)
	// AskNode asks the agent of another node for target, one of PeerPaths with a query, and gives
	// its answer, whose body is the caller's to close. ErrNotFound if there is no such node,
	// CodeUnsupported if its agent answers no others, CodeUnavailable if it does not answer.
	AskNode(ctx context.Context, node, target string) (*http.Response, error)
	// RotateKey has the node take another key for what it encrypts, when the others have accepted
	// it. CodeUnsupported if it does not encrypt.
	RotateKey(ctx context.Context) (Encryption, error)
	// AcceptedKeys says which keys of another node the kernel accepts; none if it has none.
	// CodeUnsupported if this node does not encrypt.
	AcceptedKeys(ctx context.Context, node string) (AcceptedKeys, error)
	// ForgetNode removes a node that is gone, with its endpoints. ErrNotFound if there is none of
	// that name, CodeConflict if its agent lives.
	ForgetNode(ctx context.Context, name string) error
	// Connections lists the live TCP sockets of this node's endpoints. ErrNotFound if the filter
	// names an endpoint that is not there.
	Connections(ctx context.Context, filter ConnectionFilter) ([]model.Connection, error)
	// Flows gives emit the kept flows that the request's filter chooses, oldest first, and with
	// Follow those that come until ctx ends. A filter of a path or reason that the node does not
	// have is CodeInvalid, one follower too many CodeExhausted. It ends when emit fails.
	Flows(ctx context.Context, req FlowRequest, emit func(FlowLine) error) error
	// Trace makes a TCP connection in the name of an endpoint of this node, ends it at once, and
	// says what became of it and why. ErrNotFound if there is no such endpoint, or destination;
	// CodeUnsupported if the endpoint is not intercepted.
	Trace(ctx context.Context, req TraceRequest) (Trace, error)
	// Traffic reports what the sockets of each of this node's endpoints did.
	Traffic(ctx context.Context) ([]model.Traffic, error)
	// LabelEndpoint changes labels of a live endpoint; when it returns, this node enforces what
	// they mean. ErrNotFound if there is none of that name on this node.
	LabelEndpoint(ctx context.Context, name string, req LabelRequest) (model.Endpoint, error)
	// Migrate gives an endpoint, whose container has been stopped, with its address to another
	// node, where an endpoint of its name, or of its address, takes it up. It may be repeated.
	// ErrNotFound if there is no endpoint of that name and none that this node gave up or is to
	// take up; CodeConflict if it cannot go: it is in use, or that node has one of its name.
	Migrate(ctx context.Context, name string, req MigrateRequest) (Migration, error)
	// Moves lists the addresses that have moved to other nodes than those whose prefixes they are
	// in.
	Moves(ctx context.Context) ([]Move, error)
	// Policies lists the network's policies and the namespaces that somebody described.
	Policies(ctx context.Context) (PolicyDocuments, error)
	// EditPolicies makes all changes or none; when it returns, this node enforces them. It may be
	// repeated. What is to be deleted and is not there is CodeNotFound, what is too much
	// CodeExhausted.
	EditPolicies(ctx context.Context, edit PolicyEdit) ([]PolicyOutcome, error)
	// Services lists the services in force on this node, sorted by address.
	Services(ctx context.Context) ([]model.Service, error)
	// EditServices changes this node's services. Each change is in force by itself: after an error
	// some may be. It may be repeated. What is too much is CodeExhausted.
	EditServices(ctx context.Context, edit ServiceEdit) error
	// Stacks lists the network's stack profiles and congestion controls, and which of this node's
	// endpoints has which.
	Stacks(ctx context.Context) (Stacks, error)
	// EditStacks makes all changes or none; when it returns, this node's endpoints have what they
	// lead to. It may be repeated. A congestion control that this node's kernel refuses is
	// CodeInvalid; what is to be deleted and is not there is CodeNotFound, and what a profile names
	// CodeConflict.
	EditStacks(ctx context.Context, edit StackEdit) ([]PolicyOutcome, error)
	// RDMA reports the devices and queue pairs of this node's endpoints.
	RDMA(ctx context.Context) (RDMA, error)
	// ExplainPolicy says what the rules, as this agent knows them, make of a connection.
	ExplainPolicy(ctx context.Context, q ExplainRequest) (Explanation, error)
}

// Node is a node with what is known of its being there.
type Node struct {
	model.Node
	Presence
}

// Presence is what is known of a node's being there.
type Presence struct {
	State NodeState `json:"state"`
	// Since is when its agent took the node's name, or was noticed to be gone; zero if nobody has
	// noted that yet.
	Since time.Time `json:"since,omitzero"`
	// Seen is when a node whose agent is gone was last found to answer; zero: not since.
	Seen time.Time `json:"seen,omitzero"`
	// Endpoints is how many endpoints the node has.
	Endpoints int `json:"endpoints"`
}

// MarshalJSON writes the members of both in one object.
func (n Node) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		model.NodeMembers
		Presence
	}{n.Members(), n.Presence})
}

// UnmarshalJSON reads them.
func (n *Node) UnmarshalJSON(b []byte) error {
	return errors.Join(json.Unmarshal(b, &n.Node), json.Unmarshal(b, &n.Presence))
}

// NodeState says whether a node is there.
type NodeState string

// The states of a node. What is away serves connections, but takes no part in the network's
// changes.
const (
	NodeLive NodeState = "live" // its agent is there
	NodeAway NodeState = "away" // its agent does not run or does not reach the store; the node answers
	NodeDead NodeState = "dead" // neither agent nor node answers
)

// EndpointRequest asks for an endpoint. See Validate for what is accepted.
type EndpointRequest struct {
	// Name is unique on the node, "n1/c1" or "namespace/pod".
	Name string `json:"name"`
	// NetnsPath is the absolute path of the container's network namespace.
	NetnsPath string `json:"netns_path"`
	// Intercepted says that the container's socket() calls reach the agent.
	Intercepted bool `json:"intercepted"`
	// Verbs asks for an RDMA device; the zero value for none.
	Verbs model.VerbsEndpoint `json:"verbs,omitzero"`
	// Addr asks for this overlay address, of either family; the zero Addr leaves the choice to the
	// agent.
	Addr netip.Addr `json:"addr,omitzero"`
	// Labels are the operator's, for policy.
	Labels map[string]string `json:"labels,omitempty"`
	// Device is the name of the container's device; "" is eth0.
	Device string `json:"device,omitempty"`
	// Adopted adopts a device and an address, Addr, that another network has given the container;
	// nil makes Heddle's own.
	Adopted *model.Adopted `json:"carried,omitempty"`
	// CNI is kept with the endpoint; nil for one that no CNI runtime asks for.
	CNI *model.CNIAttachment `json:"cni,omitempty"`
	// Ports of the node are to lead to it.
	Ports []model.PortRequest `json:"ports,omitempty"`
	// Limits hold from its first packet on; the zero value for none.
	Limits model.Limits `json:"limits,omitzero"`
}

// Planes gives what is asked of each plane.
func (r EndpointRequest) Planes() model.EndpointPlanes {
	return model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: r.Intercepted}, Verbs: model.VerbsRecord{VerbsEndpoint: r.Verbs}}
}

// EndpointDevice is how an endpoint is attached.
type EndpointDevice struct {
	// Name and MAC are those of the container's device, NodeName and NodeMAC those of its other end
	// in the node's namespace.
	Name     string `json:"name"`
	MAC      string `json:"mac"`
	NodeName string `json:"node_name"`
	NodeMAC  string `json:"node_mac"`
	// MTU is that of both ends, in bytes; 0 if the container's device is not there.
	MTU int `json:"mtu"`
	// Gateways are the node's own overlay addresses: one for each family of the endpoint's
	// addresses.
	Gateways []netip.Addr `json:"gateways"`
	// Problems are what the kernel lacks of what the endpoint should have; empty if all is there.
	Problems []string `json:"problems,omitempty"`
}

// ConnectionFilter narrows Connections.
type ConnectionFilter struct {
	// Endpoint keeps the connections of the endpoint of that name only; "" keeps all.
	Endpoint string
	// Listeners adds listening sockets, which are left out otherwise.
	Listeners bool
}

// Status is what an agent says of itself and its node.
type Status struct {
	Node    model.Node `json:"node"`
	Network Network    `json:"network"`
	Version string     `json:"version"`
	PID     int        `json:"pid"`
	Started time.Time  `json:"started"`
	// Underlay is the device that has the address by which other nodes reach this one.
	Underlay Underlay `json:"underlay"`
	IPv6     IPv6     `json:"ipv6"`
	Store    Store    `json:"store"`
	// Encryption is nil where neither this node nor another encrypts.
	Encryption *Encryption `json:"encryption,omitempty"`
	Endpoints  int         `json:"endpoints"` // on this node
	Peers      int         `json:"peers"`     // other nodes of the network
	// PeersAway names those of them whose agents do not run, or do not reach the store.
	PeersAway []string `json:"peers_away,omitempty"`
	// Direct says to which of them connections can be direct, as probes have shown.
	Direct       model.DirectPaths `json:"direct_paths"`
	Interception Interception      `json:"interception"`
	Packets      Packets           `json:"packets"`
	// Firewall is nil where no node's forward chain is to see connections.
	Firewall *Firewall `json:"firewall,omitempty"`
	Policy   Policy    `json:"policy"`
	// Router is that of the verbs plane; nil if the agent has no such plane.
	Router *Router   `json:"router,omitempty"`
	Flows  FlowStats `json:"flows"`
	// Counters has one entry for every reason that the planes declare, plane by plane.
	Counters []Counter `json:"counters"`
	// Faults are what is not as it should be on this node, and is tried again.
	Faults []Fault `json:"faults,omitempty"`
	// Mended is what others have taken away of the node's network, and the agent has put back.
	Mended []Mended `json:"mended,omitempty"`
	// FaultReasons are those that there may be, for the metrics.
	FaultReasons []FaultReason `json:"-"`
	// Features are the outcomes of the probes that the agent ran at its start.
	Features []Check `json:"features"`
	// Omitted says of which lists how many entries are missing, where somebody asked for few.
	Omitted map[string]int `json:"omitted,omitempty"`
}

// Underlay is the device of the network that joins the nodes. MTUs are in bytes.
type Underlay struct {
	Device string `json:"device"` // "": it is gone
	MTU    int    `json:"mtu"`
	// OverlayMTU is the largest packet that the overlay carries, by what the device's MTU was when
	// the agent started.
	OverlayMTU int `json:"overlay_mtu"`
	// Narrowed says that such packets are too large for the device now: they travel in fragments.
	Narrowed bool `json:"narrowed,omitempty"`
}

// Firewall says how connections pass the nodes' forward chains.
type Firewall struct {
	// Seconds is for how long what has passed this node's goes past them; 0: only other nodes' are
	// to see connections.
	Seconds float64 `json:"seconds"`
	// Live says what becomes of live connections that they forbid. Forbidden are those that are
	// kept.
	Live      model.FirewallLive `json:"live"`
	Forbidden []model.Forbidden  `json:"forbidden,omitempty"`
}

// Packets says how packets between containers go that node sockets do not carry.
type Packets struct {
	Mode model.PacketMode `json:"mode"`
	// Redirected: past the node's stack. Else Reason says why not.
	Redirected bool   `json:"redirected"`
	Reason     string `json:"reason,omitempty"`
	// DeviceReason says why, of redirected packets, those between nodes pass the overlay's device
	// and the node's own hooks; "" if they pass neither.
	DeviceReason string `json:"device_reason,omitempty"`
	// Tunnel says whether packets to other nodes travel in VXLAN always; Native is the number of
	// nodes to which they go without now.
	Tunnel model.TunnelMode `json:"tunnel"`
	Native int              `json:"native"`
}

// Router is the state of heddle-rdma.
type Router struct {
	State RouterState `json:"state"`
	// PID is its process; 0 if it does not run.
	PID int `json:"pid,omitempty"`
	// Endpoints is how many want verbs.
	Endpoints int `json:"endpoints"`
	// Ended is how many routers have ended since the agent's start.
	Ended uint64 `json:"ended"`
	// Old are routers of other builds, which end with the last device of their endpoints.
	Old []OldRouter `json:"old,omitempty"`
}

// OldRouter is one whose place another one has taken.
type OldRouter struct {
	PID int `json:"pid"`
	// Endpoints is how many it still serves.
	Endpoints int `json:"endpoints"`
}

// RouterState says whether a router runs.
type RouterState string

// The states of a router.
const (
	RouterNone RouterState = "none" // no endpoint wants one, and none was there
	RouterRuns RouterState = "runs"
	RouterDown RouterState = "down" // the fault verbs_router says why
)

// Network holds the parameters that all nodes of the Heddle network share.
type Network struct {
	ID model.NetworkID `json:"id"`
	// Pool are the prefixes all nodes' prefixes are taken from.
	Pool []netip.Prefix `json:"pool"`
	// Prefix6 makes IPv6 overlay addresses of IPv4 ones; the zero Prefix in an IPv4-only network.
	Prefix6 netip.Prefix `json:"prefix6,omitzero"`
	// VNI is the VXLAN network identifier.
	VNI uint32 `json:"vni"`
	// VXLANPort is the UDP port of the overlay devices, in host byte order.
	VXLANPort uint16 `json:"vxlan_port"`
}

// IPv6 says whether this node's endpoints have IPv6 overlay addresses.
type IPv6 struct {
	Enabled bool `json:"enabled"`
	// Prefixes are the node's IPv6 overlay prefixes.
	Prefixes []netip.Prefix `json:"prefixes,omitempty"`
	// Reason names why not: IPv6NetworkOff, "ipv6_mtu" or a check of `heddle doctor`. Detail says
	// more.
	Reason string `json:"reason,omitempty"`
	Detail string `json:"detail,omitempty"`
}

// IPv6NetworkOff is the reason of nodes of an IPv4-only network.
const IPv6NetworkOff = "network_ipv4_only"

// Store is the state of the agent's connection to the network's store.
type Store struct {
	// Kind is "embedded" or "etcd".
	Kind string `json:"kind"`
	// Endpoints are the addresses of the etcd members the agent uses.
	Endpoints []string `json:"endpoints"`
	// Healthy is false while the agent works from what it last saw.
	Healthy bool `json:"healthy"`
	// Revision is the store revision the agent has applied.
	Revision int64 `json:"revision"`
	// Error is why the store is not healthy.
	Error string `json:"error,omitempty"`
}

// Interception counts what became of trapped system calls since the agent started.
type Interception struct {
	// Listeners is the number of seccomp listeners held: one a container or exec'd process tree.
	Listeners int `json:"listeners"`
	// Readers is the number of threads that answer calls or wait for one: few, one for each
	// listener that had a call of late, more while callers have to wait.
	Readers int `json:"readers"`
	// Answered calls were given a socket of the node (or an ioctl's answer).
	Answered uint64 `json:"answered"`
	// Continued calls were left to the kernel: not TCP.
	Continued uint64 `json:"continued"`
	// Ioctls of network devices were made by the agent for their callers.
	Ioctls uint64 `json:"ioctls"`
	// EndpointSockets is how many TCP sockets an endpoint may have.
	EndpointSockets uint64 `json:"endpoint_sockets"`
	// EndpointPorts is how many of the node's ephemeral ports an endpoint may hold by bind or
	// listen.
	EndpointPorts uint64 `json:"endpoint_ports"`
	// Failed calls, by cause.
	Failed map[string]uint64 `json:"failed"`
	// PremadeHits are answers with a socket made ahead of need, PremadeMisses those without.
	PremadeHits   uint64 `json:"premade_hits"`
	PremadeMisses uint64 `json:"premade_misses"`
	// Batches are calls answered with a batch of sockets, which count neither as Answered nor as
	// premade (but for one in which an agent was killed, which the next cannot tell); only
	// containers that were started with a pool of sockets get them. BatchSockets are the sockets in
	// them.
	Batches      uint64 `json:"batches"`
	BatchSockets uint64 `json:"batch_sockets"`
	// Unguarded are processes that hold sockets of endpoints and are neither the node's nor under a
	// listener: what they ask of one by ioctl() is answered by the node, unless BPF LSM keeps them
	// from it.
	Unguarded []model.SocketOwner `json:"unguarded,omitempty"`
}

// MarshalJSON adds the names that Batches and BatchSockets had before, for one release.
func (in Interception) MarshalJSON() ([]byte, error) {
	type named Interception
	return json.Marshal(struct {
		named
		Crates        uint64 `json:"crates"`
		CratedSockets uint64 `json:"crated_sockets"`
	}{named(in), in.Batches, in.BatchSockets})
}

// Counter is the count of one model.Reason. Those of the TCP plane count since the datapath was
// loaded and survive agent restarts.
type Counter struct {
	Name  string     `json:"name"`
	Kind  model.Kind `json:"kind"`
	Help  string     `json:"help"`
	Value uint64     `json:"value"`
}

// CountersOf gives the counter of each of reasons; value gives the count of the one at an index.
func CountersOf(reasons []model.Reason, value func(i int) uint64) []Counter {
	cs := make([]Counter, len(reasons))
	for i, r := range reasons {
		cs[i] = Counter{Name: r.Name, Kind: r.Kind, Help: r.Help, Value: value(i)}
	}
	return cs
}

// CheckStatus says how a checked feature stands.
type CheckStatus string

// The states of a check.
const (
	CheckOK       CheckStatus = "ok"       // there
	CheckDegraded CheckStatus = "degraded" // Heddle works without it, at Cost
	CheckMissing  CheckStatus = "missing"  // Heddle does not work without it
)

// Check is the outcome of probing one kernel feature or setting; internal/doctor makes them.
type Check struct {
	Name   string      `json:"name"`
	Status CheckStatus `json:"status"`
	// Detail is what was found.
	Detail string `json:"detail"`
	// Cost is what is lost; empty when Status is CheckOK.
	Cost string `json:"cost,omitempty"`
	// Remedy is what to do about it; empty when Status is CheckOK.
	Remedy string `json:"remedy,omitempty"`
}

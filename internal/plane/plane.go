// Package plane says what a plane is: one way in which the endpoints of a node communicate, with
// state of its own in the kernel or in other processes. The agent (internal/node) composes planes:
// it makes endpoints and tells each plane of them, of the network, of policy and of limits, and
// asks each for what it reports.
package plane

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/trap"
)

// Plane is one plane of a node.
type Plane interface {
	// Name is the plane's, for logs and errors: that of its records in model.EndpointPlanes and
	// model.NodePlanes.
	Name() string
	Endpoints
	Network
	Policy
	Limits
	Reports
	// Run does what the plane does by itself until ctx ends. It is called once.
	Run(ctx context.Context) error
	// Close gives up what the plane has open. What endpoints have under way goes on.
	Close() error
}

// Endpoints is how a plane hears of the node's endpoints. One goroutine at a time calls it, but for
// CutLeaving, which any may call.
type Endpoints interface {
	// Accepts refuses what an endpoint is to have of the plane if the node cannot give it: an
	// *api.Error that names the field. It is asked before an endpoint is made or changed, and not
	// of those that there are. Any goroutine may call it.
	Accepts(wanted model.EndpointPlanes) error
	// Guard prepares the node's side of an endpoint's device before anything can pass by it. It may
	// be repeated.
	Guard(ifindex int) error
	// Await makes an endpoint known whose device, with that index, waits on the node for its
	// container.
	Await(e model.Endpoint, ifindex int) error
	// Attach makes an endpoint known that has its device. It may be repeated, also for the endpoint
	// of an earlier agent: what goes on there then goes on. What the endpoint has of the plane may
	// have changed.
	Attach(e model.Endpoint, dev netcfg.EndpointDevice) error
	// Recall reports whether calls of an earlier agent's endpoint, in the network namespace with
	// that inode, can be answered before Attach, by what that agent left.
	Recall(e model.Endpoint, netns uint64) bool
	// LeaveNetns says that endpoint id is in no network namespace any more: another one has the
	// number of its.
	LeaveNetns(id model.EndpointID) error
	// Detach undoes Await and Attach; what was not done is no error. Trapped calls of the endpoint
	// are refused from before it.
	Detach(e model.Endpoint) error
	// Keep removes what there is of endpoints that are not in keep, and says where how much that
	// was.
	Keep(keep map[model.EndpointID]bool) (removed map[string]int, err error)
	// InUse gives the ids of endpoints, also of those that are gone, that something of the plane's
	// carries: they are not given out again.
	InUse() (map[model.EndpointID]bool, error)
	// CutLeaving ends the connections of an endpoint that leaves the node, and says how many there
	// were.
	CutLeaving(e model.Endpoint) (cut int, err error)
}

// Network is how a plane follows the network.
type Network interface {
	// SetTopology tells who is where; local is what is local to this node. Lists that have not
	// changed are the same as the last time, their memory included, so that a plane finds what is
	// different at little cost. After an error the next call does everything anew. One goroutine at
	// a time calls it.
	SetTopology(local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error
	// Heard says when the plane last heard of another node; the zero time: never, or that it does
	// not listen. Any goroutine may call it.
	Heard(n model.Node) time.Time
}

// Policy is how a plane enforces policy. One goroutine at a time calls each method.
type Policy interface {
	// ApplyPolicy brings what decides on new connections to a change, whole or not at all.
	ApplyPolicy(change model.PolicyChange) error
	// CutForbidden ends connections that the policy in force forbids, and says how many.
	CutForbidden() (cut int, err error)
	// CutForbiddenIn does so for processes of a container that communicate by its own network
	// namespace. An error that is os.ErrNotExist means that the container is gone.
	CutForbiddenIn(netnsPath string) (cut int, err error)
}

// Limits is how a plane holds endpoints to limits. One goroutine at a time calls it.
type Limits interface {
	// SetLimits holds e to its limits, none if it has none. all are all endpoints that have some, e
	// as it is to be. An endpoint that is made with limits has them before Await and Attach, and
	// one that goes has them until after Detach.
	SetLimits(e model.Endpoint, all []model.Endpoint) error
	// RestoreLimits takes over the limits of an earlier agent for all that are to have some. If it
	// fails those in force stay, and it is a fault (api.FaultLimits) until it is repeated and
	// succeeds.
	RestoreLimits(all []model.Endpoint) error
	// SpreadLimits puts limits in force on devices that the node got since.
	SpreadLimits()
	// LimitUse gives what of the limits of all is in force, and what waited for them, in the order
	// of all.
	LimitUse(all []model.Endpoint) ([]model.LimitUse, error)
}

// Reports is what a plane says of itself. Faults it notes in Host.Faults. Any goroutine may call
// it.
type Reports interface {
	// Declares gives the names of what the plane reports. They are always the same.
	Declares() Declaration
	// Counters gives the count of each reason that the plane declares, in that order. Counts never
	// fall.
	Counters() ([]api.Counter, error)
	// Connections lists the connections of this node's endpoints, and what listens for some. Names
	// of endpoints are not filled in.
	Connections() ([]model.Connection, error)
	// Traffic reports what each of endpoints, all of the node's, did, in their order.
	Traffic(endpoints []model.Endpoint) ([]model.Traffic, error)
}

// Declaration is the names that a plane reports by, which are its alone: no other plane of the node
// may have them.
type Declaration struct {
	// Paths are those of the plane's connections. model.PathNone and model.PathListen may be any
	// plane's.
	Paths []model.Path
	// Protocols are those of its connections that are not TCP's.
	Protocols []string
	// Reasons are what it counts, and why connections have not taken a better path.
	Reasons []model.Reason
	// Faults are those that no other plane, nor the agent, may find.
	Faults []api.FaultReason
}

// Services is what a plane has besides whose endpoints reach services by their addresses.
type Services interface {
	// Services lists those in force, sorted by address.
	Services() ([]model.Service, error)
	// EditServices changes them, one after the other.
	EditServices(ctx context.Context, edit api.ServiceEdit) error
}

// Stacks is what a plane has besides that runs the TCP of endpoints (internal/stack).
type Stacks interface {
	// ServeStack reports whether the plane can do, as the node is now, its part of an endpoint's
	// TCP by a stack with these settings: nil if it can, ErrOtherStack if it has none. All planes
	// that have one must be able to. Any goroutine may call it.
	ServeStack(kind stack.Kind, settings stack.Settings) error
	// SetStack says how endpoint e has its TCP: before Await and Attach, and whenever it changes.
	// Each plane hears of every endpoint, also of those whose TCP another one runs. New sockets and
	// connections follow when it returns. It may be repeated. One goroutine at a time calls it.
	SetStack(e model.Endpoint, c stack.Choice) error
}

// ErrOtherStack says that a stack is not one of the plane's.
var ErrOtherStack = errors.New("this node has no such stack")

// IDs is what a plane has besides that keeps, over restarts of the agent, which id was given to an
// endpoint last: among what keeps ids itself. One goroutine at a time calls it.
type IDs interface {
	// LastID gives that id, 0 if none was.
	LastID() (model.EndpointID, error)
	// SetLastID notes it before an endpoint has it.
	SetLastID(id model.EndpointID) error
}

// RDMA is what a plane has besides that gives containers RDMA devices.
type RDMA interface {
	// RDMA reports them and their queue pairs. Any goroutine may call it.
	RDMA(ctx context.Context) (api.RDMA, error)
}

// StackReports is what a plane has besides that runs stack modules.
type StackReports interface {
	// StackModules says what they use. After an error what is given is right, and not all. Any
	// goroutine may call it.
	StackModules(ctx context.Context) ([]api.StackModule, error)
}

// OwnTCP is what a plane has besides that tells of TCP connections whose packets pass a container's
// device as its own do. Any goroutine may call it.
type OwnTCP interface {
	// RunsTCPOf reports whether it runs the TCP of an endpoint.
	RunsTCPOf(id model.EndpointID) bool
}

// Status is what a plane has besides that has members of its own in the status of the node.
type Status interface {
	// FillStatus sets these members. Any goroutine may call it.
	FillStatus(ctx context.Context, st *api.Status) error
}

// Host is what every plane is opened with.
type Host struct {
	// Node is this one, Network the network's id. Prefix6 is zero if the node has no IPv6 overlay
	// addresses.
	Node    model.Node
	Network model.NetworkID
	Prefix6 netip.Prefix
	Faults  Faults
	Log     *slog.Logger
	// Traps has calls answered that containers' filters trap. Handlers that a plane registers may
	// be asked from the time it is opened until it is closed, whether or not it runs.
	Traps Traps
	// Sockets are those of the TCP plane, for planes that communicate by it between nodes.
	Sockets Sockets
	// StacksChanged has ServeStack asked anew for every endpoint: what the plane can serve has
	// changed. Any goroutine may call it; it does not wait.
	StacksChanged func()
	// SetGroups notes which multicast groups the queue pairs of an endpoint of this node are in, so
	// that other nodes hear of it. Any goroutine may call it that no method of the plane waits for.
	SetGroups SetGroups
	// StackModules is for the plane of stack modules.
	StackModules StackModules
	// Keeper gives what keeps descriptors while no agent runs; nil if nothing does. It may be asked
	// from the first Attach on.
	Keeper func() trap.Keeper
	// Observe is told of connections as they come and go, while they do: so that `heddle observe`
	// shows those of all planes in one form. Any goroutine may call it; it does not wait.
	Observe func(flow.Observation)
}

// SetGroups is a function of the agent's: groups are sorted. An endpoint that is not there is no
// error.
type SetGroups func(ctx context.Context, id model.EndpointID, groups []netip.Addr) error

// Traps is how a plane answers trapped calls: a trap.Server, which the agent owns. A plane
// registers its handlers while it is opened.
type Traps interface {
	// Handle has calls answered by h, which is closed with the server. Of several handlers that own
	// a call that of the plane opened last is asked first: what is not for it, an endpoint's that
	// has not chosen it, say, it leaves to the planes before it by trap.Call.Next.
	Handle(h trap.Handler)
	// Redelivered gives how many callers were told a descriptor of h's that they had already. Any
	// goroutine may call it.
	Redelivered(h trap.Handler) uint64
}

// Sockets makes TCP sockets in the name of an endpoint: as if a program of it had made them, with
// its policy, limits and paths. Any goroutine may call it.
type Sockets interface {
	// ConnectAs connects to an address. The error is, or wraps, an errno of connect(), or ctx's.
	ConnectAs(ctx context.Context, id model.EndpointID, to netip.AddrPort) (*os.File, error)
	// ConnectRDMA is ConnectAs for a connection of which it is told as one of RDMA.
	ConnectRDMA(ctx context.Context, id model.EndpointID, to netip.AddrPort) (*os.File, error)
	// ListenRDMA listens at a port of the endpoint's own addresses, IPv6's among them if ipv6 is
	// set. Of what it accepts it is told as of RDMA.
	ListenRDMA(id model.EndpointID, port uint16, ipv6 bool) (net.Listener, error)
	// SocketAs makes a socket that is neither bound nor connected. Its calls never wait.
	SocketAs(id model.EndpointID, ipv6 bool) (*os.File, error)
}

// Ways is what a plane has besides that knows which path connections would take. Any goroutine may
// call it.
type Ways interface {
	// WayTo says which path a new connection of endpoint e would take, and why; here are the
	// endpoints of this node. Nothing is sent.
	WayTo(e model.Endpoint, to netip.AddrPort, here []model.Endpoint) (api.Way, error)
}

// NoteBytes is how much StackModules keeps of a socket.
const NoteBytes = 256

// StackModules is what the TCP plane does for the plane of stack modules. Any goroutine may call
// it.
type StackModules interface {
	// Note gives what SetNote keeps of a socket; false: nothing. It outlives the agent and goes
	// with the socket.
	Note(fd int) (note [NoteBytes]byte, ok bool, err error)
	SetNote(fd int, note [NoteBytes]byte) error
	// StackDevices says whether the node can have such devices: an error, if not.
	StackDevices() error
	// StackDevice describes the device that OpenStackDevice makes; there need be none.
	StackDevice(e model.Endpoint, veth netcfg.EndpointDevice) (netcfg.StackDevice, error)
	// OpenStackDevice makes the device by which a module has the TCP packets of an endpoint that is
	// attached, and has them go there as long as the file is open. What comes from there goes on as
	// if its container had sent it.
	OpenStackDevice(e model.Endpoint, veth netcfg.EndpointDevice) (netcfg.StackDevice, *os.File, error)
	// Decide gives the verdict of the policy in force on a TCP connection.
	Decide(from, to netip.Addr, port uint16) (model.Verdict, error)
	// LeaveStackDevice has them go to the container's own stack again.
	LeaveStackDevice(e model.Endpoint) error
}

// Faults keeps what is not as it should be. Any goroutine may call it.
type Faults interface {
	// Set notes a fault; endpoint "" means the node. It reports whether that is news.
	Set(reason api.FaultReason, endpoint string, err error) (news bool)
	// Clear notes that a fault is not there, and reports whether it was.
	Clear(reason api.FaultReason, endpoint string) (was bool)
	// Has reports whether something is at fault for this reason.
	Has(reason api.FaultReason) bool
}

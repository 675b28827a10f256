// Package store is what the nodes of one Heddle network agree on: the network's parameters, its
// nodes and their overlay prefixes, and its endpoints. It defines the Store interface, the keys and
// values behind it and the rules for allocating prefixes and registering addresses;
// docs/protocols/store-schema.md is the normative text. Package store/etcd keeps the data in etcd;
// nothing here knows that.
package store

import (
	"context"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// Store is one network's shared state. Implementations are safe for concurrent use. Every call
// gives up when its context ends, or earlier with an error that says what does not answer.
type Store interface {
	// InitNetwork sets the network's parameters if nobody did, and returns those in force. Zero
	// fields of want mean "whatever is in force, or the default". A field that differs from the one
	// in force gives a *MismatchError.
	InitNetwork(ctx context.Context, want Network) (Network, error)

	// Network returns the parameters in force, or ErrNoNetwork before InitNetwork.
	Network(ctx context.Context) (Network, error)

	// JoinNode registers n, or refreshes the record of a node of that name, and returns it as
	// stored. Without n.Prefixes the node keeps those it has, or gets the first free one of the
	// pool. Errors: ErrNoNetwork, ErrPoolExhausted, *OverlapError, *UnderlayInUseError,
	// *PrefixInUseError.
	JoinNode(ctx context.Context, n model.Node) (model.Node, error)

	// LeaveNode removes a node, its endpoints and their addresses. An absent node is no error.
	LeaveNode(ctx context.Context, name string) error

	// NoteOffline notes that a node's agent is gone, or that the node was seen all the same: the
	// earlier Since and the later Seen stay. Of a node whose name is held, or that is not in the
	// network, nothing is noted.
	NoteOffline(ctx context.Context, a OfflineRecord) error

	// ForgetNode is LeaveNode for a node that is gone: a *NodeLiveError if its name is held. With a
	// quiet time that is not zero, a *NodeSeenError unless it was noted as offline and not heard of
	// since then. An absent node is no error.
	ForgetNode(ctx context.Context, name string, quiet time.Time) error

	// HoldName makes the agent of h the owner of the lease of its node's name until ReleaseName,
	// and keeps it so: the store forgets it HoldTime after it was last heard of. A name that
	// another instance holds gives a *NameHeldError, unless takeOver; whoever loses it so sees it
	// in State.NameLeases. One name at a time.
	HoldName(ctx context.Context, h NameLease, takeOver bool) error

	// ReleaseName gives the name up that HoldName took. That it is not held, or by somebody else,
	// is no error.
	ReleaseName(ctx context.Context, h NameLease) error

	// PutEndpoint stores e and registers its IPv4 address, and with it the IPv6 one, in one step.
	// An address that has moved to the node need not be in its prefixes; if it is, it is home, and
	// the move ends. Errors: ErrNoNetwork, *UnknownNodeError, *AddrInUseError, *AddrOutsideError,
	// *MovedError.
	PutEndpoint(ctx context.Context, e model.Endpoint) error

	// PutNewEndpoint is PutEndpoint for one whose id is not there, that has not migrated, and was
	// made by what the store's state had at revision since. done is false, and nothing stored, if a
	// move has been written since, or there is anything else to decide: then Moves and PutEndpoint
	// say more.
	PutNewEndpoint(ctx context.Context, e model.Endpoint, since int64) (done bool, err error)

	// DeleteEndpoint removes an endpoint and frees its addresses; one that had moved to the node
	// goes home. An absent one is no error.
	DeleteEndpoint(ctx context.Context, node string, id model.EndpointID) error

	// Moves lists the addresses that have moved, as they are now.
	Moves(ctx context.Context) ([]model.Move, error)

	// GiveUpEndpoint removes endpoint e and gives its address to node to, in one step. From then on
	// only that node can put an endpoint with this address. It may be repeated. Errors:
	// *UnknownNodeError, *UnknownMoveError if the store does not have e with this address and has
	// not moved it there.
	GiveUpEndpoint(ctx context.Context, e model.Endpoint, to string) (model.Move, error)

	// RedirectMove gives an address that has moved, and that no endpoint has taken up, to another
	// node. Errors: *UnknownNodeError, *UnknownMoveError, *MoveInUseError.
	RedirectMove(ctx context.Context, a netip.Addr, to string) (model.Move, error)

	// DropMove ends the move of an address to node that no endpoint there has taken up: the address
	// goes back to the node in whose prefixes it is. An absent one is no error. Errors:
	// *MoveInUseError.
	DropMove(ctx context.Context, a netip.Addr, node string) error

	// KeepMove puts a move back that the store was lost with. Errors: *AddrInUseError, *MovedError
	// if somebody else has the address by now.
	KeepMove(ctx context.Context, m model.Move) error

	// EditPolicies makes all changes of an edit in one step, or none, and says what became of each.
	// Errors: ErrNoNetwork, *PolicyLimitError, *UnknownPolicyError, or what is malformed.
	EditPolicies(ctx context.Context, edit PolicyEdit) ([]PolicyOutcome, error)

	// EditStacks makes all changes of an edit of stack profiles and congestion controls in one
	// step, or none, and says what became of each. Errors: ErrNoNetwork, *PolicyLimitError,
	// *UnknownPolicyError, *StackInUseError, or what is malformed.
	EditStacks(ctx context.Context, edit StackEdit) ([]PolicyOutcome, error)

	// Watch sends the present state, then a complete new one after every change; changes that
	// happen while the receiver is busy arrive as one. It recovers by itself from lost connections
	// and from compaction. The channel is closed when ctx ends or the store is closed. A store that
	// cannot be reached now is an error; one that is lost later is not.
	Watch(ctx context.Context) (<-chan State, error)

	// InvalidValues counts the stored values that this store's watches have skipped because they
	// break the schema. A value counts again when it changes, and when a watch has to read
	// everything anew.
	InvalidValues() uint64

	// Close ends every watch and releases connections; an embedded server stops.
	Close() error
}

// State is everything a network's nodes know of each other, at one moment. It is immutable:
// receivers share its slices with each other and must not write to them. A slice of Nodes,
// Endpoints, Policies, Namespaces, Stacks or Congestion that is the same as in the state before,
// its memory included, has not changed.
type State struct {
	// Revision orders states of one store. It falls only if the store was wiped or restored.
	Revision int64
	// History counts how often this watch has found the store's content replaced by another: wiped,
	// or restored from a snapshot. What the agent has written since that was taken is lost then.
	History int
	// Nodes are sorted by name. Their prefixes and underlay addresses are disjoint.
	Nodes []model.Node
	// Endpoints each live on one of Nodes, with an IPv4 address inside the node's prefixes, or
	// moved to it, that no other endpoint has, and perhaps an IPv6 address that ends in it. Those
	// of a node that have not changed are the same group as in the state before.
	Endpoints model.Endpoints
	// Moves are sorted by address. Each is to one of Nodes, and in its Moved; an endpoint with such
	// an address lives there.
	Moves []model.Move
	// Policies are sorted by name. One that has not changed is the same pointer as in the state
	// before.
	Policies []*policy.Policy
	// Namespaces are those that somebody described, sorted by name.
	Namespaces []policy.Namespace
	// PolicyFaults says which stored policies this version cannot read, and what became of them;
	// sorted.
	PolicyFaults []string
	// Stacks are the stack profiles, sorted by name, Congestion the congestion controls that nodes
	// load. One that has not changed is the same pointer as in the state before.
	Stacks     []*stack.Profile
	Congestion []*stack.Object
	// StackFaults says which of those that are stored this version cannot read; sorted. They are
	// treated as absent.
	StackFaults []string
	// NameLeases are those of the agents that are there, by the name of their node.
	NameLeases map[string]NameLease
	// Offline has, by name, the nodes of which somebody noted that their agent is gone. It may lag
	// behind NameLeases.
	Offline map[string]OfflineRecord
}

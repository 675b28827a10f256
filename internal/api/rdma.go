package api

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
)

// RDMA is what the verbs plane of a node has. Counts begin with the endpoint, or queue pair, and
// anew when the router has ended.
type RDMA struct {
	// Router is nil if the agent has no verbs plane.
	Router *Router `json:"router"`
	// Devices are those of this node's endpoints that want verbs.
	Devices    []RDMADevice `json:"devices"`
	QueuePairs []QueuePair  `json:"queue_pairs"`
	CMIDs      []CMID       `json:"cm_ids"`
}

// RDMAPath is a way that bytes of queue pairs take.
type RDMAPath string

// The paths.
const (
	RDMANone   RDMAPath = "none"   // nothing was moved yet
	RDMAMemory RDMAPath = "memory" // copied on one node
	RDMATCP    RDMAPath = "tcp"    // by a TCP connection of the endpoint
	RDMACard   RDMAPath = "card"
)

// RDMATraffic is what was moved. Requests are what queue pairs did as requesters, Served what they
// did as responders and receivers. Bytes are those of messages that left the endpoint's memory or
// came into it, whoever asked for it.
type RDMATraffic struct {
	Requests      uint64 `json:"requests"`
	Served        uint64 `json:"served"`
	BytesSent     uint64 `json:"bytes_sent"`
	BytesReceived uint64 `json:"bytes_received"`
}

// RDMADevice is an endpoint's device.
type RDMADevice struct {
	Endpoint string `json:"endpoint"`
	// GIDs are the endpoint's addresses.
	GIDs       []netip.Addr `json:"gids"`
	SpinMicros uint32       `json:"spin_us"`
	// Known says that the router has it.
	Known bool `json:"known"`
	// Used and Limits are how many objects of a kind there are, and may be: see RDMAObjects.
	Used    map[string]uint64        `json:"used,omitempty"`
	Limits  map[string]uint64        `json:"limits,omitempty"`
	Traffic map[RDMAPath]RDMATraffic `json:"traffic,omitempty"`
	// Errors are completions with a status that is neither success nor IBV_WC_WR_FLUSH_ERR.
	Errors uint64 `json:"errors"`
}

// RDMAObjects are the keys of RDMADevice.Used and Limits.
var RDMAObjects = []string{"contexts", "qps", "cqs", "mrs", "pds", "srqs", "ahs", "channels", "memory_bytes", "memory_pieces"}

// QueuePair is one, as the router has it. Of UD the peer's members are zero.
type QueuePair struct {
	Endpoint string `json:"endpoint"`
	Number   uint32 `json:"qpn"`
	// PID is the process that has it, in the router's PID namespace.
	PID int `json:"pid"`
	// Type is RC, UC or UD; State is RESET, INIT, RTR, RTS, SQD, SQE or ERR.
	Type       string     `json:"type"`
	State      string     `json:"state"`
	Local      netip.Addr `json:"local"`
	Peer       netip.Addr `json:"peer,omitzero"`
	PeerNumber uint32     `json:"peer_qpn,omitempty"`
	Path       RDMAPath   `json:"path"`
	RDMATraffic
	Errors uint64 `json:"errors"`
	// LastError is the status of the last such completion, as libibverbs names it.
	LastError string `json:"last_error,omitempty"`
}

// CMID is an id of RDMA-CM, as the router has it.
type CMID struct {
	Endpoint string `json:"endpoint"`
	// ID is its number in the event channel.
	ID  uint32 `json:"id"`
	PID int    `json:"pid"` // as that of a QueuePair
	// Space is TCP, UDP, IPOIB or IB.
	Space string `json:"space"`
	// State is idle, bound, address-resolved, route-resolved, listening, connecting, requested,
	// answered, accepted, connected, disconnecting or ended.
	State string `json:"state"`
	// Local and Peer are absent as long as the program has not said them.
	Local netip.AddrPort `json:"local,omitzero"`
	Peer  netip.AddrPort `json:"peer,omitzero"`
	// QPN and PeerQPN are its queue pairs, as the programs have said; 0: not yet.
	QPN     uint32 `json:"qpn,omitempty"`
	PeerQPN uint32 `json:"peer_qpn,omitempty"`
}

// Of gives what there is of one endpoint; "" stands for all.
func (r RDMA) Of(endpoint string) RDMA {
	if endpoint == "" {
		return r
	}
	r.Devices = slices.DeleteFunc(slices.Clone(r.Devices), func(d RDMADevice) bool { return d.Endpoint != endpoint })
	r.QueuePairs = slices.DeleteFunc(slices.Clone(r.QueuePairs), func(q QueuePair) bool { return q.Endpoint != endpoint })
	r.CMIDs = slices.DeleteFunc(slices.Clone(r.CMIDs), func(id CMID) bool { return id.Endpoint != endpoint })
	return r
}

func (s *server) rdma(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	state, err := s.agent.RDMA(r.Context())
	if err != nil {
		return err
	}
	state.Devices, state.QueuePairs, state.CMIDs = orEmpty(state.Devices), orEmpty(state.QueuePairs), orEmpty(state.CMIDs)
	return s.write(w, state)
}

// RDMA asks for devices and queue pairs.
func (c *Client) RDMA(ctx context.Context) (state RDMA, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/rdma", nil, &state)
	return state, err
}

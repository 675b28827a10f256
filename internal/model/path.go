package model

import "net/netip"

// Path names how a connection travels, as it stands in tables, JSON and metric labels. Each plane
// declares those of its connections (plane.Declaration).
type Path string

// What every plane's sockets may be at.
const (
	// PathNone: the socket is neither connected nor listening.
	PathNone Path = "none"
	// PathListen: the socket listens.
	PathListen Path = "listen"
)

// Connection is one live socket of an endpoint as the agent reports it.
type Connection struct {
	Endpoint      EndpointID     `json:"endpoint_id"`
	Name          string         `json:"endpoint"`
	Protocol      string         `json:"protocol,omitempty"` // as its plane declares it; empty: TCP
	State         string         `json:"state"`              // of TCP the kernel's: "ESTABLISHED", "LISTEN", ...
	Local         netip.AddrPort `json:"local"`              // as the program sees it
	Remote        netip.AddrPort `json:"remote"`             // as the program sees it; zero for a listener
	NodeLocal     netip.AddrPort `json:"node_local"`         // as the node's kernel has it
	NodeRemote    netip.AddrPort `json:"node_remote"`        // as the node's kernel has it
	Path          Path           `json:"path"`
	Reason        string         `json:"reason,omitempty"` // why it did not take the best path: the name of a Reason
	BytesSent     uint64         `json:"bytes_sent"`       // payload acknowledged by the peer
	BytesReceived uint64         `json:"bytes_received"`   // payload received in order
	ReceiveQueue  uint32         `json:"receive_queue"`    // bytes the program has not read; of a listener: connections to accept
	SendQueue     uint32         `json:"send_queue"`       // bytes the peer has not acknowledged; of a listener: its backlog
	Retransmits   uint32         `json:"retransmits"`      // segments
	Cookie        uint64         `json:"cookie"`           // the kernel's socket cookie
}

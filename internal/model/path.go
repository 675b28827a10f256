package model

import (
	"fmt"
	"net/netip"
)

// Path says how a connection travels. The numbers are those of enum heddle_path in
// bpf/include/abi/path.h; a test in internal/plane/tcp/datapath ties the two.
type Path uint8

// The paths. docs/ARCHITECTURE.md follows a direct connection and names the page of each other
// path.
const (
	// PathNone: the socket is neither connected nor listening.
	PathNone Path = iota
	// PathDirect: host stack to host stack; the SYN carried the overlay addresses as an option.
	PathDirect
	// PathLocal: both ends are intercepted endpoints of one node; over lo.
	PathLocal
	// PathLoopback: the container talks to itself over 127.0.0.1 or ::1.
	PathLoopback
	// PathOverlay: through the VXLAN device or an endpoint's veth, as packets of the overlay.
	PathOverlay
	// PathNode: to or from a process of the container's own node.
	PathNode
	// PathOutside: to an address outside the overlay, with the node's address as source.
	PathOutside
	// PathListen: the socket listens.
	PathListen
	numPaths
)

var pathNames = [numPaths]string{"none", "direct", "local", "loopback", "overlay", "node", "outside", "listen"}

// String gives the path's name as it stands in tables, JSON and metric labels.
func (p Path) String() string {
	if p >= numPaths {
		return fmt.Sprintf("path(%d)", uint8(p))
	}
	return pathNames[p]
}

// MarshalText makes JSON carry the name.
func (p Path) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (p *Path) UnmarshalText(b []byte) error {
	for i, n := range pathNames {
		if n == string(b) {
			*p = Path(i)
			return nil
		}
	}
	return fmt.Errorf("path %q: unknown", b)
}

// Connection is one live TCP socket of an endpoint as the agent reports it.
type Connection struct {
	Endpoint      EndpointID     `json:"endpoint_id"`
	Name          string         `json:"endpoint"`
	State         string         `json:"state"`       // the kernel's TCP state: "ESTABLISHED", "LISTEN", ...
	Local         netip.AddrPort `json:"local"`       // as the program sees it
	Remote        netip.AddrPort `json:"remote"`      // as the program sees it; zero for a listener
	NodeLocal     netip.AddrPort `json:"node_local"`  // as the node's kernel has it
	NodeRemote    netip.AddrPort `json:"node_remote"` // as the node's kernel has it
	Path          Path           `json:"path"`
	Reason        string         `json:"reason,omitempty"` // why it did not go direct; a name from Reasons
	BytesSent     uint64         `json:"bytes_sent"`       // payload acknowledged by the peer
	BytesReceived uint64         `json:"bytes_received"`   // payload received in order
	ReceiveQueue  uint32         `json:"receive_queue"`    // bytes the program has not read; of a listener: connections to accept
	SendQueue     uint32         `json:"send_queue"`       // bytes the peer has not acknowledged; of a listener: its backlog
	Retransmits   uint32         `json:"retransmits"`      // segments
	Cookie        uint64         `json:"cookie"`           // the kernel's socket cookie
}

package names

import (
	"fmt"

	"heddle.dev/heddle/internal/model"
)

// The paths of TCP connections. docs/ARCHITECTURE.md follows a direct connection and names the page
// of each other path.
const (
	// PathDirect: host stack to host stack; the SYN carried the overlay addresses as an option.
	PathDirect model.Path = "direct"
	// PathLocal: both ends are intercepted endpoints of one node; over lo.
	PathLocal model.Path = "local"
	// PathLoopback: the container talks to itself over 127.0.0.1 or ::1.
	PathLoopback model.Path = "loopback"
	// PathOverlay: through the VXLAN device or an endpoint's veth, as packets of the overlay.
	PathOverlay model.Path = "overlay"
	// PathNode: to or from a process of the container's own node.
	PathNode model.Path = "node"
	// PathOutside: to an address outside the overlay, with the node's address as source.
	PathOutside model.Path = "outside"
)

// Paths are the paths by their number in enum heddle_path of bpf/include/abi/path.h; a test in
// internal/plane/tcp/datapath ties the two.
var Paths = []model.Path{model.PathNone, PathDirect, PathLocal, PathLoopback, PathOverlay, PathNode, PathOutside, model.PathListen}

// PathOf gives the path with a number.
func PathOf(number uint8) model.Path {
	if int(number) >= len(Paths) {
		return model.Path(fmt.Sprintf("path(%d)", number))
	}
	return Paths[number]
}

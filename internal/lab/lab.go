// Package lab simulates several nodes on one machine. A node is a network namespace with its own
// agent, BPF file system and cgroup; a fabric namespace joins the nodes, and a host outside the
// overlay hangs on it. Containers are real OCI containers whose root is an overlayfs over the
// machine's own files.
//
// One lab container is up to three runc containers that share a root file system, a process and an
// IPC namespace, one for each mode: through Heddle (namespace of the container, sockets
// intercepted), on the plain overlay (the same namespace, not intercepted), and on the host (the
// node's namespace).
//
// The store is the first node's, or a cluster of etcd servers on the fabric (`up --store-members`).
//
// Everything that exists outside the lab's state directory carries the lab's name: namespaces
// LAB-fabric, LAB-outside, LAB-n1, LAB-n1-c1, cgroups heddle-LAB. So `down` finds what to remove by
// name, whatever a killed `up` left, and nothing of the machine's own network is touched.
package lab

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
)

// Root holds a directory for each lab.
const Root = "/run/heddle/lab"

// DefaultName is the lab commands mean unless they are told otherwise.
const DefaultName = "lab"

// maxName bounds a lab's name, so that the longest name made of it is a short host name.
const maxName = 20

// Limits of a lab's size: a node has an address in a /24, and one machine carries them all.
const (
	MaxNodes      = 64
	MaxContainers = 64
	// MaxStoreMembers is how many members etcd recommends at most.
	MaxStoreMembers = 5
)

// Mode is how a command in a lab container reaches the network.
type Mode string

// The modes.
const (
	// ModeHeddle: sockets are intercepted; the container's overlay address.
	ModeHeddle Mode = "heddle"
	// ModeOverlay: the same container without interception: VXLAN alone.
	ModeOverlay Mode = "overlay"
	// ModeHost: the node's own network namespace and address.
	ModeHost Mode = "host"
)

// Modes are all of them, the default first.
var Modes = []Mode{ModeHeddle, ModeOverlay, ModeHost}

// ParseMode reads a mode's name.
func ParseMode(s string) (Mode, error) {
	if m := Mode(s); slices.Contains(Modes, m) {
		return m, nil
	}
	return "", fmt.Errorf("--mode %q: want heddle, overlay or host", s)
}

// Family is an address family.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Underlays of a lab: by what addresses its hosts reach each other.
const (
	UnderlayIPv4 = "ipv4" // IPv6 addresses are there for what containers send to the outside
	UnderlayIPv6 = "ipv6" // there are no IPv4 addresses
)

// NoPrefix6 as Size.Prefix6 makes an IPv4-only lab.
const NoPrefix6 = "none"

// Lab names everything of one lab.
type Lab struct {
	name string
	root string // directory of all labs
}

// Open gives the lab called name, whether it is up or not.
func Open(name string) (Lab, error) {
	if err := model.ValidateName("lab name", name); err != nil {
		return Lab{}, err
	}
	if len(name) > maxName {
		return Lab{}, fmt.Errorf("lab name %q: want at most %d characters", name, maxName)
	}
	return Lab{name: name, root: Root}, nil
}

// Name gives the lab's name.
func (l Lab) Name() string { return l.name }

// Dir is the lab's state directory.
func (l Lab) Dir() string { return filepath.Join(l.root, l.name) }

func (l Lab) nodeDir(node string) string   { return filepath.Join(l.Dir(), node) }
func (l Lab) runcRoot() string             { return filepath.Join(l.Dir(), "runc") }
func (l Lab) netns(suffix string) string   { return netns.Path(l.netnsName(suffix)) }
func (l Lab) apiSocket(node string) string { return filepath.Join(l.nodeDir(node), "api.sock") }

func (l Lab) netnsName(suffix string) string { return l.name + "-" + suffix }

// cgroup is the lab's cgroup as a path in a hierarchy; it begins with "/".
func (l Lab) cgroup() string { return "/heddle-" + l.name }

// The namespaces that are no node's.
const (
	fabricSpace = "fabric"
	outside     = "outside"
)

// memberName gives the name of store member i, which counts from 1.
func memberName(i int) string { return fmt.Sprintf("s%d", i) }

// nodeName gives the name of node i, which counts from 1.
func nodeName(i int) string { return fmt.Sprintf("n%d", i) }

// container names one lab container.
type container struct{ node, name string }

// String gives "n1/c1": how users and the agent name it.
func (c container) String() string { return c.node + "/" + c.name }

// suffix gives "n1-c1": how namespaces and runc name it.
func (c container) suffix() string { return c.node + "-" + c.name }

// runcID gives the name of the runc container behind c in mode m.
func (l Lab) runcID(c container, m Mode) string {
	id := l.name + "-" + c.suffix()
	switch m {
	case ModeOverlay:
		return id + "-plain"
	case ModeHost:
		return id + "-host"
	}
	return id
}

func (l Lab) containerDir(c container) string { return filepath.Join(l.nodeDir(c.node), c.name) }

// nodes gives the names of the lab's nodes.
func (s State) nodes() []string {
	out := make([]string, s.Nodes)
	for i := range out {
		out[i] = nodeName(i + 1)
	}
	return out
}

// containers gives the lab's containers, node by node.
func (s State) containers() []container {
	var out []container
	for _, n := range s.nodes() {
		for i := range s.Containers {
			out = append(out, container{n, fmt.Sprintf("c%d", i+1)})
		}
	}
	return out
}

// members gives the names of the lab's store members.
func (s State) members() []string {
	out := make([]string, s.StoreMembers)
	for i := range out {
		out[i] = memberName(i + 1)
	}
	return out
}

// find gives the container a user named.
func (s State) find(name string) (container, error) {
	all := s.containers()
	names := make([]string, len(all))
	for i, c := range all {
		if c.String() == name {
			return c, nil
		}
		names[i] = c.String()
	}
	return container{}, fmt.Errorf("no container %q in lab %s: it has %s", name, s.Name, strings.Join(names, ", "))
}

// Addresses of the fabric, host part.
const (
	memberFirst   = 200 // and the member's number
	outsideHost   = 250
	underlayBits  = 24
	underlay6Bits = 64
	underlayFirst = 77 // 172.31.77.0/24 is lab 0's
	maxLabs       = 128
)

// underlay gives the underlay address with host part host.
func (s State) underlay(host int) netip.Addr {
	return netip.AddrFrom4([4]byte{172, 31, byte(underlayFirst + s.Index), byte(host)})
}

// underlay6 gives the IPv6 address on the fabric with host part host. Unless the underlay is IPv6,
// the overlay does not use it: it is for what containers send to the outside. The prefix is not one
// that a network may have by default.
func (s State) underlay6(host int) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x48, 2: 0x65, 5: byte(underlayFirst + s.Index), 15: byte(host)})
}

// fabricAddr gives the address with host part host by which others on the fabric reach that host.
func (s State) fabricAddr(host int) netip.Addr {
	if s.Underlay == UnderlayIPv6 {
		return s.underlay6(host)
	}
	return s.underlay(host)
}

// fabricAddrs gives the addresses on the fabric with host part host.
func (s State) fabricAddrs(host int) []netip.Prefix {
	if s.Underlay == UnderlayIPv6 {
		return []netip.Prefix{netip.PrefixFrom(s.underlay6(host), underlay6Bits)}
	}
	addrs := []netip.Prefix{netip.PrefixFrom(s.underlay(host), underlayBits)}
	if s.Prefix6 != NoPrefix6 {
		addrs = append(addrs, netip.PrefixFrom(s.underlay6(host), underlay6Bits))
	}
	return addrs
}

// nodeHost gives the host part of a node's addresses on the fabric.
func (s State) nodeHost(node string) int { return 1 + slices.Index(s.nodes(), node) }

// memberHost gives the host part of a store member's addresses on the fabric.
func (s State) memberHost(member string) int {
	return memberFirst + 1 + slices.Index(s.members(), member)
}

// nodeAddr gives a node's underlay address.
func (s State) nodeAddr(node string) netip.Addr { return s.fabricAddr(s.nodeHost(node)) }

// outsideAddr is an address that is on no network the nodes are on: for connections that leave the
// overlay.
func (s State) outsideAddr() netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(underlayFirst + s.Index), 1})
}

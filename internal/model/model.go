// Package model holds the nouns every other package shares: nodes, endpoints, addresses and the
// names of paths and reasons. It depends on the standard library only, decides nothing and does no
// I/O.
package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// NetworkID tells Heddle networks apart that share an underlay. It travels in the SYN option, where
// it has 12 bits: 1..4095; 0 is never valid. See docs/protocols/syn-option.md.
type NetworkID uint16

// MaxNetworkID is the largest value the SYN option can carry.
const MaxNetworkID NetworkID = 0xfff

// Validate reports whether the id fits the SYN option.
func (id NetworkID) Validate() error {
	if id == 0 || id > MaxNetworkID {
		return fmt.Errorf("network id %d: must be 1..%d", id, MaxNetworkID)
	}
	return nil
}

// EndpointID names an endpoint on its node. Ids are given out by the node's agent, are unique on
// that node only, and are never 0. Socket tags carry them, so an id is not given out again while
// the agent still knows a socket that carries it.
type EndpointID uint32

// MaxEndpointID bounds ids so that each maps to its own loopback aliases (see LoopbackAlias). The
// programs' maps have room for as many.
const MaxEndpointID EndpointID = 1<<14 - 1

// PortRange is an inclusive range of TCP ports in host byte order.
type PortRange struct {
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// DefaultDirectPorts are the underlay ports direct connections are addressed to. Sixty-four ports
// give a pair of nodes 64 times the ephemeral range: about 1.8 million connections, those in
// TIME_WAIT included.
var DefaultDirectPorts = PortRange{First: 17408, Last: 17471}

// ParsePortRange reads "FIRST-LAST" or "PORT".
func ParsePortRange(s string) (PortRange, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	f, err := strconv.ParseUint(first, 10, 16)
	if err != nil {
		return PortRange{}, fmt.Errorf("port range %q: want FIRST-LAST with ports 1..65535", s)
	}
	l, err := strconv.ParseUint(last, 10, 16)
	if err != nil {
		return PortRange{}, fmt.Errorf("port range %q: want FIRST-LAST with ports 1..65535", s)
	}
	r := PortRange{First: uint16(f), Last: uint16(l)}
	return r, r.Validate()
}

// Validate reports whether the range is usable for direct connections.
func (r PortRange) Validate() error {
	if r.First == 0 || r.Last < r.First {
		return fmt.Errorf("port range %d-%d: want 1 <= FIRST <= LAST <= 65535", r.First, r.Last)
	}
	return nil
}

// Contains reports whether port p is in the range.
func (r PortRange) Contains(p uint16) bool { return p >= r.First && p <= r.Last }

// String gives "FIRST-LAST".
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Node is one container host as its peers see it.
type Node struct {
	// Name is unique in the network: a DNS label (a-z, 0-9, '-').
	Name string `json:"name"`
	// Underlay is the address other nodes reach this node by: an inner one if it encrypts, or if
	// its address on the network that joins the nodes is IPv6.
	Underlay netip.Addr `json:"underlay"`
	// IPv6 is how it is reached by IPv6; the zero value: it is not, or it encrypts.
	IPv6 IPv6Underlay `json:"ipv6_underlay,omitzero"`
	// WireGuard is how it encrypts; the zero value: it does not.
	WireGuard WireGuardNode `json:"wireguard,omitzero"`
	// Prefixes are the IPv4 overlay prefixes whose addresses live on this node; disjoint from every
	// other node's. The first address after the network address is the node's gateway. The IPv6
	// ones follow from the network's prefix (see OverlayPrefix6).
	Prefixes []netip.Prefix `json:"prefixes"`
	// VTEPMAC is the hardware address of the node's VXLAN device, "02:..." form.
	VTEPMAC string `json:"vtep_mac"`
	// ReadsSchema is the latest revision of the store's schema that the node's agent reads; 0: the
	// first.
	ReadsSchema int `json:"reads_schema,omitempty"`
	// Planes has a record for each plane.
	Planes NodePlanes `json:"planes"`
	// PeerAPI is where the node's agent answers those of other nodes; the zero PeerAPI: nowhere.
	PeerAPI PeerAPI `json:"peer_api,omitzero"`
	// Moved are the IPv4 addresses outside Prefixes, or back in them, that live on this node by a
	// Move: sorted. The node's own record does not have them.
	Moved []netip.Addr `json:"-"`
}

// PeerAPI is where an agent answers other nodes' agents: a TCP port (host byte order) of its
// underlay address, and the key it shows there (internal/peerapi).
type PeerAPI struct {
	Port uint16 `json:"port"`
	// Key is the SHA-256 of the agent's public key (SubjectPublicKeyInfo), in hexadecimal.
	Key string `json:"key"`
}

// Validate checks what a node says of it.
func (p PeerAPI) Validate() error {
	if p.Port == 0 {
		return errors.New("port: want 1..65535")
	}
	if raw, err := hex.DecodeString(p.Key); err != nil || len(raw) != sha256.Size || hex.EncodeToString(raw) != p.Key {
		return fmt.Errorf("key %.80q: want %d hexadecimal digits, a-f", p.Key, 2*sha256.Size)
	}
	return nil
}

// Direct reports whether the node accepts direct connections.
func (n Node) Direct() bool { return n.Planes.TCP.DirectPorts != PortRange{} }

// Gateway gives the node's own overlay address in prefix p: the first address after p's network
// address. The node's processes talk to containers from it, and containers route through it.
func Gateway(p netip.Prefix) netip.Addr { return p.Masked().Addr().Next() }

// Endpoint is one container's attachment to the overlay.
type Endpoint struct {
	// ID is unique on Node.
	ID EndpointID `json:"id"`
	// Name is the operator's name for it, unique on Node: for a lab container "n1/c1".
	Name string `json:"name"`
	// Node is the name of the node it lives on.
	Node string `json:"node"`
	// Addrs are its overlay addresses: the IPv4 one, which is leased, then the IPv6 one that
	// follows from it (see Overlay6) if network and node have IPv6.
	Addrs []netip.Addr `json:"addrs"`
	// NetnsPath names the container's network namespace on its node.
	NetnsPath string `json:"netns_path"`
	// Netns says which namespace NetnsPath led to when the endpoint was made, where the path may
	// lead to another one since: that of a process. The zero NetnsIdentity: nobody has looked.
	Netns NetnsIdentity `json:"netns,omitzero"`
	// Device is the name of its device in that namespace; "" is eth0.
	Device string `json:"device,omitempty"`
	// Adopted says that device and address are those of another network, which carries what is not
	// direct; nil: both are Heddle's.
	Adopted *Adopted `json:"carried,omitempty"`
	// CNI says which attachment of a CNI network it is; nil: none.
	CNI *CNIAttachment `json:"cni,omitempty"`
	// Labels are the operator's, for policy.
	Labels map[string]string `json:"labels,omitempty"`
	// Limits are what the operator allows it; nil: everything.
	Limits *Limits `json:"limits,omitempty"`
	// Ports are the ports of the node that lead to it.
	Ports []PublishedPort `json:"ports,omitempty"`
	// Created is when the agent made it.
	Created time.Time `json:"created"`
	// Planes has a record for each plane.
	Planes EndpointPlanes `json:"planes"`
}

// NetnsIdentity tells a network namespace from all that there are or have been on a machine.
type NetnsIdentity struct {
	// Boot is the kernel's name for the time since the machine was started (boot_id).
	Boot string `json:"boot"`
	// Cookie is the kernel's number for the namespace, which it gives once in that time.
	Cookie uint64 `json:"cookie"`
}

// Adopted describes another network that an endpoint has its device and address of.
type Adopted struct {
	// Prefixes are the network's IPv4 addresses, on all nodes: they are reached from the endpoint's
	// own address, and those that are no endpoints by that network.
	Prefixes []netip.Prefix `json:"prefixes"`
}

// CNIAttachment names what a CNI runtime attached. With the endpoint's device it is the key that
// CNI gives attachments.
type CNIAttachment struct {
	// Network is the name of the CNI network configuration.
	Network string `json:"network"`
	// ContainerID is CNI_CONTAINERID.
	ContainerID string `json:"container_id"`
}

// Generation tells the endpoint from others that have had its id. It is 0 for an endpoint without
// Created.
func (e Endpoint) Generation() uint32 {
	if e.Created.IsZero() {
		return 0
	}
	h := fnv.New32a()
	_ = binary.Write(h, binary.BigEndian, e.Created.UnixNano()) // to a hash: no errors
	return h.Sum32()
}

// Addr4 gives the endpoint's IPv4 overlay address, or the zero Addr.
func (e Endpoint) Addr4() netip.Addr { return first(e.Addrs, netip.Addr.Is4) }

// Addr6 gives the endpoint's IPv6 overlay address, or the zero Addr.
func (e Endpoint) Addr6() netip.Addr { return first(e.Addrs, netip.Addr.Is6) }

func first(addrs []netip.Addr, match func(netip.Addr) bool) netip.Addr {
	for _, a := range addrs {
		if match(a) {
			return a
		}
	}
	return netip.Addr{}
}

// LoopbackAlias gives the node address that stands for loopback address a, of 127.0.0.0/8 or ::1,
// of endpoint id's container. Aliases are in 127.128.0.0/9, which is local in every network
// namespace without any set-up; each endpoint has 512, so one container's loopback is not
// another's. 127.0.0.0/24 has an alias for each address; the rest of 127.0.0.0/8 shares 254 by a
// hash.
func LoopbackAlias(id EndpointID, a netip.Addr) netip.Addr {
	const shared, last, ipv6 = 256, 509, 511
	slot := uint32(ipv6)
	if a.Is4() {
		b := a.As4()
		slot = uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
		if slot >= shared {
			slot = shared + slot%(last+1-shared)
		}
	}
	n := uint32(id&MaxEndpointID)<<9 | slot
	return netip.AddrFrom4([4]byte{127, 0x80 | byte(n>>16), byte(n >> 8), byte(n)})
}

// LoopbackShown gives the loopback address of its container that a stands for, if a is an alias of
// endpoint id. An alias that several addresses share stands for 127.0.0.1.
func LoopbackShown(id EndpointID, a netip.Addr) (netip.Addr, bool) {
	if !a.Is4() {
		return netip.Addr{}, false
	}
	b := a.As4()
	slot := uint16(b[2]&1)<<8 | uint16(b[3])
	b[2], b[3] = b[2]&^1, 0
	if netip.AddrFrom4(b) != LoopbackAlias(id, netip.AddrFrom4([4]byte{127})) {
		return netip.Addr{}, false
	}
	switch {
	case slot == 511:
		return netip.IPv6Loopback(), true
	case slot < 256:
		return netip.AddrFrom4([4]byte{127, 0, 0, byte(slot)}), true
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1}), true
}

// ValidateName checks the name of a node or lab: a DNS label of at most 32 characters.
func ValidateName(field, s string) error {
	if s == "" || len(s) > 32 {
		return fmt.Errorf("%s %q: want 1 to 32 characters", field, s)
	}
	for i, c := range s {
		ok := c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' && i > 0 && i < len(s)-1
		if !ok {
			return fmt.Errorf("%s %q: use a-z, 0-9 and '-' (not first or last)", field, s)
		}
	}
	return nil
}

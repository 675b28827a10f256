package lab

import (
	"strings"
	"testing"
)

// Place is where the two ends of a connection are.
type Place struct {
	Name           string
	Client, Server string // containers; "outside" for the host outside the overlay
	// Target is what the client dials: a function, because addresses are known once the lab is up.
	Target func(testing.TB) string
	// Modes are the modes of client and server; the first pair is what the others must equal.
	Modes [][2]string
	// IPv6 says that target is IPv6, and so is what the nodes must show of both ends.
	IPv6 bool
}

// Modes of a client and a server, by where they are. The first pair is what the others must equal.
var (
	ContainerModes = [][2]string{{"overlay", "overlay"}, {"heddle", "heddle"}, {"heddle", "overlay"}, {"overlay", "heddle"}}
	SameModes      = [][2]string{{"overlay", "overlay"}, {"heddle", "heddle"}}
	FromHostModes  = [][2]string{{"host", "overlay"}, {"host", "heddle"}}
	ToHostModes    = [][2]string{{"overlay", "host"}, {"heddle", "host"}}
)

// Places are where IPv4 connections of one container can lead.
var Places = []Place{
	{"other node", "n1/c1", "n2/c1", OverlayOf("n2/c1"), ContainerModes, false},
	{"same node", "n1/c1", "n1/c2", OverlayOf("n1/c2"), ContainerModes, false},
	{"own address", "n1/c1", "n1/c1", OverlayOf("n1/c1"), SameModes, false},
	{"loopback", "n1/c1", "n1/c1", func(testing.TB) string { return "127.0.0.1" }, SameModes, false},
	{"from own node", "n1/c2", "n1/c1", OverlayOf("n1/c1"), FromHostModes, false},
	{"from other node", "n2/c1", "n1/c1", OverlayOf("n1/c1"), FromHostModes, false},
	{"own node underlay", "n1/c1", "n1/c2", underlayOf("n1/c1"), ToHostModes, false},
	{"own node gateway", "n1/c1", "n1/c2", GatewayOf("n1/c1"), ToHostModes, false},
	{"other node underlay", "n1/c1", "n2/c1", underlayOf("n2/c1"), ToHostModes, false},
	{"other node gateway", "n1/c1", "n2/c1", GatewayOf("n2/c1"), ToHostModes, false},
	{"outside", "n1/c1", "outside", OutsideTarget, ToHostModes, false},
}

// StartPeerAt is StartPeer that knows the host outside as well.
func StartPeerAt(t testing.TB, mode, container string) *Peer {
	t.Helper()
	if container == "outside" {
		return StartOutside(t)
	}
	return StartPeer(t, mode, container)
}

// InPod says that both ends are in one network namespace that two containers share.
func (pl Place) InPod() bool { return strings.HasPrefix(pl.Name, "pod ") }

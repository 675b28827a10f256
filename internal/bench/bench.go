// Package bench compares how TCP performs in the lab's modes: the node's own stack (host), the
// plain VXLAN overlay (overlay) and Heddle (heddle).
//
// A Workload is a server, a client and the metrics their output yields. Run takes every workload,
// scope and mode in turn, several times over, so that what the machine does meanwhile falls on all
// modes alike, and gives the median of the runs with their spread and the ratio to host. Nothing
// here decides how a container is entered: that is a Place.
package bench

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
)

// Mode is the network a measurement uses.
type Mode string

// The modes, in the order of reports. They are the lab's.
const (
	Host    Mode = "host"    // the node's own namespace: the best there is, and what ratios are to
	Overlay Mode = "overlay" // the container's namespace: veth, bridge and VXLAN
	Heddle  Mode = "heddle"  // the container with its sockets in the node's namespace
)

// Modes lists the lab's modes in the order of reports.
var Modes = []Mode{Host, Overlay, Heddle}

// Native is Overlay of nodes that send each other packets without a tunnel. It is a lab beside the
// others', which package baseline brings up.
const Native Mode = "native"

// The networks of others. They are measured only when they are asked for; package baseline brings
// them up.
const (
	Bare     Mode = "bare"      // no container network: a host's own namespace without anything of Heddle's
	Docker   Mode = "docker"    // Docker's own: its overlay network between nodes, its bridge on one
	BPF      Mode = "bpf"       // a BPF data path: redirection between veths, routing between nodes
	BPFVXLAN Mode = "bpf-vxlan" // the same with VXLAN between nodes
	Netkit   Mode = "netkit"    // a BPF data path on netkit devices
)

// Baselines lists the networks of others in the order of reports.
var Baselines = []Mode{Bare, Docker, BPF, BPFVXLAN, Netkit}

// Pooled is the container of Heddle with the preloaded pool of sockets. Only `heddle bench pool`
// measures it.
const Pooled Mode = "heddle+pool"

// Floor is Host with a caller whose socket() is trapped and answered by a program that does nothing
// else: no trapped call costs less. Only new connections are measured in it. Package baseline has
// it.
const Floor Mode = "floor"

// AllModes lists the modes in the order of reports.
var AllModes = slices.Concat(Modes, []Mode{Native}, Baselines, []Mode{Floor})

// In reports whether the mode differs from another that is measured anyway: on one node there is
// nothing to tunnel.
func (m Mode) In(s Scope) bool { return m != BPFVXLAN && m != Native || s == Inter }

// Scope says where the two ends are.
type Scope string

// The scopes.
const (
	Inter Scope = "inter" // on two nodes
	Intra Scope = "intra" // on one node
)

// Scopes lists every scope in the order of reports.
var Scopes = []Scope{Inter, Intra}

// Title gives the scope in words.
func (s Scope) Title() string {
	if s == Intra {
		return "on one node"
	}
	return "between nodes"
}

// Ends gives the lab containers of client and server.
func (s Scope) Ends() (client, server string) {
	if s == Intra {
		return "n1/c1", "n1/c2"
	}
	return "n1/c1", "n2/c1"
}

// Place is where measurements run: a lab, or in tests anything with two ends.
type Place interface {
	// Exec gives a command that is ready to be started and that runs args in container, in mode.
	// Standard streams and the exit code pass through. It ends when ctx does.
	Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd
	// IP gives the address a peer dials to reach container in mode.
	IP(ctx context.Context, mode Mode, container string) (netip.Addr, error)
}

// Places is a Place of which some modes are elsewhere.
type Places struct {
	Place                // of all other modes
	Of    map[Mode]Place // by mode
}

// Exec runs args where the mode is.
func (p Places) Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd {
	return p.place(mode).Exec(ctx, mode, container, args...)
}

// IP asks where the mode is.
func (p Places) IP(ctx context.Context, mode Mode, container string) (netip.Addr, error) {
	return p.place(mode).IP(ctx, mode, container)
}

func (p Places) place(mode Mode) Place {
	if of, ok := p.Of[mode]; ok {
		return of
	}
	return p.Place
}

// ParseModes reads names of the lab's modes and gives them in the order of reports. Host must be
// among them: every ratio is to it.
func ParseModes(names []string) ([]Mode, error) { return parseModes(names, Modes) }

// ParseAllModes is ParseModes for AllModes.
func ParseAllModes(names []string) ([]Mode, error) { return parseModes(names, AllModes) }

func parseModes(names []string, known []Mode) ([]Mode, error) {
	modes, err := parse("--modes", names, known)
	if err != nil {
		return nil, err
	}
	if len(modes) == 0 || modes[0] != Host {
		return nil, fmt.Errorf("--modes %v: add %q, every ratio is to it", names, Host)
	}
	return modes, nil
}

// ParseScopes reads names of scopes and gives them in the order of reports.
func ParseScopes(names []string) ([]Scope, error) { return parse("--scopes", names, Scopes) }

// parse picks those of known that are named; each name must be known.
func parse[T ~string](field string, names []string, known []T) ([]T, error) {
	wanted := make(map[T]bool, len(names))
	for _, n := range names {
		wanted[T(n)] = true
	}
	var picked []T
	for _, k := range known {
		if wanted[k] {
			picked = append(picked, k)
			delete(wanted, k)
		}
	}
	for unknown := range wanted {
		return nil, fmt.Errorf("%s %q: unknown; want some of %v", field, string(unknown), known)
	}
	if len(picked) == 0 {
		return nil, fmt.Errorf("%s: name at least one of %v", field, known)
	}
	return picked, nil
}

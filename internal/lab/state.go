package lab

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// State is what a lab remembers between commands, in state.json.
type State struct {
	Name       string    `json:"name"`
	Index      int       `json:"index"`      // tells labs' address ranges apart
	Nodes      int       `json:"nodes"`      // number of nodes
	Containers int       `json:"containers"` // number of containers on each node
	Created    time.Time `json:"created"`
	// Ready is set once every part of the lab is up.
	Ready bool `json:"ready"`
	// Prefix6 is the network's IPv6 prefix as heddled takes it: "" for the default, NoPrefix6 or a
	// prefix.
	Prefix6 string `json:"prefix6,omitempty"`
	// Underlay is UnderlayIPv6, or "" or UnderlayIPv4.
	Underlay string `json:"underlay,omitempty"`
	// StoreMembers is how many etcd servers the lab has beside its nodes; 0: the first node's agent
	// has the store.
	StoreMembers int `json:"store_members,omitempty"`
	// SocketPool says that the containers have the preloaded pool of sockets.
	SocketPool bool `json:"socket_pool,omitempty"`
	// Guest says that the containers' connections within a node may go through memory.
	Guest bool `json:"guest,omitempty"`
	// Stacks says that stack modules may run the containers' TCP.
	Stacks bool `json:"stacks,omitempty"`
	// Verbs says that the containers have RDMA devices.
	Verbs bool `json:"verbs,omitempty"`
	// VerbsSpinMicros is for how long their programs look for work before they sleep.
	VerbsSpinMicros uint32 `json:"verbs_spin_us,omitempty"`
	// Overlay is each container's IPv4 overlay address, by its name "n1/c1"; Overlay6 its IPv6 one,
	// if it has one.
	Overlay  map[string]netip.Addr `json:"overlay"`
	Overlay6 map[string]netip.Addr `json:"overlay6,omitempty"`
}

// Size is what a user asks a lab to be; a zero field means "as it is", or the default for a new
// lab.
type Size struct {
	Nodes, Containers int
	// AgentArgs are added to the command lines of agents that are started now, and not remembered.
	AgentArgs []string
	// NodeArgs are added behind them for the nodes named.
	NodeArgs map[string][]string
	// Prefix6 is State.Prefix6.
	Prefix6 string
	// Underlay is State.Underlay.
	Underlay string
	// StoreMembers is State.StoreMembers.
	StoreMembers int
	// SocketPool, Guest, Stacks and Verbs are those of State, of a new lab.
	SocketPool, Guest, Stacks, Verbs bool
	// VerbsSpinMicros is State.VerbsSpinMicros, of a new lab.
	VerbsSpinMicros uint32
}

// defaultSize is a lab's unless it is told otherwise.
var defaultSize = Size{Nodes: 2, Containers: 2}

func (z Size) validate() error {
	if z.Nodes < 0 || z.Nodes > MaxNodes {
		return fmt.Errorf("--nodes %d: want 1 to %d", z.Nodes, MaxNodes)
	}
	if z.Containers < 0 || z.Containers > MaxContainers {
		return fmt.Errorf("--containers %d: want 1 to %d", z.Containers, MaxContainers)
	}
	if z.StoreMembers < 0 || z.StoreMembers > MaxStoreMembers {
		return fmt.Errorf("--store-members %d: want 0 to %d", z.StoreMembers, MaxStoreMembers)
	}
	if z.Underlay != "" && z.Underlay != UnderlayIPv4 && z.Underlay != UnderlayIPv6 {
		return fmt.Errorf("--underlay %q: want %s or %s", z.Underlay, UnderlayIPv4, UnderlayIPv6)
	}
	if z.Prefix6 == "" || z.Prefix6 == NoPrefix6 {
		return nil
	}
	p, err := netip.ParsePrefix(z.Prefix6)
	if err == nil {
		err = model.ValidatePrefix6(p)
	}
	if err != nil {
		return fmt.Errorf("--prefix6 %q: %w, or %q", z.Prefix6, err, NoPrefix6)
	}
	return nil
}

// ErrNotUp means that there is no lab of that name.
var ErrNotUp = errors.New("lab is not up")

func (l Lab) statePath() string { return filepath.Join(l.Dir(), "state.json") }

// Load reads the lab's state; ErrNotUp if there is none.
func (l Lab) Load() (State, error) {
	data, err := os.ReadFile(l.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, fmt.Errorf("lab %s: %w: bring it up with `heddle lab up%s`", l.name, ErrNotUp, l.flag())
	}
	if err != nil {
		return State{}, fmt.Errorf("lab %s: %w", l.name, err)
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return State{}, fmt.Errorf("lab %s: %s: %w: remove the lab with `heddle lab down%s`", l.name, l.statePath(), err, l.flag())
	}
	if err := (Size{Nodes: s.Nodes, Containers: s.Containers, Prefix6: s.Prefix6, Underlay: s.Underlay, StoreMembers: s.StoreMembers}).validate(); err != nil || s.Name != l.name || s.Nodes*s.Containers == 0 || s.Index < 0 || s.Index >= maxLabs {
		return State{}, fmt.Errorf("lab %s: %s: not a lab's state: remove the lab with `heddle lab down%s`", l.name, l.statePath(), l.flag())
	}
	return s, nil
}

// flag gives what commands need to mean this lab.
func (l Lab) flag() string {
	if l.name == DefaultName {
		return ""
	}
	return " --lab " + l.name
}

// save writes the state in one step: a killed command leaves the old or the new one.
func (l Lab) save(s State) error {
	data, err := json.MarshalIndent(s, "", "\t")
	if err != nil {
		return err
	}
	return replaceFile(l.statePath(), append(data, '\n'))
}

// replaceFile writes a file in one step.
func replaceFile(path string, data []byte) (err error) {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// prepare gives the state of a lab that is about to be brought up: the one there is, or a new one.
func (l Lab) prepare(size Size) (State, error) {
	if err := size.validate(); err != nil {
		return State{}, err
	}
	s, err := l.Load()
	if err == nil {
		if size.Nodes != 0 && size.Nodes != s.Nodes || size.Containers != 0 && size.Containers != s.Containers {
			return State{}, fmt.Errorf("lab %s has %d nodes with %d containers each: to change that, remove it first with `heddle lab down%s`", l.name, s.Nodes, s.Containers, l.flag())
		}
		if size.Underlay != "" && size.Underlay != cmp.Or(s.Underlay, UnderlayIPv4) {
			return State{}, fmt.Errorf("lab %s has an underlay of %s: to change that, remove it first with `heddle lab down%s`", l.name, cmp.Or(s.Underlay, UnderlayIPv4), l.flag())
		}
		if size.Prefix6 != "" && size.Prefix6 != s.Prefix6 {
			return State{}, fmt.Errorf("lab %s was made with --prefix6 %q: to change that, remove it first with `heddle lab down%s`", l.name, s.Prefix6, l.flag())
		}
		if size.StoreMembers != 0 && size.StoreMembers != s.StoreMembers {
			return State{}, fmt.Errorf("lab %s has %d store members: to change that, remove it first with `heddle lab down%s`", l.name, s.StoreMembers, l.flag())
		}
		if s.Overlay6 == nil {
			s.Overlay6 = map[string]netip.Addr{}
		}
		return s, nil
	}
	if !errors.Is(err, ErrNotUp) {
		return State{}, err
	}
	if size.Nodes == 0 {
		size.Nodes = defaultSize.Nodes
	}
	if size.Containers == 0 {
		size.Containers = defaultSize.Containers
	}
	unlock, err := l.lockIndexes()
	if err != nil {
		return State{}, err
	}
	defer unlock()
	index, err := l.freeIndex()
	if err != nil {
		return State{}, err
	}
	if err := os.MkdirAll(l.Dir(), 0o755); err != nil {
		return State{}, fmt.Errorf("lab %s: %w", l.name, err)
	}
	s = State{Name: l.name, Index: index, Nodes: size.Nodes, Containers: size.Containers, Created: time.Now().UTC(),
		Prefix6: size.Prefix6, Underlay: size.Underlay, StoreMembers: size.StoreMembers, SocketPool: size.SocketPool, Guest: size.Guest, Stacks: size.Stacks, Verbs: size.Verbs, VerbsSpinMicros: size.VerbsSpinMicros, Overlay: map[string]netip.Addr{}, Overlay6: map[string]netip.Addr{}}
	return s, l.save(s)
}

// freeIndex gives an index that no other lab has.
func (l Lab) freeIndex() (int, error) {
	labs, err := list(l.root)
	if err != nil {
		return 0, err
	}
	for i := range maxLabs {
		if !slices.ContainsFunc(labs, func(s State) bool { return s.Index == i }) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%d labs are up: remove one with `heddle lab down --lab NAME`", len(labs))
}

// List gives all labs, sorted by name. A lab whose state cannot be read has only a name.
func List() ([]Listed, error) {
	states, err := list(Root)
	if err != nil {
		return nil, err
	}
	groups, err := findCgroups()
	if err != nil && len(states) > 0 {
		return nil, err
	}
	labs := make([]Listed, len(states))
	for i, s := range states {
		labs[i].State = s
		if s.Ready {
			labs[i].Down = Lab{name: s.Name, root: Root}.missing(s, groups)
		}
	}
	return labs, nil
}

func list(root string) ([]State, error) {
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var out []State
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		s, err := Lab{name: e.Name(), root: root}.Load()
		if err != nil {
			s = State{Name: e.Name(), Index: -1}
		}
		out = append(out, s)
	}
	return out, nil
}

// lock keeps other commands from changing this lab meanwhile; other labs can be brought up and
// taken down beside it.
func (l Lab) lock() (unlock func(), err error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(l.name))
	return l.lockByte(1 + int64(h.Sum32())) // two labs on one byte only wait for each other
}

// lockIndexes is held while a lab chooses its index: after the lab's own lock.
func (l Lab) lockIndexes() (unlock func(), err error) { return l.lockByte(0) }

// lockByte locks a byte of the file that all labs share. The kernel drops the lock when the process
// ends, however it ends.
func (l Lab) lockByte(at int64) (unlock func(), err error) {
	if err := os.MkdirAll(l.root, 0o755); err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	// O_CLOEXEC, which os.OpenFile sets, keeps agents and containers from holding the lock.
	f, err := os.OpenFile(filepath.Join(l.root, ".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	for {
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lab: lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// Network is what programs need that speak to a lab's agents and store beside the containers.
type Network struct {
	ID         model.NetworkID
	JoinFile   string   // of the first node
	Netns      string   // path of the first node's network namespace, where the store can be reached
	APISockets []string // of the nodes' agents, in order
	Nodes      []NodeAccess
}

// NodeAccess is what programs need that act on a node as a container engine would.
type NodeAccess struct {
	Name          string
	Netns         string     // path of its network namespace
	Underlay      netip.Addr // what other nodes reach it by
	SeccompSocket string     // where container runtimes hand listeners over
	PinDir        string     // of its agent
}

func (s State) networkID() model.NetworkID { return model.NetworkID(s.Index + 1) }

// Network gives the lab's; ErrNotUp if there is none.
func (l Lab) Network() (Network, error) {
	s, err := l.Load()
	if err != nil {
		return Network{}, err
	}
	if s.StoreMembers > 0 {
		return Network{}, fmt.Errorf("lab %s: its store is not its first node's", l.name)
	}
	first := nodeName(1)
	n := Network{ID: s.networkID(), JoinFile: filepath.Join(l.nodeDir(first), "join.pem"), Netns: l.netns(first)}
	for i := range s.Nodes {
		name := nodeName(i + 1)
		n.APISockets = append(n.APISockets, l.apiSocket(name))
		n.Nodes = append(n.Nodes, NodeAccess{Name: name, Netns: l.netns(name), Underlay: s.nodeAddr(name), SeccompSocket: l.seccompSocket(name), PinDir: l.pinDir(name)})
	}
	return n, nil
}

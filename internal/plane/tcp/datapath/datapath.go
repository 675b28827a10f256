package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/lockwait"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// Config is what a node's programs are specialised for. All of it is constant while they are
// loaded.
type Config struct {
	// PinDir is a directory on a BPF file system, this node's own.
	PinDir string
	// Cgroup is the agent's cgroup (version 2): the hooks are attached there, because a socket
	// belongs to the cgroup of the process that made it.
	Cgroup string
	// NetworkID is carried and demanded in SYN options.
	NetworkID model.NetworkID
	// Underlay is the node's IPv4 underlay address.
	Underlay netip.Addr
	// Prefix6 is the network's IPv6 prefix of 96 bits; the zero Prefix on an IPv4 overlay.
	Prefix6 netip.Prefix
	// Pool holds the network's IPv4 overlay prefixes, 16 at most.
	Pool []netip.Prefix
	// DirectPorts is the range this node takes direct connections on.
	DirectPorts model.PortRange
	// VXLANPort is the UDP port of the overlay, VNI its VXLAN network identifier.
	VXLANPort uint16
	VNI       uint32
	// Mark is the SO_MARK and packet mark that makes overlay addresses local; OverlayMark is the
	// mark of sockets that reach their own node's prefix through a veth instead.
	Mark, OverlayMark uint32
	// DropMark is the SO_MARK of sockets whose packets go nowhere, RejectMark the packet mark of
	// what is answered by a RST or an ICMP error: netcfg's nftables rules do both.
	DropMark, RejectMark uint32
	// ServiceMark, without and with the lowest bit, is the packet mark of what goes to services:
	// netcfg's nftables rules let it leave by the devices that ask policy, or translated.
	ServiceMark uint32
	// EndpointSockets is how many sockets an endpoint may have.
	EndpointSockets uint64
	// NodePorts are ports of which containers may hold some by name only
	// (bpf/sock/reserved_ports.h); the zero range is none.
	NodePorts model.PortRange
	// EndpointPorts is how many of EphemeralPorts, those that the kernel chooses from for connects,
	// an endpoint may keep from all others by bind() or listen().
	EndpointPorts  uint32
	EphemeralPorts model.PortRange
	// Firewall is for how long what the nodes' forward chains have let pass goes past them. 0: this
	// node's see no connections.
	Firewall time.Duration
	// Congestion is the congestion control that the node gives sockets: one that a stack profile
	// has replaced is set to it when the profile goes.
	Congestion string
	// StuckChanged, which may be nil, is called when Stuck has something else to say.
	StuckChanged func()
	// DivertIfindex and UnderlayIfindex are devices of the node (netcfg.NodeDevices).
	DivertIfindex, UnderlayIfindex int
	// OverlayIfindex is the overlay's device, VTEPMAC its hardware address.
	OverlayIfindex int
	VTEPMAC        string
	// UnderlayRaw says that the underlay's device has no Ethernet header.
	UnderlayRaw bool
	// UnderlayInner says that Underlay is an inner address, which only UnderlayIfindex brings
	// packets for.
	UnderlayInner bool
	// Outer is the node's address on an IPv6 underlay, OuterIfindex its device: packets of
	// UnderlayIfindex are translated. The zero Addr: they are not.
	Outer        netip.Addr
	OuterIfindex int
	// relayGroups says that the kernel assigns no packet to a listener that has SO_REUSEPORT.
	relayGroups bool
}

func (c Config) validate() error {
	if err := c.NetworkID.Validate(); err != nil {
		return err
	}
	if !c.Underlay.Is4() {
		return fmt.Errorf("underlay %s: want an IPv4 address", c.Underlay)
	}
	if c.Outer.IsValid() && (!c.Outer.Is6() || c.Outer.Is4In6()) {
		return fmt.Errorf("outer address %s: want an IPv6 address", c.Outer)
	}
	if c.Prefix6.IsValid() && (!c.Prefix6.Addr().Is6() || c.Prefix6.Bits() != 96) {
		return fmt.Errorf("prefix6 %s: want an IPv6 prefix of 96 bits", c.Prefix6)
	}
	if len(c.Pool) > configPools {
		return fmt.Errorf("pool: %d prefixes, want %d at most", len(c.Pool), configPools)
	}
	if err := c.DirectPorts.Validate(); err != nil {
		return fmt.Errorf("direct ports: %w", err)
	}
	marks := []uint32{0, c.Mark, c.OverlayMark, c.DropMark, c.RejectMark, c.ServiceMark, c.ServiceMark | 1}
	for i, m := range marks {
		if slices.Contains(marks[:i], m) {
			return fmt.Errorf("marks %#x: want different values, not 0", marks[1:])
		}
	}
	return nil
}

// Datapath is a node's loaded and attached BPF programs. Its methods may be called from any
// goroutine: the maps are the kernel's, and the struct is not changed after Open, but for policy
// and routes, which have locks, and set.
type Datapath struct {
	cfg      Config
	objs     heddleObjects
	links    []link.Link
	lastID   *ebpf.Map
	policy   policyTables
	routes   writtenTopology
	services services
	// set has the endpoints as they were set last, by id.
	set sync.Map
	// locks runs passes over sockets.
	locks lockwait.Process
	// These do not change. agentKey goes with the agent's requests.
	comparesCallers bool
	agentKey        uint64
}

// Open loads the programs, takes over the maps pinned in PinDir by an earlier agent (or pins new
// ones), and attaches the cgroup hooks: links pinned earlier are updated in place, so a hook is
// never missing while an agent is replaced. Maps of a version with other ones are refused: ErrABI.
// The tc programs are attached by the caller, which knows the devices.
func Open(cfg Config) (_ *Datapath, err error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := CheckPinDir(cfg.PinDir); err != nil {
		return nil, err
	}
	spec, err := loadHeddle()
	if err != nil {
		return nil, fmt.Errorf("read BPF object: %w", err)
	}
	cfg.relayGroups = probeReuseport() != nil
	if err := setVariables(spec, cfg); err != nil {
		return nil, err
	}
	known := abiOf(spec)
	types := btf.NewCache()
	d := &Datapath{cfg: cfg, comparesCallers: canCompareCallers(types) == nil, agentKey: newAgentKey()}
	d.locks.Changed = cfg.StuckChanged
	if err := spec.Variables["config_agent_key"].Set(d.agentKey); err != nil {
		return nil, fmt.Errorf("set config_agent_key: %w", err)
	}
	if d.comparesCallers {
		if err := spec.Variables["config_agent"].Set(uint32(os.Getpid())); err != nil {
			return nil, fmt.Errorf("set config_agent: %w", err)
		}
	}
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	if err := d.load(spec, known, types); err != nil {
		return nil, err
	}
	if err := d.attachCgroup(); err != nil {
		return nil, err
	}
	if err := d.attachLSM(); err != nil {
		return nil, fmt.Errorf("LSM hooks: %w", err)
	}
	if err := d.attachProc(); err != nil {
		return nil, err
	}
	followWithout(d)
	return d, d.removeStalePins(known)
}

// load opens or pins the maps and loads the programs with them.
func (d *Datapath) load(spec *ebpf.CollectionSpec, known abi, types *btf.Cache) error {
	dir := d.cfg.PinDir
	migrate, err := checkPins(dir, known)
	if err != nil {
		return err
	}
	var totals []uint64
	if migrate {
		if totals, err = takeCounters(dir); err != nil {
			return err
		}
	}
	if err := writeABI(dir, known); err != nil {
		return err
	}
	if d.lastID, err = openLastID(dir); err != nil {
		return err
	}
	for _, m := range spec.Maps {
		if m.Name[0] != '.' { // not .rodata: that is this load's own
			m.Pinning = ebpf.PinByName
		}
	}
	opts := ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}, Cache: types}
	if err := spec.LoadAndAssign(&d.objs, &opts); err != nil {
		return explainLoad(dir, err)
	}
	limits, err := d.Limits()
	if err != nil {
		return err
	}
	if err := d.limitsInForce(len(limits) > 0); err != nil {
		return err
	}
	if err := d.stacksInForce(); err != nil {
		return err
	}
	return putCounters(d.objs.CountByReason, totals)
}

// Close gives up this process's handles. Pinned maps and links stay, and the programs keep running.
func (d *Datapath) Close() error {
	errs := []error{d.objs.Close(), d.lastID.Close(), d.policy.grace.Close(), d.locks.Close()}
	for _, l := range d.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// Unpin removes the pins in dir, and with them the maps, links and hooks that no process holds; it
// gives how many there were. Absent pins are no error. For taking a node down, not for restarting
// its agent.
func Unpin(dir string) (removed int, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("unpin: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	return removed, errors.Join(errs...)
}

// CheckPinDir makes the directory for pins unless it is there, and reports if it is on no BPF file
// system.
func CheckPinDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make pin directory: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("pin directory %s: %w", dir, err)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("pin directory %s: not on a BPF file system; mount one: mount -t bpf bpf %s", dir, dir)
	}
	return nil
}

func explainLoad(pinDir string, err error) error {
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return refusal(pinDir, err.Error()) // the record of maps says otherwise: somebody else wrote one of the two
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("load BPF programs: %w (needs root: CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON)", err)
	}
	return fmt.Errorf("load BPF programs: %w (`heddle doctor` names what this kernel lacks)", err)
}

func setVariables(spec *ebpf.CollectionSpec, cfg Config) error {
	values := map[string]any{
		"config_underlay":         fromAddr(cfg.Underlay).Word[3],
		"config_prefix6":          prefix6Words(cfg.Prefix6),
		"config_network_id":       uint16(cfg.NetworkID),
		"config_port_first":       cfg.DirectPorts.First,
		"config_port_last":        cfg.DirectPorts.Last,
		"config_vxlan_port":       cfg.VXLANPort,
		"config_vni":              cfg.VNI,
		"config_mark":             cfg.Mark,
		"config_overlay_mark":     cfg.OverlayMark,
		"config_drop_mark":        cfg.DropMark,
		"config_reject_mark":      cfg.RejectMark,
		"config_service_mark":     cfg.ServiceMark,
		"config_endpoint_sockets": cfg.EndpointSockets,
		"config_node_port_first":  cfg.NodePorts.First,
		"config_node_port_last":   cfg.NodePorts.Last,
		"config_endpoint_ports":   cfg.EndpointPorts,
		"config_ephemeral_first":  cfg.EphemeralPorts.First,
		"config_ephemeral_last":   cfg.EphemeralPorts.Last,
		"config_firewall_ns":      uint64(cfg.Firewall),
		"config_congestion":       congestionName(cfg.Congestion),
		"config_divert_ifindex":   uint32(cfg.DivertIfindex),
		"config_underlay_ifindex": uint32(cfg.UnderlayIfindex),
		"config_underlay_raw":     word(cfg.UnderlayRaw),
		"config_overlay_ifindex":  uint32(cfg.OverlayIfindex),
		"config_vtep":             toVTEP(cfg.VTEPMAC).Mac,
		"config_underlay_inner":   word(cfg.UnderlayInner),
		"config_outer":            [4]uint32{},
		"config_outer_ifindex":    uint32(cfg.OuterIfindex),
		"config_relay_groups":     word(cfg.relayGroups),
	}
	if cfg.Outer.IsValid() {
		values["config_outer"] = fromAddr(cfg.Outer).Word
	}
	values["config_pool"], values["config_pool_mask"] = poolWords(cfg.Pool)
	for name, v := range values {
		if err := spec.Variables[name].Set(v); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return setWithout(spec)
}

// word gives what C takes for true or false.
func word(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// configPools is CONFIG_POOLS of bpf/include/config.h.
const configPools = 16

// prefix6Words gives the upper 96 bits of a prefix as the programs have them; 0 for the zero
// Prefix.
func prefix6Words(p netip.Prefix) (words [3]uint32) {
	if p.IsValid() {
		full := fromAddr(p.Masked().Addr())
		copy(words[:], full.Word[:])
	}
	return words
}

// poolWords gives the IPv4 prefixes of a pool as the programs have them: addresses and masks.
func poolWords(pool []netip.Prefix) (addrs, masks [configPools]uint32) {
	i := 0
	for _, p := range pool {
		if !p.Addr().Is4() {
			continue
		}
		var mask [4]byte
		binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-p.Bits()))
		addrs[i], masks[i] = fromAddr(p.Masked().Addr()).Word[3], binary.NativeEndian.Uint32(mask[:])
		i++
	}
	return addrs, masks
}

// TC programs, by the place they belong to. The descriptors stay valid until Close.
type TCPrograms struct {
	FromUnderlay int // ingress of the underlay device
	ToWire       int // egress of the device of inner addresses, on an IPv6 underlay
	FromLo       int // ingress of the node's lo
	FromOverlay  int // ingress of the VXLAN device
	ToOverlay    int // egress of the same
	FromEndpoint int // ingress of the node side of each endpoint's veth
	ToEndpoint   int // egress of that
	Deliver      int // ingress of the divert device
	OnLoopback   int // egress of lo in each intercepted endpoint's container; the filter's class is the endpoint's id
	IntoLoopback int // ingress of the container's side of its veth, with the same class
	FromStack    int // ingress of the devices of stack modules
	// While an endpoint has a limit, on every device that its packets may take.
	LimitIn, LimitOut int
}

// TCPrograms gives the descriptors of the programs the caller attaches to devices.
func (d *Datapath) TCPrograms() TCPrograms {
	return TCPrograms{
		FromUnderlay: d.objs.FromUnderlay.FD(),
		ToWire:       d.objs.ToWire.FD(),
		FromLo:       d.objs.FromLo.FD(),
		FromOverlay:  d.objs.FromOverlay.FD(),
		ToOverlay:    d.objs.ToOverlay.FD(),
		FromEndpoint: d.objs.FromEndpoint.FD(),
		ToEndpoint:   d.objs.ToEndpoint.FD(),
		Deliver:      d.objs.Deliver.FD(),
		OnLoopback:   d.objs.OnLoopback.FD(),
		IntoLoopback: d.objs.IntoLoopback.FD(),
		FromStack:    d.objs.FromStack.FD(),
		LimitIn:      d.objs.LimitIn.FD(),
		LimitOut:     d.objs.LimitOut.FD(),
	}
}

// AddressOf gives the IPv4 overlay address of the endpoint that SetEndpoint set for id last; false:
// none was.
func (d *Datapath) AddressOf(id model.EndpointID) (netip.Addr, bool) {
	v, ok := d.set.Load(id)
	if !ok {
		return netip.Addr{}, false
	}
	return toAddr(v.(heddleEndpoint).Addr4), true
}

// TagSocket marks the new TCP socket fd as one of the endpoint that SetEndpoint set for id last,
// and as one that shows that it was asked for as an MPTCP socket. Until then no hook touches it.
func (d *Datapath) TagSocket(fd int, id model.EndpointID, mptcp bool) error {
	tag := heddleTagging{Key: d.agentKey, EndpointId: uint32(id)}
	if v, ok := d.set.Load(id); ok {
		tag.Incarnation = v.(heddleEndpoint).Incarnation
	}
	if mptcp {
		tag.Options = uint32(heddleSockTagOptionsOPTION_MPTCP)
	}
	// Nobody else has the socket, so the call does not wait, and needs none of Go's scheduler.
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), levelHeddle, tagSocket,
		uintptr(unsafe.Pointer(&tag)), unsafe.Sizeof(tag), 0)
	if errno != 0 {
		return fmt.Errorf("tag socket: %w", errno)
	}
	return nil
}

// TagRDMA says in the tag of a socket that it is one of the verbs plane's.
func (d *Datapath) TagRDMA(fd int) error {
	var tag heddleSockTag
	if err := d.objs.TagBySock.Lookup(uint32(fd), &tag); err != nil {
		return fmt.Errorf("read the tag of a socket: %w", err)
	}
	tag.Flags |= uint32(heddleSockTagFlagsTAG_RDMA)
	if err := d.objs.TagBySock.Put(uint32(fd), &tag); err != nil {
		return fmt.Errorf("tag socket: %w", err)
	}
	return nil
}

// Counters gives the number of times each reason was counted, indexed by names.Reason.
func (d *Datapath) Counters() ([]uint64, error) {
	totals := make([]uint64, len(names.Reasons))
	for i := range totals {
		n, err := sum(d.objs.CountByReason, uint32(i))
		if err != nil {
			return nil, fmt.Errorf("read counter %s: %w", names.Reason(i), err)
		}
		totals[i] = n
	}
	return totals, nil
}

// sum adds up entry i of a per-CPU array.
func sum(m *ebpf.Map, i uint32) (total uint64, err error) {
	var perCPU []uint64
	if err := m.Lookup(i, &perCPU); err != nil {
		return 0, err
	}
	for _, n := range perCPU {
		total += n
	}
	return total, nil
}

package baseline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/netns"
)

// The addresses of the BPF data path's containers: 10.211.NODE.CONTAINER, with VXLAN
// 10.212.NODE.CONTAINER.
const (
	nativeNet = 211
	tunnelNet = 212
)

// What the data path's devices are called and how they are set, as Cilium's are.
const (
	vxlanDevice = "vxlan"
	vxlanPort   = 8472
	tunnelMTU   = 1450
	// gateway is where a container sends everything; no host has the address, and nobody asks for
	// its MAC address.
	gateway = "169.254.1.1"
	// everybody is the identity of all containers.
	everybody = 2
)

// veth is a container of the data path.
type veth struct {
	node, number int    // from 1; both variants of a container have the same
	net          byte   // nativeNet or tunnelNet
	netns        string // name of its network namespace
}

func (v veth) address() netip.Addr {
	return netip.AddrFrom4([4]byte{10, v.net, byte(v.node), byte(v.number)})
}

// device is the node's end.
func (v veth) device() string { return fmt.Sprintf("v%d-%d", v.net, v.number) }

// macs are the addresses of the container's end and the node's.
func (v veth) macs() (container, node net.HardwareAddr) {
	container = net.HardwareAddr{2, 1, 0, v.net, byte(v.node), byte(v.number)}
	node = net.HardwareAddr{2, 2, 0, v.net, byte(v.node), byte(v.number)}
	return container, node
}

// bpf is the data path on two hosts.
type bpf struct {
	hosts      [2]Host
	containers []veth
	objects    []*baselineObjects // of each host
	links      []link.Link
}

// startBPF makes the containers of both variants, and loads and attaches the programs.
func startBPF(ctx context.Context, hosts [2]Host) (b *bpf, err error) {
	b = &bpf{hosts: hosts}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	for i, h := range hosts {
		b.containers = append(b.containers,
			veth{i + 1, 1, nativeNet, h.Container(1)}, veth{i + 1, 2, nativeNet, h.Container(2)}, veth{i + 1, 1, tunnelNet, h.Container(3)})
	}
	for i := range hosts {
		if err := b.startNode(ctx, i); err != nil {
			return b, fmt.Errorf("host %d of the BPF data path: %w", i+1, err)
		}
	}
	return b, nil
}

// startNode sets host i up.
func (b *bpf) startNode(ctx context.Context, i int) error {
	h, other := b.hosts[i], b.hosts[1-i]
	script := fmt.Sprintf("link add %s type vxlan external dstport %d\nlink set %s up\nroute replace 10.%d.%d.0/24 via %s\n",
		vxlanDevice, vxlanPort, vxlanDevice, nativeNet, 2-i, other.Underlay.Addr())
	for _, v := range b.containers {
		if v.node != i+1 {
			continue
		}
		if err := netns.Create(v.netns); err != nil {
			return err
		}
		inner, outer := v.macs()
		script += fmt.Sprintf("link add %s address %s type veth peer name eth0 address %s netns %s\nlink set %s up\n",
			v.device(), outer, inner, v.netns, v.device())
	}
	err := netns.Do(h.Netns, func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
	if err != nil {
		return fmt.Errorf("let the host forward: %w", err)
	}
	if _, err := runWith(ctx, script, "ip", "-n", filepath.Base(h.Netns), "-batch", "-"); err != nil {
		return err
	}
	for _, v := range b.containers {
		if v.node == i+1 {
			if err := v.setUp(ctx); err != nil {
				return err
			}
		}
	}
	return netns.Do(h.Netns, func() error { return b.attach(i) })
}

// setUp configures a container's network namespace.
func (v veth) setUp(ctx context.Context) error {
	_, outer := v.macs()
	mtu := ""
	if v.net == tunnelNet {
		mtu = fmt.Sprintf(" mtu %d", tunnelMTU)
	}
	script := fmt.Sprintf("link set lo up\nlink set eth0 up\naddr add %s/32 dev eth0\nroute add %s dev eth0 scope link\n"+
		"neigh replace %s lladdr %s dev eth0 nud permanent\nroute add default via %s dev eth0%s\n",
		v.address(), gateway, gateway, outer, gateway, mtu)
	_, err := runWith(ctx, script, "ip", "-n", v.netns, "-batch", "-")
	return err
}

// attach loads the programs for host i, the calling thread's network namespace, fills their maps
// and attaches them.
func (b *bpf) attach(i int) error {
	indexes := map[string]int{}
	devices, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, d := range devices {
		indexes[d.Name] = d.Index
	}
	spec, err := loadBaseline()
	if err != nil {
		return err
	}
	if err := spec.Variables["vxlan_ifindex"].Set(uint32(indexes[vxlanDevice])); err != nil {
		return err
	}
	o := &baselineObjects{}
	if err := spec.LoadAndAssign(o, nil); err != nil {
		return fmt.Errorf("load BPF programs: %w", err)
	}
	b.objects = append(b.objects, o)
	if err := b.fill(o, i, indexes); err != nil {
		return err
	}
	at := map[string]*ebpf.Program{b.hosts[i].Device: o.FromUnderlay, vxlanDevice: o.FromVxlan}
	for _, v := range b.containers {
		if v.node == i+1 {
			at[v.device()] = o.FromContainer
		}
	}
	for device, program := range at {
		l, err := link.AttachTCX(link.TCXOptions{Interface: indexes[device], Program: program, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return fmt.Errorf("attach to %s: %w", device, err)
		}
		b.links = append(b.links, l)
	}
	return nil
}

// fill writes host i's maps.
func (b *bpf) fill(o *baselineObjects, i int, indexes map[string]int) error {
	// Anybody may talk to anybody, as in a cluster without policies.
	if err := o.VerdictByPolicy.Put(baselinePolicyKey{}, uint32(1)); err != nil {
		return fmt.Errorf("fill map: %w", err)
	}
	for _, v := range b.containers {
		address := v.address().As4()
		to := baselineRemote{Identity: everybody}
		if v.node == i+1 {
			e := baselineEndpoint{Ifindex: uint32(indexes[v.device()])}
			inner, outer := v.macs()
			copy(e.Mac[:], inner)
			copy(e.NodeMac[:], outer)
			if err := o.EndpointByAddress.Put(address, e); err != nil {
				return fmt.Errorf("fill map: %w", err)
			}
		} else if v.net == tunnelNet {
			underlay := b.hosts[v.node-1].Underlay.Addr().As4()
			to.TunnelTo = binary.BigEndian.Uint32(underlay[:])
		}
		if err := o.RemoteByPrefix.Put(baselinePrefix{Bits: 32, Address: binary.NativeEndian.Uint32(address[:])}, to); err != nil {
			return fmt.Errorf("fill map: %w", err)
		}
	}
	return nil
}

// find gives the container that stands for one of the lab's.
func (b *bpf) find(mode bench.Mode, container string) (veth, error) {
	want := byte(nativeNet)
	if mode == bench.BPFVXLAN {
		want = tunnelNet
	}
	for _, v := range b.containers {
		if v.net == want && fmt.Sprintf("n%d/c%d", v.node, v.number) == container {
			return v, nil
		}
	}
	return veth{}, fmt.Errorf("mode %s has no container %s", mode, container)
}

// Exec runs args in a container's network namespace and in a cgroup of its own; the rest is the
// machine's.
func (b *bpf) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	v, err := b.find(mode, container)
	if err != nil {
		return &exec.Cmd{Path: container, Err: err}
	}
	var groups []string
	for _, dir := range b.hosts[v.node-1].Cgroups {
		dir = filepath.Join(dir, filepath.Base(v.netns))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return &exec.Cmd{Path: container, Err: err}
		}
		groups = append(groups, dir)
	}
	words := joined(groups, in(netns.Path(v.netns), args...)...)
	return exec.CommandContext(ctx, words[0], words[1:]...)
}

// IP gives a container's address.
func (b *bpf) IP(_ context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	v, err := b.find(mode, container)
	return v.address(), err
}

// packets gives what happened to packets on both hosts, by baseline_path.
func (b *bpf) packets() (total [baselineBaselinePathPATH_COUNT]uint64, err error) {
	for _, o := range b.objects {
		for path := range total {
			var each []uint64
			if err := o.PacketsByPath.Lookup(uint32(path), &each); err != nil {
				return total, fmt.Errorf("read packets: %w", err)
			}
			for _, n := range each {
				total[path] += n
			}
		}
	}
	return total, nil
}

// check reports whether packets went the ways that are compared, and gives their numbers in words.
func (b *bpf) check() (string, error) {
	p, err := b.packets()
	if err != nil {
		return "", err
	}
	text := fmt.Sprintf("packets of both variants: %d delivered by bpf_redirect_peer(), %d routed past the stack, %d sent into the VXLAN device, %d left to the stack, %d dropped",
		p[baselineBaselinePathPATH_DELIVERED], p[baselineBaselinePathPATH_ROUTED], p[baselineBaselinePathPATH_TUNNELLED],
		p[baselineBaselinePathPATH_STACK], p[baselineBaselinePathPATH_DROPPED])
	if carried := p[baselineBaselinePathPATH_DELIVERED]; carried == 0 || p[baselineBaselinePathPATH_STACK]+p[baselineBaselinePathPATH_DROPPED] > carried/100 {
		return text, errors.New("the BPF data path did not carry what was measured: " + text)
	}
	return text, nil
}

// close detaches the programs; the devices go with their hosts.
func (b *bpf) close() error {
	var errs []error
	for _, l := range b.links {
		errs = append(errs, l.Close())
	}
	for _, o := range b.objects {
		errs = append(errs, o.Close())
	}
	b.links, b.objects = nil, nil
	return errors.Join(errs...)
}

// settings describes the data path for the report.
func (b *bpf) settings() string {
	return strings.TrimSpace(fmt.Sprintf("programs on tcx; maps for connections (262,144, LRU), policy, prefixes and endpoints; veth; VXLAN on UDP port %d; no netfilter rules", vxlanPort))
}

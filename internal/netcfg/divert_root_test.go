package netcfg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/testutil"
)

// insn is one BPF instruction.
func insn(code, regs byte, off uint16, imm int32) []byte {
	b := []byte{code, regs, 0, 0, 0, 0, 0, 0}
	binary.NativeEndian.PutUint16(b[2:], off)
	binary.NativeEndian.PutUint32(b[4:], uint32(imm))
	return b
}

const (
	bpfMovImm, bpfCall, bpfExit = 0xb7, 0x85, 0x95
	helperRedirect              = 23
	redirectIngress             = 1
	actOK, actShot              = 0, 2
)

// loadTC loads a tc program made of insns; it is the test's stand-in for
// internal/plane/tcp/datapath.
func loadTC(t *testing.T, insns ...[]byte) int {
	t.Helper()
	var code []byte
	for _, i := range insns {
		code = append(code, i...)
	}
	license := []byte("GPL\x00")
	attr := struct {
		progType, insnCount uint32
		insns, license      uint64
		rest                [12]uint64
	}{
		progType: unix.BPF_PROG_TYPE_SCHED_CLS, insnCount: uint32(len(insns)),
		insns: uint64(uintptr(unsafe.Pointer(&code[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(code)
	runtime.KeepAlive(license)
	if errno != 0 {
		t.Fatalf("load program: %v", errno)
	}
	t.Cleanup(func() { unix.Close(int(fd)) })
	return int(fd)
}

// verdict is a program that gives a constant.
func verdict(t *testing.T, v int32) int {
	return loadTC(t, insn(bpfMovImm, 0, 0, v), insn(bpfExit, 0, 0, 0))
}

// TestNodeSocketHoldsOverlayAddress: sockets of the node that hold an intercepted endpoint's
// address talk to plain containers, to the outside through address translation, and to the node's
// own processes.
func TestNodeSocketHoldsOverlayAddress(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	for _, settings := range []string{
		"rp_filter=0", "rp_filter=1", "rp_filter=2", "src_valid_mark=1", "rp_filter=1 src_valid_mark=1",
	} {
		t.Run(settings, func(t *testing.T) { nodeSocketHoldsOverlayAddress(t, strings.Fields(settings)) })
	}
}

// settings are those of the machine that change which packets it takes from a device.
func nodeSocketHoldsOverlayAddress(t *testing.T, settings []string) {
	top := newTopology(t)
	node := top.node[0]
	for _, s := range settings {
		run(t, node, "sysctl -qw net.ipv4.conf.all."+s+"\nsysctl -qw net.ipv4.conf.default."+s)
	}
	top.setup(t, 0)
	top.setup(t, 1)
	c1cfg, c2cfg, c3cfg := top.endpoint(t, 0, 1, c1), top.endpoint(t, 0, 2, c2), top.endpoint(t, 1, 1, c3)
	c1cfg.Intercepted = true
	dev := top.add(t, 0, c1cfg)
	top.add(t, 0, c2cfg)
	top.add(t, 1, c3cfg)

	// What processes of the node send to the endpoint leaves by the endpoint's device, where a
	// program turns them back into the node by the divert device. The real program also sets the
	// destination hardware address; here the neighbour entry does.
	capture := loadTC(t, insn(bpfMovImm, 1, 0, int32(top.devs[0].DivertIfindex)), insn(bpfMovImm, 2, 0, redirectIngress),
		insn(bpfCall, 0, 0, helperRedirect), insn(bpfExit, 0, 0, 0))
	run(t, node, fmt.Sprintf("ip neigh replace %v lladdr %s dev %s nud permanent", c1, netdev.DivertMAC, dev.Name))
	in(t, node, func() error {
		return AttachTC(dev.Ifindex, Filter{Direction: Egress, Program: capture, Name: "capture"})
	})

	tcp, _ := serve(t, node, c1, transparent)
	expect := func(what, ns string, at netip.AddrPort, local net.Addr, asC1 bool, want string) {
		t.Helper()
		control := transparent
		if !asC1 {
			control = nil
		}
		if got, err := seenAs(ns, "tcp", at, local, control); err != nil || got != want {
			t.Errorf("%s: seen as %q, want %s: %v", what, got, want, err)
		}
	}
	held := &net.TCPAddr{IP: c1.AsSlice()}
	expect("plain container of another node", c3cfg.NetnsPath, tcp, nil, false, c3.String())
	expect("plain container of this node", c2cfg.NetnsPath, tcp, nil, false, c2.String())
	expect("over lo", node, tcp, held, true, c1.String())
	for name, to := range map[string]struct {
		ns   string
		at   netip.Addr
		seen string
	}{
		"outside":                         {top.ext, ext, "203.0.113.1"},
		"plain container of another node": {c3cfg.NetnsPath, c3, c1.String()},
		"plain container of this node":    {c2cfg.NetnsPath, c2, c1.String()},
		"own node's underlay address":     {node, underlay[0], c1.String()},
	} {
		server, _ := serve(t, to.ns, to.at, nil)
		expect("to "+name, node, server, held, true, to.seen)
	}

	expect("process of the node", node, tcp, nil, false, gateways(prefixes)[0].String())
}

func TestAttachTC(t *testing.T) {
	top := newTopology(t)
	node := top.node[0]
	run(t, node, "sysctl -qw net.ipv4.ip_forward=1")
	before := dumpState(t, node)
	filters := func() string {
		return run(t, node, "tc filter show dev under0 ingress\ntc filter show dev under0 egress")
	}
	var index int
	in(t, node, func() error {
		i, err := net.InterfaceByName("under0")
		if err == nil {
			index = i.Index
		}
		return err
	})
	pass, drop := verdict(t, actOK), verdict(t, actShot)
	attach := func(dir Direction, fd int, name string) func() error {
		return func() error { return AttachTC(index, Filter{Direction: dir, Program: fd, Name: name}) }
	}
	detach := func(dir Direction) func() error { return func() error { return DetachTC(index, dir) } }

	in(t, node, detach(Ingress)) // nothing there
	in(t, node, attach(Ingress, drop, "steer"))
	if err := pingWithin(node, underlay[1], shortTimeout); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the dropping program: %v", err)
	}
	in(t, node, attach(Ingress, pass, "steer"))
	if err := ping(node, underlay[1]); err != nil {
		t.Errorf("replaced: %v", err)
	}
	in(t, node, attach(Egress, pass, "out"))
	if got := filters(); strings.Count(got, "handle 0x1 ") != 2 || !strings.Contains(got, "heddle:steer direct-action") || !strings.Contains(got, "heddle:out direct-action") {
		t.Errorf("filters:\n%s", got)
	}
	in(t, node, detach(Ingress))
	in(t, node, detach(Ingress))
	if got := filters(); strings.Contains(got, "steer") || !strings.Contains(got, "heddle:out") {
		t.Errorf("filters:\n%s", got)
	}
	in(t, node, teardown)
	sameState(t, node, "Teardown", before)

	run(t, node, "tc qdisc add dev under0 ingress")
	mustFail(t, node, attach(Ingress, pass, "steer"), "under0", "ingress qdisc", "tc qdisc del")
	run(t, node, "tc qdisc del dev under0 ingress\ntc qdisc add dev under0 clsact")
	addForeignFilter(t, node, index, pass)
	foreign := filters()
	mustFail(t, node, attach(Ingress, pass, "steer"), "not Heddle's")
	in(t, node, detach(Ingress))
	in(t, node, teardown)
	if got := filters(); got != foreign {
		t.Errorf("a filter that is not Heddle's was touched:\n%s", got)
	}
	mustFail(t, node, attach(Egress, -1, "bad"), "attach bad to egress")
	mustFail(t, node, func() error { return AttachTC(999, Filter{Direction: Ingress, Program: pass, Name: "x"}) }, "device 999")
	in(t, node, func() error { return DetachTC(999, Ingress) })
}

// addForeignFilter puts a filter without Heddle's name where AttachTC would put one.
func addForeignFilter(t *testing.T, ns string, index, fd int) {
	t.Helper()
	in(t, ns, func() error {
		h, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		f := newFilter(index, Ingress)
		f.Fd, f.Name, f.DirectAction = fd, "somebody", true
		return h.FilterAdd(f)
	})
}

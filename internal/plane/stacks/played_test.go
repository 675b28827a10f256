package stacks

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

// socketOf are the names that modules' sockets have had ever since.
var socketOf = map[stack.Kind]string{stack.Smoltcp: "stack.sock", stack.Netstack: "netstack.sock"}

// modules plays the TCP plane: notes are kept nowhere, devices are pipes.
type modules struct {
	mu     sync.Mutex // guards opened and busy
	opened int
	busy   int   // how many times yet somebody else has the device
	none   error // why the node has no devices for modules
}

func (m *modules) StackDevices() error { return m.none }

func (m *modules) Decide(_, _ netip.Addr, port uint16) (model.Verdict, error) {
	if port == 81 {
		return model.VerdictReject, nil
	}
	return model.VerdictAllow, nil
}

func (m *modules) Note(int) (n [plane.NoteBytes]byte, ok bool, err error) { return n, false, nil }
func (m *modules) SetNote(int, [plane.NoteBytes]byte) error               { return nil }
func (m *modules) LeaveStackDevice(model.Endpoint) error                  { return nil }
func (m *modules) StackDevice(model.Endpoint, netcfg.EndpointDevice) (netcfg.StackDevice, error) {
	return netcfg.StackDevice{MTU: 1450, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Gateway: net.HardwareAddr{2, 0, 0, 0, 0, 2}}, nil
}

func (m *modules) OpenStackDevice(e model.Endpoint, d netcfg.EndpointDevice) (netcfg.StackDevice, *os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.busy > 0 {
		m.busy--
		return netcfg.StackDevice{}, nil, unix.EBUSY
	}
	m.opened++
	dev, _ := m.StackDevice(e, d)
	r, w, err := os.Pipe()
	if err == nil {
		err = w.Close()
	}
	return dev, r, err
}

type traps struct{}

func (traps) Handle(trap.Handler)             {}
func (traps) Redelivered(trap.Handler) uint64 { return 0 }

type faults struct{ sync.Map }

func (f *faults) Set(r api.FaultReason, endpoint string, err error) bool {
	_, was := f.Swap(string(r)+endpoint, err)
	return !was
}

func (f *faults) Clear(r api.FaultReason, endpoint string) bool {
	_, was := f.LoadAndDelete(string(r) + endpoint)
	return was
}

func (f *faults) Has(r api.FaultReason) bool { _, has := f.Load(string(r)); return has }

// played is a module that the test plays: it says yes to everything.
type played struct {
	*testing.T
	listener *net.UnixListener
	said     chan protocol.Head   // what it was told
	limits   chan protocol.Limits // of tenants
	known    bool                 // the tenant
}

func play(t *testing.T, path string, known bool) *played {
	t.Helper()
	_ = os.Remove(path)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	testutil.NoError(t, err)
	p := &played{t, l, make(chan protocol.Head, 64), make(chan protocol.Limits, 64), known}
	go p.run()
	return p
}

func (p *played) run() {
	conn, err := p.listener.AcceptUnix()
	if err != nil {
		return
	}
	defer conn.Close()
	for {
		b, rights := make([]byte, protocol.MessageMax), make([]byte, 64)
		n, ctl, _, _, err := conn.ReadMsgUnix(b, rights)
		if err != nil || n == 0 {
			return
		}
		h, err := protocol.ParseHead(b[:n])
		if err != nil {
			p.Error(err)
			return
		}
		p.said <- h
		h.Type |= protocol.Answer
		var answer []byte
		switch h.Type &^ protocol.Answer {
		case protocol.TypeHello:
			answer = protocol.Append(nil, &protocol.Hello{Head: h, Version: protocol.Version})
		case protocol.TypeBegin, protocol.TypeEnd:
			continue
		case protocol.TypeTenant:
			if m, err := protocol.Parse[protocol.Tenant](b[:n]); err == nil {
				p.limits <- m.Limits
			}
			if !p.known && ctl == 0 {
				h.Error = int32(unix.ENODEV)
			}
			p.known = p.known || ctl > 0
			answer = protocol.Append(nil, &protocol.Plain{Head: h})
		case protocol.TypeStats:
			answer = protocol.Append(nil, &protocol.Stats{Head: h})
		case protocol.TypeList:
			listed := h
			listed.Type, listed.ID = protocol.TypeListed, 99
			if _, err := conn.Write(protocol.Append(nil, &protocol.Info{Head: listed, Kind: protocol.KindListener})); err != nil {
				return
			}
			answer = protocol.Append(nil, &protocol.Plain{Head: h})
		case protocol.TypeListen:
			answer = protocol.Append(nil, &protocol.Named{Head: h})
		default:
			answer = protocol.Append(nil, &protocol.Plain{Head: h})
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

// hear wants a message of a type next, but for STATS and LIST, which the plane asks by itself: how
// the module is, and what policy forbids.
func (p *played) hear(want uint32) protocol.Head {
	p.Helper()
	for {
		select {
		case h := <-p.said:
			if h.Type != want && (h.Type == protocol.TypeStats || h.Type == protocol.TypeList) {
				continue
			}
			if h.Type != want {
				p.Fatalf("message %d, want %d", h.Type, want)
			}
			return h
		case <-time.After(testutil.WaitTimeout):
			p.Fatalf("no message %d", want)
		}
	}
}

// runPlane is a plane that runs until the end of the test.
func runPlane(t *testing.T, dir string, notes *modules) (*Plane, *faults) {
	t.Helper()
	f := &faults{}
	p, err := Open(Config{
		Config:       module.Config{Programs: module.Programs{StateDir: dir, Self: filepath.Join(dir, "heddled")}, Log: slog.New(slog.NewTextHandler(io.Discard, nil))},
		StackModules: notes, Traps: traps{}, Keeper: func() trap.Keeper { return nil }, StacksChanged: func() {},
		Faults: f,
	})
	testutil.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		testutil.NoError(t, errors.Join(<-done, p.Close()))
	})
	return p, f
}

package stacks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// Policy decides on each packet of a module's at the veth (docs/architecture/policy.md). So a
// connection that becomes forbidden goes silent, and its program would hear of that only when it
// speaks: the plane ends it.

// reasonCut counts them.
var reasonCut = model.Reason{
	Name: "stacks_cut_policy", Kind: model.KindCut, Help: "connection of a stack module that the policy in force forbids, ended",
	Remedy: "`heddle policy explain FROM TO tcp/PORT`",
}

// states of a connection as in TCP_INFO.
const (
	tcpEstablished = 1
	tcpSynSent     = 2
	tcpSynRecv     = 3
	tcpTimeWait    = 6
	tcpClose       = 7
	tcpCloseWait   = 8
)

// ApplyPolicy implements plane.Policy: the TCP plane's tables are what decides.
func (p *Plane) ApplyPolicy(model.PolicyChange) error { return nil }

// CutForbidden implements plane.Policy. All tenants are asked at once: one whose answers take long
// holds up no other's.
func (p *Plane) CutForbidden() (cut int, err error) {
	ctx, cancel := context.WithTimeout(p.ctx, module.Answers)
	defer cancel()
	var asked sync.WaitGroup
	var mu sync.Mutex // guards cut and err
	for t, l := range p.reached() {
		asked.Go(func() {
			n, failed := p.cutForbiddenOf(ctx, l, t)
			mu.Lock()
			defer mu.Unlock()
			if cut += n; failed != nil && !errors.Is(failed, unix.ENODEV) && !errors.Is(failed, process.ErrGone) {
				err = errors.Join(err, fmt.Errorf("end connections of %s that are forbidden: %w", t.Name, failed))
			}
		})
	}
	asked.Wait()
	p.cut.Add(uint64(cut))
	return cut, err
}

func (p *Plane) cutForbiddenOf(ctx context.Context, l *module.Link, t *tenant) (cut int, err error) {
	sockets, err := l.Sockets(ctx, t.number())
	if err != nil {
		return 0, err
	}
	for _, s := range sockets {
		from, to, ok := opened(&s)
		if !ok {
			continue
		}
		verdict, err := p.cfg.StackModules.Decide(from, to.Addr(), to.Port())
		if err != nil {
			return cut, err
		}
		if verdict == model.VerdictAllow {
			continue
		}
		t.cuts(s.Head.ID)
		err = l.CloseSocket(ctx, t.number(), s.Head.ID, protocol.Abort)
		if err == nil {
			cut++
		} else if !errors.Is(err, unix.ENOENT) { // it has just ended
			return cut, err
		}
	}
	return cut, nil
}

// opened tells who has opened a connection, to where; false if there is none. Of a handshake policy
// sees the packets.
func opened(s *protocol.Info) (from netip.Addr, to netip.AddrPort, ok bool) {
	switch s.State {
	case tcpSynSent, tcpSynRecv, tcpTimeWait, tcpClose:
		return from, to, false
	}
	local, remote := s.Local.AddrPort(), s.Remote.AddrPort()
	if s.Kind != protocol.KindConnection || remote.Addr().IsLoopback() {
		return from, to, false
	}
	if s.Listener != 0 {
		return remote.Addr(), local, true
	}
	return local.Addr(), remote, true
}

// CutForbiddenIn implements plane.Policy: processes with the container's own stack are the TCP
// plane's.
func (p *Plane) CutForbiddenIn(string) (int, error) { return 0, nil }

// Counters implements plane.Reports.
func (p *Plane) Counters() ([]api.Counter, error) {
	return []api.Counter{{Name: reasonCut.Name, Kind: reasonCut.Kind, Help: reasonCut.Help, Value: p.cut.Load()}}, nil
}

package verbs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// A router of another build than the one that is installed, as there is after an upgrade, keeps the
// endpoints whose programs have devices open, and gives each back when the last is closed: docs/
// architecture/verbs.md. One that does not answer, or hangs up, is connected to again: it has
// ended, and its socket goes, when nobody listens there.

// inherit connects to the routers that earlier agents have started. It gives the one that stays, if
// there is one; those of other builds are served until they have ended, by goroutines of old.
func (p *Plane) inherit(ctx context.Context, old *sync.WaitGroup) (*link, error) {
	l, err := adopt(filepath.Join(p.cfg.StateDir, socketFile))
	if err == nil && p.isOther(l) {
		if err := p.putAside(l); err != nil {
			// It stays what it is: without its socket nobody could find it any more.
			p.cfg.Log.Error("router of another build stays in use", "pid", l.PID, "err", err)
			return l, nil
		}
		l, err = nil, nil
	}
	sockets, globErr := filepath.Glob(filepath.Join(p.cfg.StateDir, oldDir, "*"))
	for _, socket := range sockets {
		link := newLink(socket)
		p.pass(nil, link)
		drained := p.drain(link)
		// Another router may have what one that does not answer would keep.
		if drained != nil && (process.Nobody(drained) || l != nil || len(sockets) > 1) {
			p.pass(link, nil)
		}
		old.Go(func() { p.serveOld(ctx, link, drained) })
	}
	return l, errors.Join(err, globErr)
}

// isOther reports whether a router is another program than the one that would be started now.
func (p *Plane) isOther(l *link) bool {
	installed, err := FindProgram(p.cfg.Self)
	if err != nil {
		return false // nothing could take its place
	}
	same, err := process.Runs(l.PID, installed)
	if err != nil {
		p.cfg.Log.Warn("build of the router that runs not known: it stays", "pid", l.PID, "err", err)
	}
	return err == nil && !same
}

// putAside makes room for the next router, at whose socket this one listens.
func (p *Plane) putAside(l *link) error {
	defer l.close() // it is connected to again, where it is then
	dir := filepath.Join(p.cfg.StateDir, oldDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.Rename(l.socket, filepath.Join(dir, fmt.Sprintf("%d.sock", l.PID)))
}

// drain connects to an old router, has it give back what no program has a device of, and hears what
// it keeps.
func (p *Plane) drain(l *link) (err error) {
	defer func() {
		if err != nil {
			p.hangUp(l)
		}
	}()
	found, err := adopt(l.socket)
	if err != nil {
		return err
	}
	p.mu.Lock()
	l.Conn, l.foreign = found.Conn, false
	p.mu.Unlock()
	m, err := l.receiveSoon()
	switch {
	case err != nil:
		return err
	case m.Type != protocol.TypeHello:
		return fmt.Errorf("%w: type %d", layout.ErrMalformed, m.Type)
	case m.number != protocol.Version:
		p.faultOld(l, fmt.Errorf("%s, process %d, speaks version %d, and this agent %d: what it serves goes on without new pairs; end it (kill %d), and its programs open the device again",
			Program, l.PID, m.number, protocol.Version, l.PID))
		l.foreign = true
		p.pass(l, nil)
		return l.SetReadDeadline(time.Time{})
	}
	p.nameAll(l)
	for {
		if m, err = l.receiveSoon(); err != nil {
			return err
		}
		switch m.Type {
		case protocol.TypeDrain:
			return l.SetReadDeadline(time.Time{})
		case protocol.TypeRefused, protocol.TypeReleased:
			p.released(l, m)
		case protocol.TypeStatistics:
			p.lastCounts(m)
		case protocol.TypeGroups:
			p.hearGroups(l, m)
		default:
			// What it asks for before, it asks for again.
		}
	}
}

// nameAll names the endpoints to an old router that may have them, and has it drain.
func (p *Plane) nameAll(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.old = append(p.old, l)
	p.send(l, helloMessage(), nil)
	p.send(l, plain(protocol.TypeBegin, 0), nil)
	for _, ep := range p.endpoints {
		if ep.router == l {
			p.send(l, endpointMessage(ep.number, ep.Endpoint, p.cfg.Limits), nil)
		}
	}
	p.tellAllGroups(l)
	p.send(l, plain(protocol.TypeEnd, 0), nil)
	p.send(l, plain(protocol.TypeDrain, 0), nil)
}

// serveOld serves an old router until it has ended, or ctx ends. err is that of drain.
func (p *Plane) serveOld(ctx context.Context, l *link, err error) {
	for pause := firstPause; !process.Nobody(err); {
		if err == nil {
			p.hearOld(ctx, l)
			pause = firstPause
		} else {
			p.faultOld(l, fmt.Errorf("%s at %s does not answer, and is connected to again: %w", Program, l.socket, err))
			select {
			case <-ctx.Done():
			case <-time.After(pause):
				pause = min(2*pause, lastPause)
			}
		}
		if ctx.Err() != nil {
			return // the next agent finds it
		}
		// It may be there still: it hangs up on who does not read.
		err = p.drain(l)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	_ = os.Remove(l.socket)
	p.noFaultOld(l)
	kept := p.kept(l)
	p.lost(l)
	if kept == 0 {
		p.cfg.Log.Info("router of an earlier build has ended", "pid", l.PID)
		return
	}
	p.ended++
	p.cfg.Log.Error("router of an earlier build has ended before its programs", "pid", l.PID, "endpoints", kept, "err", err)
	for _, ep := range p.endpoints {
		if ep.router == nil {
			p.tellIfThere(ep)
		}
	}
}

// hearOld hears an old router that has drained, until its connection or ctx ends.
func (p *Plane) hearOld(ctx context.Context, l *link) {
	ctx, cancel := context.WithCancel(ctx)
	var connecting sync.WaitGroup
	defer connecting.Wait()
	defer cancel()
	conn := l.Conn
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	p.mu.Lock()
	if !l.foreign {
		p.noFaultOld(l)
	}
	p.letEnd(l)
	p.mu.Unlock()
	m, err := l.receive()
	for ; err == nil; m, err = l.receive() {
		p.hear(ctx, l, m, &connecting)
	}
	p.hangUp(l)
}

// faultOld notes what is wrong with an old router.
func (p *Plane) faultOld(l *link, err error) {
	l.faulty = true
	if p.cfg.Faults.Set(FaultOldRouter, "", err) {
		p.cfg.Log.Error("router of an earlier build", "reason", FaultOldRouter, "pid", l.PID, "err", err)
	}
}

// noFaultOld takes that back.
func (p *Plane) noFaultOld(l *link) {
	if l.faulty {
		l.faulty = false
		p.cfg.Faults.Clear(FaultOldRouter, "")
	}
}

// hangUp ends the connection to an old router. What that has stays its own.
func (p *Plane) hangUp(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.UnixConn != nil {
		l.close()
	}
	p.old = slices.DeleteFunc(p.old, func(o *link) bool { return o == l })
}

// pass has the endpoints of one router be another's: nil is the one that stays, if it is there.
func (p *Plane) pass(from, to *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.router != from {
			continue
		}
		if ep.router = to; to == nil {
			p.tellIfThere(ep)
		}
	}
}

// letEnd has an old router end that has nothing left to serve. The caller holds mu.
func (p *Plane) letEnd(l *link) {
	if slices.Contains(p.old, l) && p.kept(l) == 0 {
		_ = l.CloseWrite() // or it has ended
	}
}

// kept counts the endpoints that a router has. The caller holds mu.
func (p *Plane) kept(l *link) (n int) {
	for _, ep := range p.endpoints {
		if ep.router == l {
			n++
		}
	}
	return n
}

// released takes an endpoint that an old router has no more, or does not know, for the router that
// takes its place: with the socket at which programs may wait, if it was given back.
func (p *Plane) released(l *link, m heard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number != m.Endpoint || ep.router != l {
			continue
		}
		ep.router = nil
		ep.counted.restart()
		ep.closeListener()
		ep.listener, m.file = m.file, nil
		p.tellIfThere(ep)
	}
	if m.file != nil {
		_ = m.file.Close()
	}
	p.letEnd(l)
}

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
// architecture/verbs.md.

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
		link, err := adopt(socket)
		switch {
		case process.Nobody(err):
			_ = os.Remove(socket) // its router has ended
			continue
		case err != nil:
			p.silent(socket, err)
			continue
		}
		drained := p.drain(link)
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

// drain has an old router give back what no program has a device of, and hears what it keeps.
func (p *Plane) drain(l *link) error {
	m, err := l.receiveSoon()
	switch {
	case err != nil:
		return err
	case m.Type != protocol.TypeHello:
		return fmt.Errorf("%w: type %d", layout.ErrMalformed, m.Type)
	case m.number != protocol.Version:
		err := fmt.Errorf("%s, process %d, speaks version %d, and this agent %d: what it serves goes on without new pairs; end it (kill %d), and its programs open the device again",
			Program, l.PID, m.number, protocol.Version, l.PID)
		if p.cfg.Faults.Set(FaultOldRouter, "", err) {
			p.cfg.Log.Error("router of another version", "reason", FaultOldRouter, "err", err)
		}
		l.foreign = true
		return l.SetReadDeadline(time.Time{})
	}
	p.mu.Lock()
	p.old = append(p.old, l)
	p.send(l, helloMessage(), nil)
	p.send(l, plain(protocol.TypeBegin, 0), nil)
	for _, ep := range p.endpoints {
		if ep.router == nil {
			ep.router = l
			p.send(l, endpointMessage(ep.number, ep.Endpoint, p.cfg), nil)
		}
	}
	p.tellAllGroups(l)
	p.send(l, plain(protocol.TypeEnd, 0), nil)
	p.send(l, plain(protocol.TypeDrain, 0), nil)
	p.mu.Unlock()
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

// silent notes that an old router could not be asked what it has. What programs have there goes on
// without new pairs, and the next agent finds it at its socket.
func (p *Plane) silent(socket string, err error) {
	err = fmt.Errorf("%s at %s does not answer: what it serves goes on without new pairs; restart heddled to ask it again, or end it, and its programs open the device again: %w",
		Program, socket, err)
	if p.cfg.Faults.Set(FaultOldRouter, "", err) {
		p.cfg.Log.Error("router of an earlier build", "reason", FaultOldRouter, "err", err)
	}
}

// serveOld serves an old router until it has ended, or ctx ends. err is that of drain.
func (p *Plane) serveOld(ctx context.Context, l *link, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var connecting sync.WaitGroup
	defer connecting.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, l.close)()
	p.mu.Lock()
	p.letEnd(l)
	p.mu.Unlock()
	for err == nil {
		var m heard
		if m, err = l.receive(); err == nil {
			p.hear(ctx, l, m, &connecting)
		}
	}
	l.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil || p.closed {
		return // the next agent finds it
	}
	p.old = slices.DeleteFunc(p.old, func(o *link) bool { return o == l })
	kept := p.kept(l)
	p.lost(l)
	if errors.Is(err, os.ErrDeadlineExceeded) { // of drain
		p.silent(l.socket, err)
	} else {
		_ = os.Remove(l.socket)
		if l.foreign {
			p.cfg.Faults.Clear(FaultOldRouter, "")
		}
		if kept == 0 {
			p.cfg.Log.Info("router of an earlier build has ended", "pid", l.PID)
			return
		}
		p.ended++
		p.cfg.Log.Error("router of an earlier build has ended before its programs", "pid", l.PID, "endpoints", kept, "err", err)
	}
	for _, ep := range p.endpoints {
		if ep.router == nil {
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

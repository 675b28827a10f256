package intercept

import (
	"errors"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
)

var (
	errClosed  = errors.New("server is closed")
	errTooMany = errors.New("too many listeners")
)

// serveListener starts l's first reader, or releases l.
func (s *Server) serveListener(l *listener) (serves bool) {
	var id model.EndpointID
	err := errNoEndpoint // until its first call
	if !l.byNetns() && !l.ioctlOnly() {
		id, err = s.cfg.Resolve(l.state.Metadata, l.state)
	}
	if err != nil && !l.byNetns() && !l.ioctlOnly() {
		l.logged[failUnknown] = true
		s.log.Error("listener of an unknown endpoint: its TCP sockets are refused with ENETDOWN; give listenerMetadata an endpoint's id or name",
			"metadata", l.state.Metadata, "container", l.state.State.ID, "pid", l.state.Pid, "err", err)
	}
	l.syncs = s.wake.set(l.fd)
	if l.mayHaveBatches() {
		s.batches.begin(s)
	}
	switch refused := s.register(l, id, err == nil); refused {
	case errClosed:
		l.close() // if it is kept it stays so for the next server
	case errTooMany:
		s.count(failTooMany)
		s.log.Error("listener refused: its container's TCP sockets fail with ENOSYS; raise MaxListeners",
			"container", l.state.State.ID, "metadata", l.state.Metadata, "limit", s.cfg.MaxListeners)
		s.release(l)
		l.close()
	default:
		return true
	}
	return false
}

// checkIdentity tells the operator of a container that names another's endpoint. It gets no socket of that endpoint
// whatever this finds: each call is checked.
func (s *Server) checkIdentity(ep *endpoint, state *specs.ContainerProcessState) {
	if ep == nil || s.cfg.NetnsOf == nil {
		return
	}
	have, err := s.proc.netnsOf(uint32(state.Pid))
	if err != nil {
		return // it has ended
	}
	if want, ok := s.cfg.NetnsOf(ep.id); !ok || have != want {
		s.count(failForeignNetns)
		s.log.Error("container is not in the network namespace of the endpoint it names: it gets none of its sockets; correct its annotation or the endpoint's netns_path",
			"reason", failForeignNetns.String(), "metadata", state.Metadata, "container", state.State.ID, "pid", state.Pid)
	}
}

// register binds l to its endpoint, if that is known, and starts the first reader.
func (s *Server) register(l *listener, id model.EndpointID, known bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if len(s.listeners) >= s.cfg.MaxListeners {
		return errTooMany
	}
	if known {
		s.bind(l, id)
	}
	s.listeners[l] = struct{}{}
	s.tasks.Go(func() {
		finished := l.run()
		s.unregister(l)
		if finished {
			s.release(l)
		}
		l.close()
	})
	return nil
}

// bind makes l one of an endpoint's listeners. It is called with mu held.
func (s *Server) bind(l *listener, id model.EndpointID) {
	ep := s.endpoints[id]
	if ep == nil {
		ep = newEndpoint(id)
		s.endpoints[id] = ep
	}
	ep.users++
	l.ep.Store(ep)
	// Most programs ask for IPv4 first. The IPv6 pool starts with its first use.
	s.prefiller.request(&ep.v4, needNow, nothing)
}

// unbind undoes bind, and gives the endpoint if l was its last listener. It is called with mu held.
func (s *Server) unbind(l *listener) (unused *endpoint) {
	ep := l.ep.Load()
	if ep == nil {
		return nil
	}
	if ep.users--; ep.users > 0 {
		return nil
	}
	if s.endpoints[ep.id] == ep {
		delete(s.endpoints, ep.id)
	}
	return ep
}

// move makes l one of endpoint id's listeners, whatever it was before. Only l's readers may call it.
func (s *Server) move(l *listener, id model.EndpointID) {
	s.mu.Lock()
	var unused *endpoint
	if ep := l.ep.Load(); ep == nil || ep.removed.Load() || ep.id != id { // else another reader came first
		unused = s.unbind(l)
		s.bind(l, id)
	}
	s.mu.Unlock()
	if unused != nil {
		s.prefiller.drop(unused)
	}
}

// unregister removes l, and its endpoint's ready sockets if it was the endpoint's last listener.
func (s *Server) unregister(l *listener) {
	s.mu.Lock()
	delete(s.listeners, l)
	unused := s.unbind(l)
	s.mu.Unlock()
	if unused != nil {
		s.prefiller.drop(unused)
	}
}

// Forget says that an endpoint was removed: its ready sockets are closed, and later requests for sockets
// by its processes fail with ENETDOWN, for as long as they live. A call that is being answered right now
// may still succeed, as if it had come before. Forgetting an endpoint without listeners does nothing.
func (s *Server) Forget(id model.EndpointID) {
	s.mu.Lock()
	e := s.endpoints[id]
	delete(s.endpoints, id)
	s.mu.Unlock()
	if e != nil {
		e.removed.Store(true)
		s.prefiller.drop(e)
	}
}

// Stats reads all counters, one after the other: they may be of slightly different moments.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	listeners := len(s.listeners)
	s.mu.Unlock()
	c := &s.counters
	st := Stats{
		Listeners:    listeners,
		Readers:      int(s.readers.Load()),
		Ready:        int(s.prefiller.total.Load()),
		Answered:     c.answered.Load(),
		Continued:    c.continued.Load(),
		PoolHits:     c.hits.Load(),
		PoolMisses:   c.misses.Load(),
		Ioctls:       c.ioctls.Load(),
		Batches:      c.batches.Load(),
		BatchSockets: c.batchSockets.Load(),
		Failed:       make(map[string]uint64, numFailures-1),
	}
	for f := failNone + 1; f < numFailures; f++ {
		st.Failed[f.String()] = c.failed[f].Load()
	}
	return st
}

func (s *Server) count(f failure) { s.counters.failed[f].Add(1) }

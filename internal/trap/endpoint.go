package trap

import (
	"errors"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
)

var (
	errClosed  = errors.New("server is closed")
	errTooMany = errors.New("too many listeners")
)

// serveListener starts l's first reader, or releases l.
func (s *Server) serveListener(l *Listener) (serves bool) {
	var id model.EndpointID
	err := errNoEndpoint // until its first call
	if l.Intercepted() && !l.byNetns() {
		id, err = s.cfg.Resolve(l.state.Metadata, l.state)
		if err != nil {
			l.first(&s.why.unknown)
			s.log.Error("listener of an unknown endpoint: its TCP sockets are refused with ENETDOWN; give listenerMetadata an endpoint's id or name",
				"metadata", l.state.Metadata, "container", l.state.State.ID, "pid", l.state.Pid, "err", err)
		}
	}
	l.syncs = s.wake.set(l.fd)
	switch refused := s.register(l, id, err == nil); refused {
	case errClosed:
		l.close() // if it is kept it stays so for the next server
	case errTooMany:
		s.why.tooMany.Add()
		s.log.Error("listener refused: its container's TCP sockets fail with ENOSYS; raise MaxListeners",
			"container", l.state.State.ID, "metadata", l.state.Metadata, "limit", s.cfg.MaxListeners)
		s.release(l)
		l.close()
	case nil:
		return true
	default:
		l.fail(&s.why.receive, refused)
		s.end(l, false)
	}
	return false
}

// checkIdentity tells the operator of a container that names another's endpoint. It gets no socket
// of that endpoint whatever this finds: each call is checked.
func (s *Server) checkIdentity(ep *Endpoint, state *specs.ContainerProcessState) {
	if ep == nil || s.cfg.NetnsOf == nil {
		return
	}
	have, err := s.proc.Netns(uint32(state.Pid))
	if err != nil {
		return // it has ended
	}
	if want, ok := s.cfg.NetnsOf(ep.ID); !ok || have != want {
		s.why.otherNetns.Add()
		s.log.Error("container is not in the network namespace of the endpoint it names: it gets none of its sockets; correct its annotation or the endpoint's netns_path",
			"reason", s.why.otherNetns.Name, "metadata", state.Metadata, "container", state.State.ID, "pid", state.Pid)
	}
}

// register binds l to its endpoint, if that is known, and starts the first reader.
func (s *Server) register(l *Listener, id model.EndpointID, known bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if len(s.listeners) >= s.cfg.MaxListeners {
		return errTooMany
	}
	for _, h := range s.handlers {
		if h, ok := h.Handler.(ListenerHandler); ok {
			h.Opened(l)
		}
	}
	if known {
		s.bind(l, id)
	}
	s.setAway(l)
	s.setQuestions(l)
	s.listeners[l] = struct{}{}
	return s.watch.add(l)
}

// end gives a listener up; finished says that its filter has no users any more.
func (s *Server) end(l *Listener, finished bool) {
	s.watch.remove(l)
	s.unregister(l)
	if finished {
		s.release(l)
	}
	l.close()
}

// bind makes l one of an endpoint's listeners. It is called with mu held.
func (s *Server) bind(l *Listener, id model.EndpointID) {
	ep := s.endpoints[id]
	if ep == nil {
		ep = &Endpoint{ID: id}
		s.endpoints[id] = ep
		for _, h := range s.handlers {
			if h.endpoints != nil {
				h.endpoints.Bound(ep)
			}
		}
	}
	ep.users++
	l.ep.Store(ep)
}

// unbind undoes bind, and gives the endpoint if l was its last listener. It is called with mu held.
func (s *Server) unbind(l *Listener) (unused *Endpoint) {
	ep := l.ep.Load()
	if ep == nil {
		return nil
	}
	if ep.users--; ep.users > 0 {
		return nil
	}
	if s.endpoints[ep.ID] == ep {
		delete(s.endpoints, ep.ID)
	}
	return ep
}

// released tells the handlers of an endpoint without listeners, if there is one. It is called
// without mu.
func (s *Server) released(ep *Endpoint) {
	if ep == nil {
		return
	}
	for _, h := range s.handlers {
		if h.endpoints != nil {
			h.endpoints.Released(ep)
		}
	}
}

// move makes l one of endpoint id's listeners, whatever it was before. Only l's readers may call
// it.
func (s *Server) move(l *Listener, id model.EndpointID) {
	s.mu.Lock()
	var unused *Endpoint
	if ep := l.ep.Load(); ep == nil || ep.Removed() || ep.ID != id { // else another reader came first
		unused = s.unbind(l)
		s.bind(l, id)
		s.setAway(l)
	}
	s.mu.Unlock()
	s.released(unused)
}

// unregister removes l, and its endpoint if it was the endpoint's last listener.
func (s *Server) unregister(l *Listener) {
	s.mu.Lock()
	delete(s.listeners, l)
	unused := s.unbind(l)
	s.mu.Unlock()
	s.released(unused)
	for _, h := range s.handlers {
		if h, ok := h.Handler.(ListenerHandler); ok {
			h.Closed(l)
		}
	}
}

// Forget says that an endpoint was removed: later calls by its processes are refused with ENETDOWN,
// for as long as they live. A call that is being answered right now may still succeed, as if it had
// come before. Forgetting an endpoint without listeners does nothing.
func (s *Server) Forget(id model.EndpointID) {
	s.mu.Lock()
	ep := s.endpoints[id]
	delete(s.endpoints, id)
	s.mu.Unlock()
	if ep != nil {
		ep.Remove()
		s.AwayChanged()
		s.released(ep)
	}
}

// Stats reads all counters, one after the other: they may be of slightly different moments.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	listeners := len(s.listeners)
	s.mu.Unlock()
	st := Stats{
		Listeners: listeners,
		Readers:   int(s.readers.Load()),
		Continued: s.continued.Load(),
		Failed:    map[string]uint64{},
	}
	all := s.why.all()
	for _, h := range s.handlers {
		all = append(all, h.Reasons()...)
	}
	for _, r := range all {
		st.Failed[r.Name] += r.Count()
	}
	return st
}

// redelivered counts a caller that was told a descriptor of the agent before. Whose handler gave it
// is not known: of several that own the call it is taken to be the one that is asked last.
func (s *Server) redelivered(d *Data) {
	for _, h := range slices.Backward(s.handlers) {
		if h.Owns(d) {
			h.redelivered.Add(1)
			return
		}
	}
}

// Redelivered gives how many callers were told a descriptor that they had already: by this agent,
// when the handler had no note of it, or of the agent before it.
func (s *Server) Redelivered(h Handler) uint64 {
	for _, have := range s.handlers {
		if have.Handler == h {
			return have.redelivered.Load()
		}
	}
	return 0
}

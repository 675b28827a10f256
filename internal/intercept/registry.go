package intercept

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/intercept/park"
	"heddle.dev/heddle/internal/model"
)

var (
	errClosed  = errors.New("server is closed")
	errTooMany = errors.New("too many listeners")
)

// serveListener starts l's loop, or releases l.
func (s *Server) serveListener(l *listener) {
	id, err := s.cfg.Resolve(l.state.Metadata, l.state)
	if err != nil {
		l.logged[failUnknown] = true
		s.log.Error("listener of an unknown endpoint: its TCP sockets are refused with ENETDOWN; give listenerMetadata an endpoint's id or name",
			"metadata", l.state.Metadata, "container", l.state.State.ID, "pid", l.state.Pid, "err", err)
	}
	s.wake.set(l.fd)
	switch refused := s.register(l, id, err == nil); refused {
	case errClosed:
		l.close() // it stays parked for the next server
	case errTooMany:
		s.count(failTooMany)
		s.log.Error("listener refused: its container's TCP sockets fail with ENOSYS; raise MaxListeners",
			"container", l.state.State.ID, "metadata", l.state.Metadata, "limit", s.cfg.MaxListeners)
		s.unpark(l)
		l.close()
	}
}

// register ties l to its endpoint, if that is known, and starts the loop.
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
		l.ep = s.endpoints[id]
		if l.ep == nil {
			l.ep = newEndpoint(id)
			s.endpoints[id] = l.ep
		}
		l.ep.users++
		// Most programs ask for IPv4 first. The IPv6 stock starts with its first use.
		s.refiller.request(&l.ep.v4)
	}
	s.listeners[l] = struct{}{}
	s.tasks.Go(func() {
		finished := l.run()
		s.unregister(l)
		if finished {
			s.unpark(l)
		}
		l.close()
	})
	return nil
}

// unregister removes l, and its endpoint's ready sockets if it was the endpoint's last listener.
func (s *Server) unregister(l *listener) {
	s.mu.Lock()
	delete(s.listeners, l)
	unused := false
	if l.ep != nil {
		l.ep.users--
		unused = l.ep.users == 0
		if unused && s.endpoints[l.ep.id] == l.ep {
			delete(s.endpoints, l.ep.id)
		}
	}
	s.mu.Unlock()
	if unused {
		s.refiller.drop(l.ep)
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
		s.refiller.drop(e)
	}
}

// Stats reads all counters, one after the other: they may be of slightly different moments.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	listeners := len(s.listeners)
	s.mu.Unlock()
	c := &s.counters
	st := Stats{
		Listeners: listeners,
		Ready:     int(s.refiller.total.Load()),
		Answered:  c.answered.Load(),
		Continued: c.continued.Load(),
		Premade:   c.premade.Load(),
		Inline:    c.inline.Load(),
		Failed:    make(map[string]uint64, numFailures-1),
	}
	for f := failNone + 1; f < numFailures; f++ {
		st.Failed[f.String()] = c.failed[f].Load()
	}
	return st
}

func (s *Server) count(f failure) { s.counters.failed[f].Add(1) }

// park gives the parker a duplicate of l and moves l's call into memory the parker keeps. Without a
// parker, or if it refuses, l works on unparked.
func (s *Server) park(l *listener) {
	if s.cfg.Parker == nil {
		return
	}
	if err := s.tryPark(l); err != nil {
		s.count(failPark)
		s.log.Error("listener not parked: its container gets ENOSYS for new TCP sockets when this agent ends; see that the holder runs",
			"container", l.state.State.ID, "err", err)
	}
}

func (s *Server) tryPark(l *listener) error {
	page, err := unix.MemfdCreate("heddle-call", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("call page: %w", err)
	}
	defer closeFD(page) // the mapping, and the parker's duplicate, keep the memory
	if err := unix.Ftruncate(page, callPageBytes); err != nil {
		return fmt.Errorf("call page: %w", err)
	}
	if err := l.mapFlight(page); err != nil {
		return err
	}
	state := l.state
	state.State.Annotations = nil // can be large, and metadata names the endpoint
	meta, err := json.Marshal(state)
	if err != nil {
		return err
	}
	key := parkKey(state)
	if err := s.cfg.Parker.Put(key, meta, l.fd, page); err != nil {
		return err
	}
	l.key = key
	return nil
}

// parkKey makes a name no other listener has: a container has one for every exec.
func parkKey(state specs.ContainerProcessState) string {
	var unique [8]byte
	rand.Read(unique[:]) // never fails
	id := state.State.ID
	return fmt.Sprintf("%s/%d/%s", id[:min(len(id), 256)], state.Pid, hex.EncodeToString(unique[:]))
}

// unpark tells the parker that a listener is not needed any more. If it does not hear, it finds out by
// itself once the filter has no users.
func (s *Server) unpark(l *listener) {
	if l.key == "" {
		return
	}
	if err := s.cfg.Parker.Drop(l.key); err != nil {
		s.log.Warn("listener stays parked until its filter has gone", "container", l.state.State.ID, "err", err)
	}
}

// resume serves the listeners an earlier agent parked.
func (s *Server) resume() {
	if s.cfg.Parker == nil {
		return
	}
	parked, err := s.cfg.Parker.TakeAll()
	if err != nil {
		s.count(failParkedListener)
		s.log.Error("running containers are not served: their calls wait; start the holder and restart the agent", "err", err)
		return
	}
	for _, p := range parked {
		l, err := s.unpack(p)
		if err != nil {
			s.count(failParkedListener)
			s.log.Error("parked listener not resumed", "key", p.Key, "err", err)
			continue
		}
		s.serveListener(l)
	}
	if len(parked) > 0 {
		s.log.Info("resumed parked listeners", "count", len(parked))
	}
}

// unpack makes a listener of what the parker kept. It takes over the descriptors.
func (s *Server) unpack(p park.Parked) (l *listener, err error) {
	defer closeFD(p.Page)
	defer func() {
		if err != nil {
			closeFD(p.FD)
		}
	}()
	l = &listener{srv: s, fd: p.FD, key: p.Key}
	if err := json.Unmarshal(p.Meta, &l.state); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if !isNotifyFD(p.FD) {
		return nil, errors.New("not a seccomp listener")
	}
	var st unix.Stat_t
	if err := unix.Fstat(p.Page, &st); err != nil {
		return nil, fmt.Errorf("call page: %w", err)
	}
	if st.Size < callPageBytes { // touching it would be a SIGBUS
		return nil, fmt.Errorf("call page of %d bytes, want %d", st.Size, callPageBytes)
	}
	return l, l.mapFlight(p.Page)
}

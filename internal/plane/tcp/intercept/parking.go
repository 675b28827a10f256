package intercept

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
)

const (
	// parkerPause is how long a parker that does not start waits for another try.
	parkerPause = time.Second
	// maxWatchFailures is how often in a row a parker may answer and yet not be watched: one of an older
	// version cannot.
	maxWatchFailures = 5
)

// preparePark moves l's calls into memory that a parker can keep, before the first reader begins. Without a parker, or if
// it cannot be had, l works on unparked.
func (s *Server) preparePark(l *listener) {
	if s.cfg.Parker == nil {
		return
	}
	page, err := unix.MemfdCreate("heddle-call", unix.MFD_CLOEXEC)
	if err == nil {
		if err = unix.Ftruncate(page, callPageBytes); err == nil {
			err = l.mapFlights(page)
		}
		if err != nil {
			closeFD(page)
		}
	}
	if err != nil {
		s.notParked(l, fmt.Errorf("call page: %w", err))
		return
	}
	l.pageFD, l.key = page, parkKey(l.state)
}

// park gives the parker duplicates of l and its page.
func (s *Server) park(l *listener) {
	l.parkMu.Lock()
	defer l.parkMu.Unlock()
	if l.key == "" || l.closed {
		return
	}
	state := l.state
	state.State.Annotations = nil // can be large, and metadata names the endpoint
	if l.mayHaveCrates() {
		state.State.Annotations = map[string]string{model.AnnotationSocketPool: "true"}
	}
	meta, err := json.Marshal(state)
	if err == nil {
		err = s.cfg.Parker.Put(l.key, meta, l.fd, l.pageFD)
	}
	if err != nil {
		s.notParked(l, err)
	}
}

func (s *Server) notParked(l *listener, err error) {
	s.count(failPark)
	s.log.Error("listener not parked: its container gets ENOSYS for new TCP sockets when this agent ends; see that the holder runs",
		"container", l.state.State.ID, "err", err)
}

// guardParker waits for the parker's end. Then it has it started anew and parks every listener again: until
// then the end of this agent would be the end of their calls.
func (s *Server) guardParker(ctx context.Context) {
	for failed := 0; ; {
		err := s.cfg.Parker.Watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failed = 0
			s.log.Warn("holder has ended; starting another")
		} else if failed++; failed == maxWatchFailures {
			s.log.Error("holder cannot be watched, so its end would not be noticed: end it, then restart the agent", "err", err)
			return
		}
		for {
			if err = s.cfg.StartParker(); err == nil {
				break
			}
			s.log.Error("holder does not start: running containers get ENOSYS for new TCP sockets should this agent end", "err", err)
			if s.pause(parkerPause); ctx.Err() != nil {
				return
			}
		}
		s.parker.Add(1)
		s.parkSocket()
		s.parkAll()
	}
}

// parkAll parks every listener.
func (s *Server) parkAll() {
	s.mu.Lock()
	all := make([]*listener, 0, len(s.listeners))
	for l := range s.listeners {
		all = append(all, l)
	}
	s.mu.Unlock()
	for _, l := range all {
		s.park(l)
	}
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
	count := 0
	for _, p := range parked {
		if p.Key == handoffKey {
			closeFD(p.FD)
			closeFD(p.Page)
			continue
		}
		count++
		l, err := s.unpack(p)
		if err != nil {
			s.count(failParkedListener)
			s.log.Error("parked listener not resumed", "key", p.Key, "err", err)
			continue
		}
		s.serveListener(l)
	}
	if count > 0 {
		s.log.Info("resumed parked listeners", "count", count)
	}
}

// unpack makes a listener of what the parker kept. It takes over the descriptors.
func (s *Server) unpack(p fdkeep.Parked) (l *listener, err error) {
	defer func() {
		if err != nil {
			closeFD(p.FD)
			closeFD(p.Page)
		}
	}()
	l = newListener(s, p.FD, specs.ContainerProcessState{})
	l.pageFD, l.key = p.Page, p.Key
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
	return l, l.mapFlights(p.Page)
}

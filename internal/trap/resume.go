package trap

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/fdkeep"
)

// What an earlier agent kept is taken at the start. A keeper that does not give it is asked again,
// after pauses that double from firstResumePause to lastResumePause.
const (
	firstResumePause = 100 * time.Millisecond
	lastResumePause  = 30 * time.Second
	// triesBeforeLending is how often it is asked before it is to settle the calls that wait.
	triesBeforeLending = 5
)

// take is Keeper.Take that ends with the server: what the keeper gives after that is closed.
func (s *Server) take(prefix string) ([]fdkeep.Kept, error) {
	type taken struct {
		kept []fdkeep.Kept
		err  error
	}
	answer := make(chan taken)
	go func() { // not one of tasks: Close must not wait for a slow keeper
		kept, err := s.cfg.Keeper.Take(prefix)
		select {
		case answer <- taken{kept, err}:
		case <-s.ctx.Done():
			for _, p := range kept {
				closeFD(p.FD)
				closeFD(p.Page)
			}
		}
	}()
	select {
	case t := <-answer:
		return t.kept, t.err
	case <-s.ctx.Done():
		return nil, errClosed
	}
}

// resume serves the listeners an earlier agent kept. It fails if the keeper does not give them, and
// may be called again then.
func (s *Server) resume() error {
	if s.cfg.Keeper == nil {
		return nil
	}
	keeper := s.keeper.Load()
	kept, err := s.take("")
	if err != nil {
		return err
	}
	s.mu.Lock()
	own := s.own
	s.own = nil // what is kept from here on is not among kept
	s.mu.Unlock()
	count := 0
	for _, p := range kept {
		if p.Key == handoffKey || strings.HasPrefix(p.Key, OthersKey) || own[p.Key] {
			closeFD(p.FD)
			closeFD(p.Page)
			continue
		}
		count++
		l, err := s.unpack(p)
		if err != nil {
			s.why.resume.Add()
			s.log.Error("kept listener not resumed", "key", p.Key, "err", err)
			continue
		}
		if n := l.page.TakeContinued(); n > 0 {
			s.log.Warn("a container made sockets while no agent ran: they are its own stack's until they are closed",
				"reason", s.why.noAgent.Name, "sockets", n, "container", l.state.State.ID, "metadata", l.state.Metadata)
		}
		s.serveListener(l)
	}
	if s.keeper.Load() != keeper {
		s.keepAll() // with the new keeper: that of watchKeeper may have come too early to see them
	}
	if count > 0 {
		s.log.Info("resumed kept listeners", "count", count)
	}
	return nil
}

// missing notes that the listeners of an earlier agent are not served.
func (s *Server) missing(err error) {
	s.mu.Lock()
	s.own = map[string]bool{} // before the first hand-off
	s.lent = s.held == nil    // it has not heard, and settles the calls that it may
	s.mu.Unlock()
	s.why.resume.Add()
	s.log.Error("fd keeper does not give its listeners: running containers are not served, their calls wait; it is asked again", "err", err)
}

// resumeLater asks the keeper again until it gives what an earlier agent kept. What waits for that
// goes on without this server after a few tries, if it may.
func (s *Server) resumeLater(err error) {
	for tries, pause := 1, firstResumePause; ; tries, pause = tries+1, min(2*pause, lastResumePause) {
		s.cfg.Resuming(err)
		if tries >= triesBeforeLending {
			s.lend()
		}
		if s.pause(pause); s.ctx.Err() != nil {
			return
		}
		if err = s.resumeAgain(); err == nil {
			s.log.Info("fd keeper has given its listeners")
			s.cfg.Resuming(nil)
			return
		}
		if s.ctx.Err() != nil {
			return // Close says whose the calls are
		}
	}
}

// resumeAgain is resume for calls that the keeper may be settling: it ends that before.
func (s *Server) resumeAgain() error {
	s.mu.Lock()
	held := s.held != nil
	s.mu.Unlock()
	if !held {
		if err := s.tryServeKept(); err != nil && !errors.Is(err, fdkeep.ErrNotServed) {
			return err
		}
	}
	if err := s.resume(); err != nil {
		return err
	}
	s.setLent(false)
	return nil
}

// lend has the keeper settle the calls that wait for listeners it does not give: as while no agent
// runs, those continue that Config.Away names. Listeners of this server are spared.
func (s *Server) lend() {
	s.mu.Lock()
	lent, held := s.lent, s.held != nil
	s.mu.Unlock()
	if !held {
		return // it settles them already, or has not heard of this server
	}
	s.setLent(true)
	s.leaveKept()
	if !lent {
		s.log.Warn("fd keeper still does not give its listeners: it has calls of running containers continue in their own network namespaces, if they may",
			"reason", s.why.noAgent.Name)
	}
}

// endLending undoes lend when no call is being received any more, so that calls of this server's
// listeners continue, too, from leaveKept on. If the keeper does not hear they wait for the next
// server.
func (s *Server) endLending() {
	s.mu.Lock()
	needed, held := s.lent && len(s.listeners) > 0, s.held != nil
	s.mu.Unlock()
	if !needed {
		return
	}
	if !held {
		// It looks at listeners' pages when an agent that has said that it serves hangs up.
		err := s.tryServeKept()
		if errors.Is(err, fdkeep.ErrNotServed) {
			return // it has no calls continue
		}
		if err != nil {
			s.log.Error("calls of containers that were started while the fd keeper did not give its listeners wait for the next agent", "err", err)
			return
		}
	}
	s.setLent(false)
}

func (s *Server) setLent(lent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lent == lent {
		return
	}
	s.lent = lent
	for l := range s.listeners {
		s.setQuestions(l)
		s.setAway(l)
	}
}

// unpack makes a listener of what the keeper kept. It takes over the descriptors.
func (s *Server) unpack(p fdkeep.Kept) (l *Listener, err error) {
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
	return l, l.mapInflight(p.Page)
}

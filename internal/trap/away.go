package trap

import (
	"errors"
	"io"

	"heddle.dev/heddle/internal/fdkeep"
)

// What the keeper does while no agent runs: it has calls continue that Config.Away names, in their
// callers' own namespaces, and has libraries ask an AskedHandler again later. All others wait.

// serveKept tells the keeper that calls are this server's, and counts those that continued before.
func (s *Server) serveKept() {
	if s.cfg.Keeper == nil {
		return
	}
	switch err := s.tryServeKept(); {
	case errors.Is(err, fdkeep.ErrNotServed):
		s.log.Warn("calls wait while no agent runs; end the fd keeper, and this agent starts one that has them continue", "err", err)
	case err != nil:
		s.log.Error("calls wait should this agent end; see that the fd keeper runs", "err", err)
	}
}

func (s *Server) tryServeKept() error {
	hold, done, err := s.cfg.Keeper.Serve()
	if err != nil {
		return err
	}
	s.why.noAgent.count.Store(done.Continued)
	s.why.noAnswer.count.Store(done.Questions)
	s.hold(hold)
	return nil
}

// leaveKept says that calls are not this server's any more.
func (s *Server) leaveKept() { s.hold(nil) }

// hold keeps what Serve gave, instead of that of an earlier keeper.
func (s *Server) hold(next io.Closer) {
	s.mu.Lock()
	before := s.held
	s.held = next
	s.mu.Unlock()
	if before != nil {
		_ = before.Close() // the keeper sees the end of the process, too
	}
}

// setQuestions says in l's page which calls are questions. It is called with mu held.
func (s *Server) setQuestions(l *Listener) {
	if l.page == nil {
		return
	}
	handlers := s.handlers
	if s.lent {
		handlers = nil // as in setAway
	}
	var kinds []uint64
	for _, h := range handlers {
		if h, ok := h.Handler.(AskedHandler); ok {
			if kind, asks := h.Asked(l); asks {
				kinds = append(kinds, kind)
			}
		}
	}
	l.page.SetQuestions(kinds)
}

// setAway says in l's page which call may continue. It is called with mu held.
func (s *Server) setAway(l *Listener) {
	if l.page == nil {
		return
	}
	// While the keeper settles the calls of others, it must not receive those of l: they are this
	// server's.
	if ep := l.ep.Load(); ep != nil && !ep.Removed() && s.cfg.Away != nil && !s.lent {
		if nr, ok := s.cfg.Away(l, ep.ID); ok {
			l.page.SetAway(nr, NativeArch)
			return
		}
	}
	l.page.ClearAway()
}

// AwayChanged has Config.Away asked again, about every listener.
func (s *Server) AwayChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.listeners {
		s.setAway(l)
	}
}

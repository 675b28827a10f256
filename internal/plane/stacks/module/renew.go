package module

import (
	"fmt"
	"os"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// build is which program file a module was compared with last.
type build struct {
	installed os.FileInfo
	same      bool
}

// renew ends a module that runs another build than the one installed, once no connection lives by
// it, or it has drained for as long as it may: the next one is started at once, and told of all
// that is bound or listens. Until then its connections live on, and new ones are its, too.
func (m *Module) renew(l *Link, b *build, s *protocol.Stats) error {
	path, err := m.cfg.Find(m.Kind)
	if err != nil || isScript(path) {
		return nil // there is no other, or what runs is what interprets it
	}
	at, err := os.Stat(path)
	if err != nil {
		return nil
	}
	if b.installed == nil || !os.SameFile(at, b.installed) || !at.ModTime().Equal(b.installed.ModTime()) {
		same, err := process.Runs(l.PID, path)
		if err != nil {
			return nil // it has ended, or the file is just being replaced
		}
		*b = build{at, same}
	}
	until, drains := m.drain(l, b.same)
	idle, over := s.Connections == s.TimeWait, !until.IsZero() && !time.Now().Before(until)
	if !drains || !idle && !over {
		return nil
	}
	m.cfg.kill(m.Kind, l.PID)
	if idle {
		return fmt.Errorf("%s, process %d, ran another build than the one installed, and nothing was connected by it: it is started anew", m.Name, l.PID)
	}
	return fmt.Errorf("%s, process %d, ran another build than the one installed for %s (--stack-drain), and was ended with %d connections: it is started anew", m.Name, l.PID, m.cfg.Drain, s.Connections-s.TimeWait)
}

// drain notes that the module is to be replaced, or is not; until is when it is ended in any case,
// zero if it is not.
func (m *Module) drain(l *Link, same bool) (until time.Time, drains bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if same {
		m.drains = nil
		return until, false
	}
	if m.drains == nil {
		m.drains = &api.StackDrain{}
		latest := "never"
		if m.cfg.Drain > 0 {
			end := time.Now().Add(m.cfg.Drain)
			m.drains.Until, latest = &end, end.Format(time.RFC3339)
		}
		m.cfg.Log.Info("another build of the stack module is installed: it takes over when no connection lives", "module", m.Name, "pid", l.PID, "ends connections", latest)
	}
	if m.drains.Until != nil {
		until = *m.drains.Until
	}
	return until, true
}

// isScript reports whether a program is run by another one, which its first line names.
func isScript(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [2]byte
	n, _ := f.Read(head[:]) // what is shorter is none
	return n == 2 && string(head[:]) == "#!"
}

package stacks

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// build is which program file a module was compared with last.
type build struct {
	installed os.FileInfo
	same      bool
}

// renew ends a module that runs another build than the one installed, once no connection lives by
// it: the next one is started at once, and told of all that is bound or listens. A module with
// connections stays: they end with it.
func (p *Plane) renew(m *module, l *link, b *build, s *protocol.Stats) error {
	path, err := FindProgram(m.kind, p.cfg.Self)
	if err != nil {
		return nil // there is no other
	}
	at, err := os.Stat(path)
	if err != nil {
		return nil
	}
	if b.installed == nil || !os.SameFile(at, b.installed) || !at.ModTime().Equal(b.installed.ModTime()) {
		same, err := process.Runs(l.pid, path)
		if err != nil {
			return nil // it has ended, or the file is just being replaced
		}
		*b = build{at, same}
		if !same {
			p.cfg.Log.Info("another build of the stack module is installed: it takes over when no connection lives", "module", m.name, "pid", l.pid)
		}
	}
	if b.same || s.Connections != s.TimeWait {
		return nil
	}
	_ = unix.Kill(l.pid, unix.SIGKILL) // or it has just ended
	return fmt.Errorf("%s, process %d, ran another build than the one installed, and nothing was connected by it: it is started anew", m.name, l.pid)
}

package trap

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

const (
	// keeperPause is how long a keeper that does not start waits for another try.
	keeperPause = time.Second
	// A keeper that ends within keeperWellFor of its start has the next one wait, from
	// firstKeeperPause to lastKeeperPause.
	keeperWellFor    = 5 * time.Second
	firstKeeperPause = 100 * time.Millisecond
	lastKeeperPause  = 30 * time.Second
	// maxWatchFailures is how often in a row a keeper may answer and yet not be watched: one of an
	// older version cannot.
	maxWatchFailures = 5
)

// prepareKeep moves l's calls into memory that a keeper can keep, before the first reader begins.
// Without a keeper, or if it cannot be had, l works on without one.
func (s *Server) prepareKeep(l *Listener) {
	if s.cfg.Keeper == nil {
		return
	}
	page, err := unix.MemfdCreate("heddle-call", unix.MFD_CLOEXEC)
	if err == nil {
		if err = unix.Ftruncate(page, fdkeep.PageBytes); err == nil {
			err = l.mapInflight(page)
		}
		if err != nil {
			closeFD(page)
		}
	}
	if err != nil {
		s.notKept(l, fmt.Errorf("call page: %w", err))
		return
	}
	l.pageFD, l.key = page, keepKey(l.state)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own != nil {
		s.own[l.key] = true
	}
}

// keep gives the keeper duplicates of l and its page.
func (s *Server) keep(l *Listener) {
	l.keepMu.Lock()
	defer l.keepMu.Unlock()
	if l.key == "" || l.closed {
		return
	}
	state := l.state
	state.State.Annotations = nil // can be large, and metadata names the endpoint
	for _, name := range s.annotations {
		if value, ok := l.state.State.Annotations[name]; ok {
			if state.State.Annotations == nil {
				state.State.Annotations = map[string]string{}
			}
			state.State.Annotations[name] = value
		}
	}
	meta, err := json.Marshal(state)
	if err == nil {
		err = s.cfg.Keeper.Put(l.key, meta, l.fd, l.pageFD)
	}
	if err != nil {
		s.notKept(l, err)
	}
}

func (s *Server) notKept(l *Listener, err error) {
	s.why.keep.Add()
	s.log.Error("listener not kept: its container gets ENOSYS for new TCP sockets when this agent ends; see that the fd keeper runs",
		"container", l.state.State.ID, "err", err)
}

// watchKeeper waits for the keeper's end. Then it has it started anew and keeps every listener
// again: until then the end of this agent would be the end of their calls.
func (s *Server) watchKeeper(ctx context.Context) {
	pause := firstKeeperPause
	for failed := 0; ; {
		began := time.Now()
		err := s.cfg.Keeper.Watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failed = 0
			s.log.Warn("fd keeper has ended; starting another", "after", time.Since(began))
		} else if failed++; failed == maxWatchFailures {
			s.log.Error("fd keeper cannot be watched, so its end would not be noticed: end it, then restart the agent", "err", err)
			return
		}
		if time.Since(began) >= keeperWellFor {
			pause = firstKeeperPause
		} else if s.pause(pause); ctx.Err() != nil {
			return
		} else {
			pause = min(2*pause, lastKeeperPause)
		}
		for {
			if err = s.cfg.StartKeeper(); err == nil {
				break
			}
			s.log.Error("fd keeper does not start: running containers get ENOSYS for new TCP sockets should this agent end", "err", err)
			if s.pause(keeperPause); ctx.Err() != nil {
				return
			}
		}
		s.keeper.Add(1)
		s.serveKept()
		s.keepSocket()
		s.keepAll()
	}
}

// keepAll keeps every listener.
func (s *Server) keepAll() {
	s.mu.Lock()
	all := make([]*Listener, 0, len(s.listeners))
	for l := range s.listeners {
		all = append(all, l)
	}
	s.mu.Unlock()
	for _, l := range all {
		s.keep(l)
	}
}

// OthersKey begins the keys of what others have kept by the same keeper; no container's id does.
const OthersKey = "@"

// keepKey makes a name no other listener has: a container has one for every exec.
func keepKey(state specs.ContainerProcessState) string {
	var unique [8]byte
	rand.Read(unique[:]) // never fails
	id := state.State.ID
	return fmt.Sprintf("%s/%d/%s", id[:min(len(id), 256)], state.Pid, hex.EncodeToString(unique[:]))
}

// release tells the keeper that a listener is not needed any more. If it does not hear, it finds
// out by itself once the filter has no users.
func (s *Server) release(l *Listener) {
	if l.key == "" {
		return
	}
	if err := s.cfg.Keeper.Drop(l.key); err != nil {
		s.log.Warn("listener stays kept until its filter has gone", "container", l.state.State.ID, "err", err)
	}
}

package node

import (
	"errors"
	"os"
	"sync"
)

// plainCut ends forbidden connections of processes that are not intercepted, container by container, beside the agent's
// other work: their packets are stopped already, and there may be many containers.
type plainCut struct {
	mu    sync.Mutex
	next  []string // namespaces of a round that is asked for; nil: none
	going bool
}

// cutPlain asks for a round through this node's containers. It does not wait; a round that runs is followed by
// another. The caller holds change.
func (e *enforcer) cutPlain() {
	paths := make([]string, 0, len(e.own))
	for _, ep := range e.own {
		if ep.NetnsPath != "" {
			paths = append(paths, ep.NetnsPath)
		}
	}
	e.plain.mu.Lock()
	defer e.plain.mu.Unlock()
	e.plain.next = paths
	if !e.plain.going && len(paths) > 0 {
		e.plain.going = true
		go e.cutPlainRounds()
	}
}

func (e *enforcer) cutPlainRounds() {
	for {
		e.plain.mu.Lock()
		paths := e.plain.next
		e.plain.next = nil
		e.plain.going = paths != nil
		e.plain.mu.Unlock()
		if paths == nil {
			return
		}
		total := 0
		for _, path := range paths {
			cut, err := e.planes.CutForbiddenIn(path)
			total += cut
			if err != nil && !errors.Is(err, os.ErrNotExist) { // the container may have ended
				e.log.Warn("policy: connections of processes that are not intercepted are left to their packets", "netns", path, "err", err)
			}
		}
		e.noteCut(total)
	}
}

// noteCut counts connections that were ended.
func (e *enforcer) noteCut(cut int) {
	if cut == 0 {
		return
	}
	e.log.Info("policy: live connections ended that are forbidden now", "connections", cut)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status.Cut += uint64(cut)
}

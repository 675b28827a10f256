package node

import (
	"errors"
	"os"
	"sync"
)

// plainCut ends forbidden connections of processes that are not intercepted, container by
// container, beside the agent's other work: their packets are stopped already, and there may be
// many containers.
type plainCut struct {
	rounds sync.WaitGroup // the goroutine that does rounds

	mu     sync.Mutex // guards the rest
	next   []string   // namespaces of a round that is asked for; nil: none
	going  bool
	closed bool
}

// close ends rounds, and waits until none uses the planes any more.
func (e *enforcer) close() {
	e.plain.mu.Lock()
	e.plain.next, e.plain.closed = nil, true
	e.plain.mu.Unlock()
	e.plain.rounds.Wait()
}

// cutPlain asks for a round through this node's containers. It does not wait; a round that runs is
// followed by another. The caller holds change.
func (e *enforcer) cutPlain() {
	paths := make([]string, 0, len(e.own))
	for _, ep := range e.own {
		if ep.NetnsPath != "" {
			paths = append(paths, ep.NetnsPath)
		}
	}
	e.plain.mu.Lock()
	defer e.plain.mu.Unlock()
	if e.plain.closed {
		return
	}
	e.plain.next = paths
	if !e.plain.going && len(paths) > 0 {
		e.plain.going = true
		e.plain.rounds.Go(e.cutPlainRounds)
	}
}

func (p *plainCut) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
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
			if e.plain.ended() {
				return
			}
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

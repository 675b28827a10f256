package node

import (
	"errors"
	"os"
	"sync"
	"time"
)

// plainCut ends forbidden connections of processes that are not intercepted, container by
// container, beside the agent's other work: their packets are stopped already, and there may be
// many containers.
type plainCut struct {
	rounds sync.WaitGroup // the goroutine that does rounds
	closed chan struct{}

	mu    sync.Mutex // guards the rest
	asked bool       // for a round
	going bool
}

// plainRest is how many times as long as a round took the next one waits: changes may follow one
// another for long, and each of them is about few of a node's containers, of which there may be
// ten thousand.
const plainRest = 9

// close ends rounds, and waits until none uses the planes any more. It is called once.
func (e *enforcer) close() {
	e.plain.mu.Lock()
	close(e.plain.closed)
	e.plain.mu.Unlock()
	e.plain.rounds.Wait()
}

// cutPlain asks for a round through this node's containers. It does not wait; a round that runs is
// followed by another.
func (e *enforcer) cutPlain() {
	e.plain.mu.Lock()
	defer e.plain.mu.Unlock()
	if e.plain.ended() {
		return
	}
	e.plain.asked = true
	if !e.plain.going {
		e.plain.going = true
		e.plain.rounds.Go(e.cutPlainRounds)
	}
}

func (p *plainCut) ended() bool {
	select {
	case <-p.closed:
		return true
	default:
		return false
	}
}

// begins reports whether a round is asked for, and ends the rounds if none is.
func (p *plainCut) begins() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.going, p.asked = p.asked, false
	return p.going
}

// containers gives the namespaces of this node's endpoints.
func (e *enforcer) containers() (paths []string) {
	e.change.Lock()
	defer e.change.Unlock()
	for _, ep := range e.own {
		if ep.NetnsPath != "" {
			paths = append(paths, ep.NetnsPath)
		}
	}
	return paths
}

func (e *enforcer) cutPlainRounds() {
	for e.plain.begins() {
		began, total := time.Now(), 0
		for _, path := range e.containers() {
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
		select {
		case <-time.After(plainRest * time.Since(began)):
		case <-e.plain.closed:
			return
		}
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

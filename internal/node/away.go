package node

import (
	"sync"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
)

// away says whose socket() may be the kernel's own while no agent runs: a plain socket of the
// container's own stack, which the overlay carries under the same policy. It waits for the next
// agent where a plain socket would not do what the endpoint's does. Any goroutine may call it.
type away struct {
	mu       sync.Mutex
	plain    map[model.EndpointID]bool // those whose TCP is the kernel's
	services bool                      // this node has addresses that only connect() of node sockets knows
	changed  func()                    // has call asked again of every listener
}

func newAway(changed func()) *away {
	return &away{plain: make(map[model.EndpointID]bool), changed: changed}
}

// setPlain says whether an endpoint's TCP may be its container's own stack's.
func (w *away) setPlain(id model.EndpointID, plain bool) {
	w.mu.Lock()
	before, known := w.plain[id]
	w.plain[id] = plain
	w.mu.Unlock()
	if known && before != plain { // else it has no listener yet
		w.changed()
	}
}

func (w *away) forget(id model.EndpointID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.plain, id)
}

// hasServices says that the node has services. It holds until the agent ends.
func (w *away) hasServices() {
	w.mu.Lock()
	before := w.services
	w.services = true
	w.mu.Unlock()
	if !before {
		w.changed()
	}
}

// call is trap.Config.Away.
func (w *away) call(l *trap.Listener, id model.EndpointID) (nr int32, ok bool) {
	if l.Annotation(model.AnnotationStack) == "true" {
		return 0, false // more of its calls are trapped, and would wait for the agent
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return unix.SYS_SOCKET, w.plain[id] && !w.services
}

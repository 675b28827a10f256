package differ

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// waitTimeout bounds every wait for a worker.
const waitTimeout = 20 * time.Second

// Hub is where workers wait for programs. It listens on a socket in the file system, which reaches
// into every network namespace.
type Hub struct {
	ln    *net.UnixListener
	mu    sync.Mutex // guards the rest but ended
	idle  map[string]chan *worker
	port  int
	low   int
	ended chan struct{}
}

// worker is the Hub's end of one.
type worker struct {
	pool string
	conn *net.UnixConn
	buf  []byte
}

// Listen makes a Hub at a path.
func Listen(path string) (*Hub, error) {
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("listen for workers: %w", err)
	}
	h := &Hub{ln: ln, idle: map[string]chan *worker{}, port: firstPort + rand.IntN(lastPort-firstPort), low: firstLow + rand.IntN(lastLow-firstLow), ended: make(chan struct{})}
	go h.accept()
	return h, nil
}

// Close ends the Hub and, with it, its workers.
func (h *Hub) Close() {
	_ = h.ln.Close()
	<-h.ended
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, pool := range h.idle {
		for len(pool) > 0 {
			_ = (<-pool).conn.Close()
		}
	}
}

func (h *Hub) accept() {
	defer close(h.ended)
	for {
		conn, err := h.ln.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		w := &worker{conn: conn, buf: make([]byte, MaxPacket)}
		var hello Hello
		_ = conn.SetReadDeadline(time.Now().Add(waitTimeout))
		n, err := conn.Read(w.buf)
		if err == nil {
			err = json.Unmarshal(w.buf[:n], &hello)
		}
		if err != nil {
			_ = conn.Close() // it will be replaced
			continue
		}
		w.pool = hello.Pool
		h.pool(w.pool) <- w
	}
}

func (h *Hub) pool(name string) chan *worker {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.idle[name] == nil {
		h.idle[name] = make(chan *worker, 256)
	}
	return h.idle[name]
}

// take waits for a worker of a pool.
func (h *Hub) take(pool string) (*worker, error) {
	select {
	case w := <-h.pool(pool):
		return w, nil
	case <-time.After(waitTimeout):
		return nil, fmt.Errorf("no worker of %s within %s", pool, waitTimeout)
	}
}

// give puts a worker back, ready for the next program; one that cannot be made ready is ended.
func (h *Hub) give(w *worker) {
	if _, err := w.ask(Request{Kind: "reset"}); err != nil {
		_ = w.conn.Close()
		return
	}
	h.pool(w.pool) <- w
}

// ask sends a request and waits for its answer.
func (w *worker) ask(q Request) (Reply, error) {
	if err := w.conn.SetDeadline(time.Now().Add(waitTimeout)); err != nil {
		return Reply{}, fmt.Errorf("worker of %s: %w", w.pool, err)
	}
	if _, err := w.conn.Write(Marshal(q)); err != nil {
		return Reply{}, fmt.Errorf("ask worker of %s: %w", w.pool, err)
	}
	n, err := w.conn.Read(w.buf)
	if err != nil {
		return Reply{}, fmt.Errorf("worker of %s does not answer: %w", w.pool, err)
	}
	var r Reply
	if err := json.Unmarshal(w.buf[:n], &r); err != nil {
		return Reply{}, fmt.Errorf("answer of worker of %s: %w", w.pool, err)
	}
	if r.Mistake != "" {
		return Reply{}, fmt.Errorf("worker of %s: %s", w.pool, r.Mistake)
	}
	return r, nil
}

// Ports of programs: below the ephemeral ports, above Heddle's direct ones, and not those of the
// other lab tests (20001 to 23999). One is used again only after all the others were, when most
// connections of its last program have left TIME_WAIT; a run starts anywhere, because of those of
// the run before.
const (
	firstPort, lastPort     = 17600, 32700
	firstOthers, lastOthers = 20000, 23999
	firstLow, lastLow       = 200, 1023 // above those of the machine's services
)

// freshPorts gives the ports of a program; low says whether it has one below 1024, of which there
// are few.
func (h *Hub) freshPorts(low bool) map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	ports := map[string]int{"0": 0, "low": h.low}
	if low {
		if h.low++; h.low > lastLow {
			h.low = firstLow
		}
	}
	for _, name := range []string{"P1", "P2", "P3"} {
		if h.port >= firstOthers && h.port <= lastOthers {
			h.port = lastOthers + 1
		}
		ports[name] = h.port
		if h.port++; h.port > lastPort {
			h.port = firstPort
		}
	}
	return ports
}

// unusedPorts gives the ports of a program that none of the sockets in use has, TIME_WAIT included.
func (h *Hub) unusedPorts(low bool, inUse map[int]bool) (map[string]int, error) {
	for range lastPort - firstPort {
		ports, used := h.freshPorts(low), false
		for name, port := range ports {
			used = used || inUse[port] && (low || name != "low")
		}
		if !used {
			return ports, nil
		}
	}
	return nil, errors.New("every port has a socket")
}

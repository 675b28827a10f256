// Package intercept answers trapped socket() calls for TCP with sockets of the agent's own network
// namespace.
//
// It is a handler of package trap, which receives the calls and gives the answers. answer.go is the
// way of a call; pool.go has the sockets that are ready for an endpoint, prefiller.go makes them
// ahead of need; batch.go and filling.go give many by one call, to programs that ask for that.
package intercept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// Defaults of Config.
const (
	DefaultReadyPerFamily = 16
	DefaultMaxReady       = 4096

	prefillQueueCapacity = 1024
)

// SocketMaker makes one tagged socket, ready to be given to a container, in the calling thread's
// network namespace: a TCP socket of family AF_INET or AF_INET6 with no status flags set (in
// particular not O_NONBLOCK), close-on-exec in the agent. The caller owns the descriptor. It is
// called from several goroutines, sometimes while a container waits, so it must neither block nor
// change its thread.
type SocketMaker interface {
	MakeSocket(ep model.EndpointID, family int) (fd int, err error)
	// SetMPTCP says whether the program that gets a socket of MakeSocket asked for IPPROTO_MPTCP.
	SetMPTCP(fd int, ep model.EndpointID, on bool) error
	// Admit counts a socket of MakeSocket as one that its endpoint has, until it is closed for
	// good, unless the endpoint has as many as it may (model.ErrSocketQuota). With
	// Config.AdmitCompares it looks first whether the thread that is to have it is as caller says
	// (model.ErrOtherNetns, ErrOtherOwner, ErrNoCaller).
	Admit(fd int, caller model.Caller) error
}

// Config says how a Handler works.
type Config struct {
	// Maker makes the sockets.
	Maker SocketMaker
	// AdmitCompares says that Maker.Admit looks at callers. Otherwise /proc is asked before, which
	// takes several microseconds of a call.
	AdmitCompares bool
	// Log gets what operators must know. Nil means slog.Default().
	Log *slog.Logger
	// ListenElsewhere calls listen() on a Unix socket in another process, which has ended when it
	// returns. Nil means that containers get their sockets one by one, also those that may have
	// several at a time (batch.go).
	ListenElsewhere func(*os.File) error
	// ReadyPerFamily is how many sockets at most are made ahead for each endpoint and address
	// family in use. 0 means DefaultReadyPerFamily, less than 0 none.
	ReadyPerFamily int
	// MaxReady bounds the sockets made ahead for all endpoints. 0 means DefaultMaxReady.
	MaxReady int
}

// Stats are counters since the handler was made, and gauges where said.
type Stats struct {
	Ready        int    // gauge: sockets made ahead
	PoolHits     uint64 // calls answered with a socket that was ready
	PoolMisses   uint64 // calls answered with a socket that had to be made first
	Batches      uint64 // calls answered with a batch of sockets
	BatchSockets uint64 // sockets in them
}

// Handler answers the calls. It is a trap.EndpointHandler and a trap.ListenerHandler.
type Handler struct {
	cfg       Config
	proc      task.Proc
	prefiller prefiller
	maker     batchMaker
	why       reasons
	ctx       context.Context // done when the handler is to end
	stop      context.CancelFunc
	tasks     sync.WaitGroup // the maker of batches

	hits, misses, batches, batchSockets atomic.Uint64

	mu          sync.RWMutex // guards the rest; never held across a system call
	pools       map[*trap.Endpoint]*pools
	outstanding map[*trap.Listener]*outstanding
}

// reasons are why Answer fails.
type reasons struct {
	makeSocket trap.Reason // SocketMaker
	owner      trap.Reason // the caller's owner cannot be told, or given to the socket
	quota      trap.Reason // the endpoint has as many sockets as it may
	stack      trap.Reason // the endpoint's stack profile cannot be served, and says to refuse
	linger     trap.Reason // a program kept the prefiller waiting in close(): its endpoint gets no more batches
}

// New gives a handler. Close releases it.
func New(cfg Config) (_ *Handler, err error) {
	if cfg.Maker == nil {
		return nil, errors.New("config: Maker is missing")
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.ReadyPerFamily == 0 {
		cfg.ReadyPerFamily = DefaultReadyPerFamily
	}
	if cfg.MaxReady <= 0 {
		cfg.MaxReady = DefaultMaxReady
	}
	h := &Handler{
		cfg: cfg, pools: map[*trap.Endpoint]*pools{}, outstanding: map[*trap.Listener]*outstanding{},
		why: reasons{
			makeSocket: trap.Reason{Name: "make_socket", Errno: unix.ENETDOWN, Passes: true},
			owner:      trap.Reason{Name: "caller_owner", Errno: unix.ENETDOWN},
			quota:      trap.Reason{Name: "socket_quota", Errno: unix.ENFILE, Quiet: true},
			stack:      trap.Reason{Name: "stack_refused", Errno: unix.EPROTONOSUPPORT, Quiet: true},
			linger:     trap.Reason{Name: "lingering_close", Errno: unix.ENETDOWN},
		},
	}
	h.prefiller = prefiller{
		log: cfg.Log, maker: cfg.Maker, target: max(cfg.ReadyPerFamily, 0), max: int64(cfg.MaxReady),
		pools: map[*socketPool]bool{},
		queue: make(chan *socketPool, prefillQueueCapacity), batches: make(chan *filling, prefillQueueCapacity), filled: &h.batchSockets,
		failed: func(id model.EndpointID, err error) {
			if errors.Is(err, errLingers) {
				h.why.linger.Add()
			}
			cfg.Log.Warn("no socket made ahead", "endpoint_id", id, "err", err)
		},
	}
	if h.proc, err = task.Open(); err != nil {
		return nil, err
	}
	if h.prefiller.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		h.proc.Close()
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	h.ctx, h.stop = context.WithCancel(context.Background())
	return h, nil
}

// Run makes sockets ahead of need until ctx is done.
func (h *Handler) Run(ctx context.Context) {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(woken); h.prefiller.wake() })
	h.prefiller.run(ctx)
	if !stop() {
		<-woken // by a descriptor that is closed next
	}
}

// Close closes what is ready for nobody any more.
func (h *Handler) Close() {
	h.stop()
	h.tasks.Wait()
	h.prefiller.endFillings()
	closeFD(h.prefiller.wakeFD)
	h.proc.Close()
}

// Reasons implements trap.Handler.
func (h *Handler) Reasons() []*trap.Reason {
	return []*trap.Reason{&h.why.makeSocket, &h.why.owner, &h.why.quota, &h.why.stack, &h.why.linger}
}

// Stats reads all counters, one after the other: they may be of slightly different moments.
func (h *Handler) Stats() Stats {
	return Stats{
		Ready: int(h.prefiller.total.Load()), PoolHits: h.hits.Load(), PoolMisses: h.misses.Load(),
		Batches: h.batches.Load(), BatchSockets: h.batchSockets.Load(),
	}
}

// Bound implements trap.EndpointHandler.
func (h *Handler) Bound(ep *trap.Endpoint) {
	p := newPools(ep)
	h.mu.Lock()
	h.pools[ep] = p
	h.mu.Unlock()
	// Most programs ask for IPv4 first. The IPv6 pool starts with its first use.
	h.prefiller.request(&p.v4, needNow, nothing)
}

// Released implements trap.EndpointHandler.
func (h *Handler) Released(ep *trap.Endpoint) {
	h.mu.Lock()
	p := h.pools[ep]
	delete(h.pools, ep)
	h.mu.Unlock()
	if p != nil {
		h.prefiller.drop(p)
	}
}

// poolsOf gives an endpoint's pools; nil if it was released.
func (h *Handler) poolsOf(ep *trap.Endpoint) *pools {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.pools[ep]
}

// Annotations implements trap.ListenerHandler.
func (h *Handler) Annotations() []string { return []string{model.AnnotationSocketPool} }

// Opened implements trap.ListenerHandler.
func (h *Handler) Opened(l *trap.Listener) {
	if mayHaveBatches(l) {
		h.maker.begin(h)
	}
}

// Closed implements trap.ListenerHandler.
func (h *Handler) Closed(l *trap.Listener) {
	h.mu.Lock()
	out := h.outstanding[l]
	delete(h.outstanding, l)
	h.mu.Unlock()
	if out != nil {
		out.close()
	}
}

// BatchNetns gives the inode of the network namespace of batches, 0 before there is one.
func (h *Handler) BatchNetns() uint64 { return h.maker.netns.Load() }

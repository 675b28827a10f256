package trap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap/task"
)

// Defaults of Config.
const (
	DefaultMaxListeners = 1 << 14

	handoffTimeout     = 10 * time.Second
	maxHandoffsAtOnce  = 32
	maxSocketPathBytes = 107 // sockaddr_un's
)

// Keeper keeps listeners open while no agent runs. *fdkeep.Client is one.
type Keeper interface {
	Put(key string, meta []byte, fd, page int) error
	Drop(key string) error
	Take(prefix string) ([]fdkeep.Kept, error)
	// Watch returns nil when the keeper has ended and an error if ctx ends first or the keeper
	// cannot be watched.
	Watch(ctx context.Context) error
	// Serve says that the agent answers calls, until hold is closed or the agent ends; done is what
	// came of those while there was none. fdkeep.ErrNotServed says that the keeper does not have
	// calls continue.
	Serve() (hold io.Closer, done fdkeep.Settled, err error)
}

// Config says how a Server works.
type Config struct {
	// SocketPath is where OCI runtimes hand over listeners (listenerPath in config.json).
	SocketPath string
	// Resolve finds the endpoint a listener belongs to. metadata is listenerMetadata of
	// config.json: an endpoint's id or name. If it fails the listener's calls for an endpoint are
	// refused with ENETDOWN. A listener that was kept is resolved again, then without the
	// container's annotations.
	Resolve func(metadata string, state specs.ContainerProcessState) (model.EndpointID, error)
	// EndpointIn gives the intercepted endpoint of the network namespace with this inode, false if
	// it has none. Listeners whose metadata is model.EndpointByNetns belong to what it gives for
	// the first caller that has an endpoint, and let all calls before continue. It is asked for
	// each of these.
	EndpointIn func(inode uint64) (model.EndpointID, bool)
	// NetnsOf gives the inode of an endpoint's network namespace, false for an endpoint that is not
	// known any more. Threads in other namespaces get nothing of the endpoint's, but the kernel's
	// own. It is asked for every call and must be quick. Nil means that namespaces are not
	// compared.
	NetnsOf func(model.EndpointID) (inode uint64, ok bool)
	// Away gives the call of a listener's containers, by its number on NativeArch, that may have
	// its effect in the caller's own namespaces while no agent runs; false if all wait for the next
	// agent. It is asked with a lock of the server's held. Nil means that all wait.
	Away func(l *Listener, id model.EndpointID) (nr int32, ok bool)
	// Log gets what operators must know. Nil means slog.Default().
	Log *slog.Logger
	// Keeper keeps listeners across restarts of the agent. Without one (nil), containers get ENOSYS
	// from trapped calls once the agent has gone.
	Keeper Keeper
	// StartKeeper starts the keeper, unless it runs. Nil means that its end is not looked for.
	StartKeeper func() error
	// Resuming is told of every try to take what an earlier agent kept that fails, and nil once one
	// succeeds after that. Nil means that nobody asks.
	Resuming func(error)
	// MaxListeners bounds the listeners served at a time; each takes two descriptors. One that
	// comes above it is refused, and its container gets ENOSYS. 0 means DefaultMaxListeners.
	MaxListeners int
}

// Stats are counters since the server started, and gauges where said.
type Stats struct {
	Listeners int               // gauge: listeners being served
	Readers   int               // gauge: threads that answer their calls, or wait for one
	Continued uint64            // calls left to the kernel
	Failed    map[string]uint64 // by reason; every reason has an entry, those of handlers, too
}

// Server receives listeners and has their calls answered by handlers; nobody's calls continue.
type Server struct {
	cfg         Config
	log         *slog.Logger
	handlers    []*handling       // in the order in which they are asked; not changed after Listen
	annotations []string          // of containers, that handlers ask for
	socket      *net.UnixListener // nil before Listen
	lock        *os.File          // on the socket's path
	proc        task.Proc
	stopFD      int // eventfd; readable once the server closes, which ends every loop
	wake        syncWakeUp
	why         *reasons
	continued   atomic.Uint64
	monitor     *monitor
	watch       watch
	readers     atomic.Int32  // threads that answer, or wait for a call
	helpers     atomic.Int32  // of them, helpers, maxHelpers at most
	keeper      atomic.Uint32 // counts the keepers there have been; changed before keepAll
	stop        context.CancelFunc
	ctx         context.Context // done once the server closes
	tasks       sync.WaitGroup  // loops, hand-offs, handlers; added to under mu while not closed
	ended       chan struct{}   // closed when Close has finished

	mu        sync.Mutex // guards the rest; never held across a system call
	closed    bool
	endpoints map[model.EndpointID]*Endpoint
	listeners map[*Listener]struct{}
	held      io.Closer // what tells the keeper that calls are this server's; nil: nothing
	// own are the keys of this server's listeners while those of an earlier agent are missing: nil
	// otherwise. lent says that the keeper settles the calls of the missing ones meanwhile.
	own  map[string]bool
	lent bool
}

// New gives a server without handlers, which Handle registers. Listen makes it ready, Serve runs
// it, and Close releases it and the handlers.
func New() *Server {
	s := &Server{
		stopFD: -1, proc: -1, watch: watch{fd: -1}, why: newReasons(), ended: make(chan struct{}),
		endpoints: map[model.EndpointID]*Endpoint{}, listeners: map[*Listener]struct{}{},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

// Listen binds the hand-off socket. It is called once.
func (s *Server) Listen(cfg Config) (err error) {
	if err := cfg.setDefaults(); err != nil {
		return err
	}
	s.cfg, s.log, s.monitor = cfg, cfg.Log, newMonitor(cfg.Log)
	defer func() {
		for _, fd := range []int{s.stopFD, int(s.proc), s.watch.fd} {
			if err != nil && fd >= 0 {
				closeFD(fd)
			}
		}
	}()
	if s.proc, err = task.Open(); err != nil {
		return err
	}
	if s.stopFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	if err := s.watch.open(s); err != nil {
		return err
	}
	return s.openSocket()
}

// setDefaults checks a configuration and sets its defaults.
func (c *Config) setDefaults() error {
	switch {
	case c.SocketPath == "" || len(c.SocketPath) > maxSocketPathBytes:
		return fmt.Errorf("config: SocketPath of %d bytes: want 1 to %d; choose a shorter state directory",
			len(c.SocketPath), maxSocketPathBytes)
	case c.StartKeeper != nil && c.Keeper == nil:
		return errors.New("config: StartKeeper without Keeper")
	case c.Resolve == nil:
		return errors.New("config: Resolve is missing")
	case c.EndpointIn == nil:
		c.EndpointIn = func(uint64) (model.EndpointID, bool) { return 0, false }
	}
	if c.Resuming == nil {
		c.Resuming = func(error) {}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.MaxListeners <= 0 {
		c.MaxListeners = DefaultMaxListeners
	}
	return nil
}

// Serve resumes what is kept, then takes hand-offs until ctx is done or the server is closed. It
// closes the server and returns nil then; an error says that no hand-offs can be taken any more.
func (s *Server) Serve(ctx context.Context) error {
	defer s.Close()
	defer context.AfterFunc(ctx, s.stop)()
	defer context.AfterFunc(s.ctx, func() { s.socket.Close() })()
	for _, h := range s.handlers {
		if h, ok := h.Handler.(RunningHandler); ok && !s.start(func() { h.Run(s.ctx) }) {
			return nil
		}
	}
	s.serveKept() // before the first call is received
	if err := s.resume(); err != nil {
		if s.ctx.Err() != nil {
			return nil
		}
		s.missing(err)
		if !s.start(func() { s.resumeLater(err) }) {
			return nil
		}
	}
	if s.cfg.Keeper != nil {
		s.keepSocket()
	}
	if s.cfg.StartKeeper != nil && !s.start(func() { s.watchKeeper(s.ctx) }) {
		return nil
	}
	slots := make(chan struct{}, maxHandoffsAtOnce)
	for {
		c, err := s.socket.AcceptUnix()
		if s.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			s.why.agentNofile.Add()
			s.log.Error("hand-off waits for a free descriptor; raise the agent's LimitNOFILE", "err", err)
			s.pause(100 * time.Millisecond)
			continue
		}
		if err != nil {
			return fmt.Errorf("accept on hand-off socket: %w", err)
		}
		slots <- struct{}{}
		if !s.start(func() { defer func() { <-slots }(); s.handoff(c) }) {
			c.Close()
		}
	}
}

// start runs f in a goroutine that Close waits for. It reports false if the server is closed.
func (s *Server) start(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.tasks.Go(f)
	return true
}

// pause waits for d or the end of the server.
func (s *Server) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.ctx.Done():
	}
}

// Close ends every loop after the answer it is giving, then the handlers, and releases the hand-off
// socket. Kept listeners and the kept hand-off socket stay kept: calls and hand-offs made from here
// on wait for the next server, but for calls that continue (Config.Away), whether or not the keeper
// had given what an earlier server kept. Close may be called more
// than once, and returns when all is released.
func (s *Server) Close() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		<-s.ended
		return
	}
	defer close(s.ended)
	s.stop()
	if s.socket != nil {
		s.endListeners()
		s.leaveKept() // now that none is being received
	}
	for _, h := range s.handlers {
		if h, ok := h.Handler.(ClosingHandler); ok {
			h.Close()
		}
	}
	if s.socket != nil {
		closeFD(s.stopFD)
		s.proc.Close()
		s.lock.Close()
	}
}

// endListeners ends every loop, and says so to the handlers.
func (s *Server) endListeners() {
	_, _ = unix.Write(s.stopFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // the only write ever: it cannot fail
	s.socket.Close()
	ended := make(chan struct{})
	go s.interruptCloses(ended)
	s.tasks.Wait()
	close(ended)
	s.endLending()
	s.mu.Lock()
	listeners := slices.Collect(maps.Keys(s.listeners))
	s.mu.Unlock()
	for _, l := range listeners {
		s.end(l, false)
	}
	closeFD(s.watch.fd)
	s.mu.Lock()
	endpoints := s.endpoints
	s.endpoints = nil
	s.mu.Unlock()
	s.monitor.close()
	for _, ep := range endpoints {
		s.released(ep)
	}
}

// handoff takes one listener from a runtime.
func (s *Server) handoff(c *net.UnixConn) {
	defer c.Close()
	defer context.AfterFunc(s.ctx, func() { c.Close() })()
	_ = c.SetDeadline(time.Now().Add(handoffTimeout)) // fails on a closed connection; so will the read
	state, fd, err := readHandoff(c)
	if errors.Is(err, errHungUp) {
		return
	}
	if err != nil {
		s.why.handoff.Add()
		s.log.Error("hand-off refused", "err", err)
		return
	}
	l := newListener(s, fd, state)
	s.prepareKeep(l)
	keeper := s.keeper.Load()
	s.keep(l) // before the first call is received: it must not die with this agent
	if !s.serveListener(l) {
		return
	}
	if !l.byNetns() { // else its readers look
		s.checkIdentity(l.ep.Load(), &state)
	}
	if s.keeper.Load() != keeper {
		s.keep(l) // with the new keeper: keepAll may have come too early to see l
	}
}

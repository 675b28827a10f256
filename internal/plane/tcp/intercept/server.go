package intercept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
)

// Defaults of Config.
const (
	DefaultReadyPerFamily = 16
	DefaultMaxReady       = 4096
	DefaultMaxListeners   = 2048

	handoffTimeout       = 10 * time.Second
	maxHandoffsAtOnce    = 32
	maxSocketPathBytes   = 107 // sockaddr_un's
	prefillQueueCapacity = 1024
)

// SocketMaker makes one tagged socket, ready to be given to a container, in the calling thread's network
// namespace: a TCP socket of family AF_INET or AF_INET6 with no status flags set (in particular not
// O_NONBLOCK), close-on-exec in the agent. The caller owns the descriptor. It is called from several
// goroutines, sometimes while a container waits, so it must neither block nor change its thread.
type SocketMaker interface {
	MakeSocket(ep model.EndpointID, family int) (fd int, err error)
	// SetMPTCP says whether the program that gets a socket of MakeSocket asked for IPPROTO_MPTCP.
	SetMPTCP(fd int, ep model.EndpointID, on bool) error
	// Admit counts a socket of MakeSocket as one that its endpoint has, until it is closed for good, unless the endpoint
	// has as many as it may (model.ErrSocketQuota). With Config.AdmitCompares it looks first whether the thread that is to have
	// it is as caller says (model.ErrOtherNetns, ErrOtherOwner, ErrNoCaller).
	Admit(fd int, caller model.Caller) error
}

// Keeper keeps listeners open while no agent runs. *fdkeep.Client is one.
type Keeper interface {
	Put(key string, meta []byte, fd, page int) error
	Drop(key string) error
	TakeAll() ([]fdkeep.Kept, error)
	// Watch returns nil when the keeper has ended and an error if ctx ends first or the keeper cannot be watched.
	Watch(ctx context.Context) error
}

// Config says how a Server works.
type Config struct {
	// SocketPath is where OCI runtimes hand over listeners (listenerPath in config.json).
	SocketPath string
	// Maker makes the sockets.
	Maker SocketMaker
	// Resolve finds the endpoint a listener belongs to. metadata is listenerMetadata of config.json: an
	// endpoint's id or name. If it fails the listener's requests for sockets are refused with ENETDOWN.
	// A listener that was kept is resolved again, then without the container's annotations.
	Resolve func(metadata string, state specs.ContainerProcessState) (model.EndpointID, error)
	// EndpointIn gives the intercepted endpoint of the network namespace with this inode, false if it has none. Listeners
	// whose metadata is model.EndpointByNetns belong to what it gives for the first caller that has an endpoint, and let
	// all calls before continue. It is asked for each of these.
	EndpointIn func(inode uint64) (model.EndpointID, bool)
	// NetnsOf gives the inode of an endpoint's network namespace, false for an endpoint that is not known any
	// more. Threads in other namespaces get no sockets of the endpoint, but the kernel's own. It is asked for every
	// socket and must be quick. Nil means that namespaces are not compared.
	NetnsOf func(model.EndpointID) (inode uint64, ok bool)
	// AdmitCompares says that Maker.Admit looks at callers. Otherwise /proc is asked before, which takes several
	// microseconds of a call.
	AdmitCompares bool
	// Log gets what operators must know. Nil means slog.Default().
	Log *slog.Logger
	// Keeper keeps listeners across restarts of the agent. Without one (nil), containers get ENOSYS from
	// trapped calls once the agent has gone.
	Keeper Keeper
	// StartKeeper starts the keeper, unless it runs. Nil means that its end is not looked for.
	StartKeeper func() error
	// ListenElsewhere calls listen() on a Unix socket in another process, which has ended when it returns. Nil means that
	// containers get their sockets one by one, also those that may have several at a time (batch.go).
	ListenElsewhere func(*os.File) error
	// ReadyPerFamily is how many sockets are made ahead for each endpoint and address family in use.
	// 0 means DefaultReadyPerFamily, less than 0 none.
	ReadyPerFamily int
	// MaxReady bounds the sockets made ahead for all endpoints. 0 means DefaultMaxReady.
	MaxReady int
	// MaxListeners bounds the listeners served at a time; each takes a thread (more while callers wait: maxHelpers) and a descriptor. One
	// that comes above it is refused, and its container gets ENOSYS. 0 means DefaultMaxListeners.
	MaxListeners int
}

// Stats are counters since the server started, and gauges where said.
type Stats struct {
	Listeners    int               // gauge: listeners being served
	Readers      int               // gauge: threads that answer their calls
	Ready        int               // gauge: sockets made ahead
	Answered     uint64            // calls answered with a socket
	Continued    uint64            // calls left to the kernel: not for TCP over IPv4 or IPv6
	PoolHits     uint64            // of Answered, those whose socket was ready
	PoolMisses   uint64            // of Answered, those whose socket had to be made first
	Ioctls       uint64            // ioctls of sockets that the agent made for their callers
	Batches      uint64            // calls answered with a batch of sockets, which count in none of the above
	BatchSockets uint64            // sockets in them
	Failed       map[string]uint64 // everything else, by reason; every reason has an entry
}

// counters are written by every answering thread, with no order between them.
type counters struct {
	answered, continued, hits, misses, ioctls, batches, batchSockets atomic.Uint64

	failed [numFailures]atomic.Uint64
}

// Server receives listeners and answers their calls.
type Server struct {
	cfg       Config
	log       *slog.Logger
	socket    *net.UnixListener
	lock      *os.File // on the socket's path
	proc      procDir
	netns     uint64 // inode of the agent's own network namespace
	stopFD    int    // eventfd; readable once the server closes, which ends every loop
	wake      syncWakeUp
	counters  counters
	prefiller prefiller
	batches   batchMaker
	monitor   *monitor
	readers   atomic.Int32  // running
	helpers   atomic.Int32  // of them, helpers, maxHelpers at most
	keeper    atomic.Uint32 // counts the keepers there have been; changed before keepAll
	stop      context.CancelFunc
	ctx       context.Context // done once the server closes
	tasks     sync.WaitGroup  // loops, hand-offs, prefiller; added to under mu while not closed
	released  chan struct{}   // closed when Close has finished

	mu        sync.Mutex // guards the rest; never held across a system call
	closed    bool
	endpoints map[model.EndpointID]*endpoint
	listeners map[*listener]struct{}
}

// Listen binds the hand-off socket and prepares a server. Call Serve to run it and Close to release it.
func Listen(cfg Config) (_ *Server, err error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, log: cfg.Log, stopFD: -1, proc: -1, released: make(chan struct{}), monitor: newMonitor(cfg.Log),
		endpoints: map[model.EndpointID]*endpoint{}, listeners: map[*listener]struct{}{},
	}
	s.prefiller.log, s.prefiller.maker, s.prefiller.target = cfg.Log, cfg.Maker, cfg.ReadyPerFamily
	s.prefiller.max, s.prefiller.queue = int64(cfg.MaxReady), make(chan *socketPool, prefillQueueCapacity)
	s.prefiller.batches, s.prefiller.filled = make(chan *filling, prefillQueueCapacity), &s.counters.batchSockets
	s.prefiller.wakeFD = -1
	s.prefiller.failed = func(id model.EndpointID, err error) {
		if errors.Is(err, errLingers) {
			s.count(failLinger)
		}
		s.log.Warn("no socket made ahead", "endpoint_id", id, "err", err)
	}
	defer func() {
		if err != nil && s.proc >= 0 {
			closeFD(int(s.proc))
		}
		for _, fd := range []int{s.stopFD, s.prefiller.wakeFD} {
			if err != nil && fd >= 0 {
				closeFD(fd)
			}
		}
	}()
	if s.proc, err = openProc(); err != nil {
		return nil, err
	}
	if s.netns, err = s.proc.ownNetns(); err != nil {
		return nil, err
	}
	if s.stopFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if s.prefiller.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if err := s.openSocket(); err != nil {
		return nil, err
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// setDefaults checks a configuration and sets its defaults.
func (c *Config) setDefaults() error {
	switch {
	case c.SocketPath == "" || len(c.SocketPath) > maxSocketPathBytes:
		return fmt.Errorf("config: SocketPath of %d bytes: want 1 to %d; choose a shorter state directory",
			len(c.SocketPath), maxSocketPathBytes)
	case c.Maker == nil:
		return errors.New("config: Maker is missing")
	case c.StartKeeper != nil && c.Keeper == nil:
		return errors.New("config: StartKeeper without Keeper")
	case c.Resolve == nil:
		return errors.New("config: Resolve is missing")
	case c.EndpointIn == nil:
		c.EndpointIn = func(uint64) (model.EndpointID, bool) { return 0, false }
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.ReadyPerFamily == 0 {
		c.ReadyPerFamily = DefaultReadyPerFamily
	}
	c.ReadyPerFamily = max(c.ReadyPerFamily, 0)
	if c.MaxReady <= 0 {
		c.MaxReady = DefaultMaxReady
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
	if !s.start(func() { s.prefiller.run(s.ctx) }) {
		return nil
	}
	s.resume()
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
			s.count(failAgentNofile)
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

// Close ends every loop after the answer it is giving, and releases the hand-off socket and all ready
// sockets. Kept listeners and the kept hand-off socket stay kept: calls and hand-offs made from here on wait
// for the next server. Close may be
// called more than once, and returns when all is released.
func (s *Server) Close() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		<-s.released
		return
	}
	defer close(s.released)
	s.stop()
	_, _ = unix.Write(s.stopFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // the only write ever: it cannot fail
	s.prefiller.wake()
	s.socket.Close()
	ended := make(chan struct{})
	go s.interruptCloses(ended)
	s.tasks.Wait()
	close(ended)
	s.mu.Lock()
	endpoints := s.endpoints
	s.endpoints = nil
	s.mu.Unlock()
	s.monitor.close()
	s.prefiller.endFillings()
	for _, e := range endpoints {
		s.prefiller.drop(e)
	}
	closeFD(s.stopFD)
	closeFD(s.prefiller.wakeFD)
	closeFD(int(s.proc))
	s.lock.Close()
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
		s.count(failHandoff)
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

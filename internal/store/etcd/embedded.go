package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/patience"
)

// startTimeout bounds the server's start, and its first answer after that; they take 0.2 s, and
// longer with much to replay on a slow disk, or on a slow machine.
var startTimeout = patience.For(30 * time.Second)

// advertisedPeer is the name by which the only member of the cluster knows itself. Nobody dials it.
const advertisedPeer = "127.0.0.1:2380"

// EmbeddedConfig says how to run etcd inside the agent.
type EmbeddedConfig struct {
	// NetworkID is the network to connect to once the server runs.
	NetworkID model.NetworkID
	// Dir keeps the data; it is made if missing. One process at a time may use it.
	Dir string
	// ClientURL is where nodes reach this etcd: "https://10.0.0.1:2379", with an address of this
	// node, or http:// without TLS. Port 0 takes a free one, which Store.Endpoints tells.
	ClientURL string
	// TLS is for https: the store's certificate, and the authority of its clients'.
	TLS ServerTLS
	// PeerURL is where other etcd members would reach this one. There are none; so empty, the
	// default, takes a free port of the loopback address.
	PeerURL string
	// UnsafeNoFsync makes writes faster and loses data when the machine (not the process) crashes.
	// For labs and tests.
	UnsafeNoFsync bool
}

// ServerTLS names the PEM files of a server that asks its clients for certificates.
type ServerTLS struct {
	CertAndKey string // the server's certificate and its key, in one file
	CA         string // who signs the certificates of clients
}

func (t ServerTLS) info() transport.TLSInfo {
	if !model.ProtectStoreCertificates.On() {
		return transport.TLSInfo{CertFile: t.CertAndKey, KeyFile: t.CertAndKey}
	}
	return transport.TLSInfo{CertFile: t.CertAndKey, KeyFile: t.CertAndKey, TrustedCAFile: t.CA, ClientCertAuth: true}
}

// Embedded runs an etcd server with a single member in this process and connects to it as Connect
// does. Closing the store stops the server; its data stays in cfg.Dir.
func Embedded(ctx context.Context, cfg EmbeddedConfig, opts ...Option) (_ *Store, err error) {
	o := optionsOf(opts)
	if err := quietGRPC(); err != nil {
		return nil, fmt.Errorf("set gRPC's logger: %w", err)
	}
	srv, err := startServer(ctx, cfg, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, srv.close())
		}
	}()
	scheme, _, _ := strings.Cut(cfg.ClientURL, ":")
	s, err := Connect(ctx, []string{scheme + "://" + srv.etcd.Clients[0].Addr().String()}, cfg.NetworkID, append([]Option{withFirstCall(startTimeout)}, opts...)...)
	if err != nil {
		return nil, err
	}
	s.server = srv
	return s, nil
}

// server is a running etcd member.
type server struct {
	etcd     *embed.Etcd
	grpc     atomic.Pointer[grpc.Server] // etcd's, which sets it soon after it is ready
	stopping atomic.Bool                 // mutes etcd's log, and has new requests refused
	lock     *os.File                    // held while the server uses its directory
	logs     sync.WaitGroup              // the goroutine that reads etcd's errors
	once     sync.Once
	err      error // of close; owned by once
}

// errDamaged follows what etcd says when it cannot use its data.
var errDamaged = errors.New("its data is damaged: restore the directory, or remove it and let all nodes join again")

func startServer(ctx context.Context, cfg EmbeddedConfig, o options) (_ *server, err error) {
	ec, err := etcdConfig(cfg)
	if err != nil {
		return nil, err
	}
	srv := &server{}
	hook := &fatalHook{said: make(chan error, 1)}
	ec.ServiceRegister = srv.grpc.Store
	ec.GRPCAdditionalServerOptions = srv.refusals()
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapTo(o.log, &srv.stopping, hook.options()...))
	if srv.lock, err = lockDir(cfg.Dir); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not ready after %s", startTimeout))
	defer cancel()
	if err := srv.launch(ctx, ec, hook, o.log); err != nil {
		return nil, explainStart(cfg, err)
	}
	srv.logs.Go(func() {
		for err := range srv.etcd.Err() {
			if !srv.stopping.Load() {
				o.log.Error("store: embedded etcd", "error", err)
			}
		}
	})
	select {
	case <-srv.etcd.Server.ReadyNotify():
		hook.started.Store(true)
		return srv, nil
	case err = <-hook.said:
		err = fmt.Errorf("%w: %w", err, errDamaged)
	case <-srv.etcd.Server.StopNotify():
		err = errors.New("it stopped while starting; its log says why")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return nil, errors.Join(explainStart(cfg, err), srv.close())
}

// launch sets srv.etcd. On error the directory is given back, at once or when etcd has let go of
// it.
func (s *server) launch(ctx context.Context, ec *embed.Config, hook *fatalHook, log *slog.Logger) error {
	type outcome struct {
		etcd *embed.Etcd
		err  error
	}
	result := make(chan outcome, 1)
	go func() {
		got := outcome{err: errors.New("it gave up while starting")} // what remains if fatalHook ends the goroutine
		defer func() {
			if p := recover(); p != nil {
				got.err = fmt.Errorf("it panicked (%v): %w", p, errDamaged)
			}
			result <- got
		}()
		got.etcd, got.err = embed.StartEtcd(ec)
	}()
	select {
	case got := <-result:
		if got.err == nil {
			s.etcd = got.etcd
			return nil
		}
		select {
		case err := <-hook.said:
			got.err = fmt.Errorf("%w: %w", err, errDamaged)
		default:
		}
		return errors.Join(got.err, s.lock.Close())
	case err := <-hook.said:
		// StartEtcd may wait for ever for the goroutine that gave up, and keep its ports: this
		// process can only report the error and end.
		return errors.Join(fmt.Errorf("%w: %w", err, errDamaged), s.lock.Close())
	case <-ctx.Done():
		go func() { // gives everything back when StartEtcd returns
			got := <-result
			giveBack := s.lock.Close
			if got.etcd != nil {
				s.etcd, giveBack = got.etcd, s.close
			}
			if err := giveBack(); err != nil {
				log.Error("store: give up starting etcd", "error", err)
			}
		}()
		return context.Cause(ctx)
	}
}

func etcdConfig(cfg EmbeddedConfig) (*embed.Config, error) {
	if cfg.Dir == "" {
		return nil, errors.New("store directory: none given")
	}
	client, err := listenURL("store client URL", cfg.ClientURL)
	if err != nil {
		return nil, err
	}
	if secure := client.Scheme == "https"; secure != (cfg.TLS != ServerTLS{}) {
		return nil, fmt.Errorf("store client URL %q: https needs certificates, and http takes none", cfg.ClientURL)
	}
	peerURL := cfg.PeerURL
	if peerURL == "" {
		peerURL = client.Scheme + "://127.0.0.1:0"
	}
	peer, err := listenURL("store peer URL", peerURL)
	if err != nil {
		return nil, err
	}
	advertised := peer
	if peer.Port() == "0" {
		if advertised, err = url.Parse(client.Scheme + "://" + advertisedPeer); err != nil {
			return nil, err
		}
	}
	ec := embed.NewConfig()
	ec.Name = "heddle"
	ec.Dir = cfg.Dir
	ec.ListenClientUrls = []url.URL{*client}
	ec.AdvertiseClientUrls = []url.URL{*client}
	ec.ListenPeerUrls = []url.URL{*peer}
	ec.AdvertisePeerUrls = []url.URL{*advertised}
	ec.InitialCluster = ec.InitialClusterFromName(ec.Name)
	if client.Scheme == "https" {
		ec.ClientTLSInfo = cfg.TLS.info()
	}
	if peer.Scheme == "https" {
		ec.PeerTLSInfo = cfg.TLS.info()
	}
	ec.UnsafeNoFsync = cfg.UnsafeNoFsync
	ec.AutoCompactionMode = embed.CompactorModePeriodic
	ec.AutoCompactionRetention = "1h"
	ec.EnableGRPCGateway = false
	return ec, nil
}

// listenURL checks a URL to listen on: an address (not a name) and a port.
func listenURL(field, s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("%s %q: %w", field, s, err)
	}
	if _, err := netip.ParseAddrPort(u.Host); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" {
		return nil, fmt.Errorf("%s %q: want https://ADDRESS:PORT with an address of this node", field, s)
	}
	return u, nil
}

// lockDir takes the directory for this process. etcd locks its database too, but waits for ever.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("store directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "heddle.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("store directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = fmt.Errorf("store directory %s: in use by another agent: stop it, or choose another directory", dir)
		} else {
			err = fmt.Errorf("lock store directory %s: %w", dir, err)
		}
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// explainStart adds what an operator can do.
func explainStart(cfg EmbeddedConfig, err error) error {
	remedy := ""
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		remedy = ": stop what listens there, perhaps an etcd of Kubernetes, or give another --store-port (HEDDLED_STORE_PORT)"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		remedy = ": use an address that this node has"
	}
	return fmt.Errorf("start etcd on %s in %s: %w%s", cfg.ClientURL, cfg.Dir, err, remedy)
}

// refusals has requests refused that come while the server stops. gRPC's Stop ends those that are
// there and then waits until there are none, but takes new ones while it waits: a watch that
// another node opens again at once would never end.
func (s *server) refusals() []grpc.ServerOption {
	check := func() error {
		if s.stopping.Load() {
			return status.Error(codes.Unavailable, "store: stops")
		}
		return nil
	}
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := check(); err != nil {
				return nil, err
			}
			return handle(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := check(); err != nil {
				return err
			}
			return handle(srv, stream)
		}),
	}
}

// close stops the server and gives its directory back.
func (s *server) close() error {
	s.once.Do(func() {
		s.stopping.Store(true) // before Stop: what was let in until now is there for it to end
		// Left to itself etcd waits 7 s for the watches of other nodes to end, and they never do.
		if g := s.grpc.Load(); g != nil {
			g.Stop()
		}
		s.etcd.Close()
		s.logs.Wait()
		s.err = s.lock.Close()
	})
	return s.err
}

// Package etcd keeps a Heddle network's shared state in etcd, as docs/protocols/store-schema.md has
// it. Connect uses an etcd that runs already; Embedded runs one inside this process and connects to
// it.
package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/store"
)

// DefaultTimeout bounds every call, connecting included.
var DefaultTimeout = patience.For(5 * time.Second)

// reconnects is how a lost member is looked for: one that is back is found within seconds, however
// long it was away. gRPC's own pauses grow to two minutes.
var reconnects = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.4, MaxDelay: 3 * time.Second},
	MinConnectTimeout: patience.For(3 * time.Second),
}

// Store is a store.Store in etcd. Its fields do not change after Connect, but for the atomic
// counter.
type Store struct {
	id        model.NetworkID
	keys      store.Keys
	client    *clientv3.Client
	server    *server // nil unless Embedded made it
	endpoints []string
	options   options

	invalid atomic.Uint64
	frames  sync.Map // frame by the name of a node
	// ctx ends with the store; watches counts the goroutines that end with it.
	ctx     context.Context
	cancel  context.CancelFunc
	watches sync.WaitGroup

	holding sync.Mutex // guards release
	release func()     // ends the goroutine that keeps the node's name, and waits for it; nil without
}

var _ store.Store = (*Store)(nil)

type options struct {
	timeout     time.Duration
	firstCall   time.Duration // bounds Connect's own call; 0: timeout does
	verifyEvery time.Duration // how often a watch makes sure that the store is still the same one
	log         *slog.Logger
	tls         *tls.Config
	user        string
	password    string
}

// Option changes how Connect and Embedded work.
type Option func(*options)

// WithTimeout bounds every call to d instead of DefaultTimeout.
func WithTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithLogger sends what the store has to report to log instead of the default logger.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// WithTLS shows and asks for certificates at https endpoints; without it, the machine's authorities
// are trusted.
func WithTLS(cfg *tls.Config) Option { return func(o *options) { o.tls = cfg } }

// WithUser logs in to an etcd that asks for it.
func WithUser(name, password string) Option {
	return func(o *options) { o.user, o.password = name, password }
}

// withFirstCall lets the first call take longer than others: of a server that has just started.
func withFirstCall(d time.Duration) Option { return func(o *options) { o.firstCall = d } }

func withVerifyEvery(d time.Duration) Option { return func(o *options) { o.verifyEvery = d } }

func optionsOf(opts []Option) options {
	o := options{timeout: DefaultTimeout, verifyEvery: 5 * time.Second, log: slog.Default()}
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// UnreachableError says that no etcd answered in time.
type UnreachableError struct {
	Endpoints []string
	After     time.Duration
	Reason    string // what the network says, or what etcd did
}

// Error implements error.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("etcd at %s does not answer within %s (%s): start the node or etcd that serves there, "+
		"or check the store address and firewalls on the way", strings.Join(e.Endpoints, ", "), e.After, e.Reason)
}

// ErrClosed is wrapped by errors of calls that a store's end cut off.
var ErrClosed = errors.New("store is closed")

// ErrFull is wrapped by errors of an etcd that takes no change because its quota is used up.
var ErrFull error = rpctypes.ErrNoSpace

// Connect uses the etcd at endpoints ("https://10.0.0.1:2379") for network id. An etcd that does
// not answer gives an *UnreachableError. Close releases the store.
func Connect(ctx context.Context, endpoints []string, id model.NetworkID, opts ...Option) (_ *Store, err error) {
	if err := id.Validate(); err != nil {
		return nil, err
	}
	if len(endpoints) == 0 {
		return nil, errors.New("store endpoints: none given: name at least one, like https://10.0.0.1:2379")
	}
	for _, e := range endpoints {
		if _, err := hostPort(e); err != nil {
			return nil, err
		}
	}
	if err := quietGRPC(); err != nil {
		return nil, fmt.Errorf("set gRPC's logger: %w", err)
	}
	s := &Store{id: id, keys: store.KeysOf(id), endpoints: endpoints, options: optionsOf(opts)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.cancel()
		}
	}()
	s.client, err = clientv3.New(clientv3.Config{
		Endpoints:   endpoints,
		DialTimeout: s.options.timeout,
		// Notices a peer that vanished without a word in 13 s; etcd forbids less than 5 s between
		// pings.
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		DialOptions:          []grpc.DialOption{grpc.WithConnectParams(reconnects)},
		Context:              s.ctx,
		TLS:                  s.options.tls,
		Username:             s.options.user,
		Password:             s.options.password,
		Logger:               zapTo(s.options.log, new(atomic.Bool)),
	})
	if err != nil {
		// With a user, the client logs in at once.
		return nil, s.explain(ctx, "connect to etcd at "+strings.Join(endpoints, ", "), err)
	}
	if err := s.awaitFirst(ctx); err != nil {
		return nil, errors.Join(err, s.client.Close())
	}
	return s, nil
}

// awaitFirst makes the store's first call, which says that somebody answers. Nobody else has the
// store yet. What takes longer than other calls may is in the log, again and again.
func (s *Store) awaitFirst(ctx context.Context) error {
	usual := s.options.timeout
	s.options.timeout = max(usual, s.options.firstCall)
	defer func() { s.options.timeout = usual }()
	began, done := time.Now(), make(chan struct{})
	var logs sync.WaitGroup
	logs.Go(func() {
		tick := time.NewTicker(usual)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if s.options.firstCall > usual {
					s.options.log.Info("the store has not answered yet", "waited", time.Since(began).Round(time.Millisecond), "at_most", s.options.firstCall)
				}
			}
		}
	})
	_, err := s.get(ctx, s.keys.Network())
	close(done)
	logs.Wait()
	return err
}

// Endpoints are the URLs this store is reached by; those of an embedded one are for other nodes to
// join.
func (s *Store) Endpoints() []string { return s.endpoints }

// InvalidValues implements store.Store.
func (s *Store) InvalidValues() uint64 { return s.invalid.Load() }

// Close implements store.Store.
func (s *Store) Close() error {
	s.cancel()
	s.watches.Wait()
	err := s.client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil // it reports that its context has ended, which is how it is told to stop
	}
	if s.server != nil {
		err = errors.Join(err, s.server.close())
	}
	return err
}

// hostPort gives what to dial for an endpoint.
func hostPort(endpoint string) (string, error) {
	wrong := fmt.Errorf("store endpoint %q: want https://ADDRESS:PORT, or http:// where it has no TLS", endpoint)
	u, err := url.Parse(endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Path != "" {
		return "", wrong
	}
	if _, port, err := net.SplitHostPort(u.Host); err != nil || port == "" || u.Hostname() == "" {
		return "", wrong
	}
	return u.Host, nil
}

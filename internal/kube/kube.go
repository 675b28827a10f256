// Package kube is the side of Heddle that faces Kubernetes: one heddle-kube on each node follows
// the API server, and brings into Heddle, through the node's agent, what the API server says of
// labels and policies. It changes nothing itself. If the API server is away, all stays as it said
// last, and pods that it has not told of get no endpoint.
//
// Of each node: the labels and named ports of its pods, and, for its own use, the Services. Of one
// node at a time, which holds a Lease: namespaces and NetworkPolicies, for they are the network's.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/podlabels"
)

// Config is how heddle-kube runs.
type Config struct {
	// Kubeconfig is the path of a kubeconfig file; empty: what a pod of the cluster is given.
	Kubeconfig string
	// Node is this node's name in Kubernetes.
	Node string
	// AgentSocket is the agent's --api-socket, Socket where heddle-cni asks.
	AgentSocket, Socket string
	// Metrics is the address of the HTTP server for metrics, "" for none.
	Metrics string
	// LeaseNamespace is the namespace of the Lease.
	LeaseNamespace string
	// LeaseDuration is for how long a node that has died keeps the Lease; whole seconds.
	LeaseDuration time.Duration
	Log           *slog.Logger
}

// Run follows the API server until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	switch {
	case cfg.Node == "":
		return errors.New("--node is empty: give the node's name in Kubernetes")
	case cfg.LeaseDuration < time.Second:
		return fmt.Errorf("--lease-duration %s: want 1s or more", cfg.LeaseDuration)
	}
	klog.SetSlogLogger(cfg.Log)
	config, err := clientConfig(cfg.Kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 50, 100
	c, err := connect(config)
	if err != nil {
		return err
	}
	m := newMetrics()
	o := newObjects(c.core, cfg.Node, m, cfg.Log)
	agent := api.Dial(cfg.AgentSocket)
	defer agent.Close()
	pods := newPods(c, cfg.Node, agent, o, m, cfg.Log)
	policies := newPolicies(c, agent, o, m, cfg.Log)
	services := newServices(c, cfg.Node, agent, o, m, cfg.Log)
	synced := func() bool { return pods.informer.HasSynced() && policies.synced() && services.synced() }

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := serve(ctx, cfg, pods, synced, m); err != nil {
		return err
	}
	var all sync.WaitGroup
	for _, inf := range []cache.SharedIndexInformer{pods.informer, policies.namespaces, policies.networkPolicies, services.services, services.slices} {
		all.Go(func() { inf.RunWithContext(ctx) })
	}
	all.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), synced) {
			m.synced.Set(1)
			cfg.Log.Info("the API server has told all there is", "node", cfg.Node)
		}
	})
	all.Go(func() { pods.run(ctx) })
	all.Go(func() { services.run(ctx) })
	identity := fmt.Sprintf("%s_%d_%x", cfg.Node, os.Getpid(), time.Now().UnixNano())
	l := newLease(c, cfg, identity, policies, m)
	all.Go(func() { l.run(ctx, policies.lead) })
	all.Wait()
	return nil
}

// newLease makes that by which policies are kept, and has them give it up when their agent fails.
func newLease(c *cluster, cfg Config, identity string, p *policies, m *metrics) *lease {
	p.dirty.giveUp = cfg.LeaseDuration
	return &lease{client: c.coordination, namespace: cfg.LeaseNamespace, name: "heddle-kube", identity: identity, duration: cfg.LeaseDuration, able: p.able, m: m, log: cfg.Log}
}

// serve answers heddle-cni, and shows metrics, until ctx ends.
func serve(ctx context.Context, cfg Config, pods *pods, synced func() bool, m *metrics) error {
	l, err := listen(cfg.Socket)
	if err != nil {
		return fmt.Errorf("socket for heddle-cni: %w", err)
	}
	start := func(l net.Listener, h http.Handler) {
		s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelWarn)}
		go func() {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				cfg.Log.Error("server ended", "address", l.Addr(), "error", err)
			}
		}()
		context.AfterFunc(ctx, func() { _ = s.Close() })
	}
	start(l, podlabels.Handler(pods.lookup))
	if cfg.Metrics == "" {
		return nil
	}
	shown, err := net.Listen("tcp", cfg.Metrics)
	if err != nil {
		_ = l.Close()
		return fmt.Errorf("metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !synced() {
			http.Error(w, "the API server has not told all there is yet", http.StatusServiceUnavailable)
		}
	})
	start(shown, mux)
	return nil
}

// listen makes the socket, for root only, in place of one that nobody serves.
func listen(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s: another heddle-kube answers there", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	// One thread's umask is all threads': nothing else has begun yet.
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	return net.Listen("unix", path)
}

// Package populate fills a network's store with nodes and endpoints that do not exist, so that a bench can measure what a
// large network costs on a small machine, and takes them away again.
package populate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
	"heddle.dev/heddle/internal/trust"
)

// Ready is the line that Run prints once everything is in the store.
const Ready = "ready"

// AppLabel is the label of made-up endpoints: ten have the same value, AppName of 0, 1, ...
const (
	AppLabel = "bench-app"
	AppSize  = 10
)

// AppName is the value of AppLabel of the app with number i.
func AppName(i int) string { return fmt.Sprintf("a%d", i) }

// plainEvery is how many made-up endpoints there are for one that is not intercepted: such have a route of their own.
const plainEvery = 10

// The limits of Options. A node of the default network has a prefix of /24.
const (
	MaxNodes     = 200
	perNode      = 250
	MaxEndpoints = MaxNodes * perNode
)

// writers is how many endpoints are put at a time; each waits for the store most of the time.
const writers = 8

// undoTimeout bounds taking everything away.
const undoTimeout = time.Minute

// Options say what to make up, and where.
type Options struct {
	JoinFile  string // of the network
	NetworkID model.NetworkID
	Nodes     int
	Endpoints int
}

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	switch {
	case o.Nodes < 1 || o.Nodes > MaxNodes:
		return fmt.Errorf("--nodes %d: want 1..%d", o.Nodes, MaxNodes)
	case o.Endpoints < 0 || o.Endpoints > o.Nodes*perNode:
		return fmt.Errorf("--endpoints %d: want at most %d for %d nodes", o.Endpoints, o.Nodes*perNode, o.Nodes)
	}
	return nil
}

// Run makes everything up, prints Ready to out, and takes it away when in or ctx ends. Whoever started it may die: what
// is in the store goes all the same. It must run where the store can be reached: in a node's network namespace.
func Run(ctx context.Context, o Options, in io.Reader, out io.Writer) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	join, err := trust.ReadJoin(o.JoinFile)
	if err != nil {
		return err
	}
	s, err := etcd.Connect(ctx, []string{join.Store}, o.NetworkID, etcd.WithTLS(join.TLS()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		// Any end of the input means that whoever started us is done, or gone.
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	defer func() { err = errors.Join(err, remove(context.WithoutCancel(ctx), s, o)) }()
	if err := fill(ctx, s, o); err != nil {
		if ctx.Err() != nil {
			return nil // told to stop
		}
		return err
	}
	if _, err := fmt.Fprintln(out, Ready); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// node gives a made-up node. Its underlay address is of the block for benchmarks (RFC 2544), which nobody has.
func node(i int) model.Node {
	return model.Node{
		Name: fmt.Sprintf("bench-%d", i), Underlay: netip.AddrFrom4([4]byte{198, 18, 0, byte(1 + i)}),
		VTEPMAC: fmt.Sprintf("02:48:c6:12:00:%02x", 1+i), DirectPorts: model.DefaultDirectPorts,
	}
}

// endpoint gives the made-up endpoint with number i, on a node that has joined: those of one app are on ten nodes.
func endpoint(network store.Network, nodes []model.Node, i int) model.Endpoint {
	n := nodes[i%len(nodes)]
	a := n.Prefixes[0].Addr().As4()
	a[3] += byte(2 + i/len(nodes))
	return model.Endpoint{
		ID: model.EndpointID(1 + i/len(nodes)), Node: n.Name, Name: fmt.Sprintf("bench/e%d", i),
		Addrs: model.OverlayAddrs(network.Prefix6, netip.AddrFrom4(a)), Intercepted: i%plainEvery != 0,
		Labels: map[string]string{AppLabel: AppName(i / AppSize)}, Created: time.Now().UTC(),
	}
}

func fill(ctx context.Context, s store.Store, o Options) error {
	network, err := s.Network(ctx)
	if err != nil {
		return fmt.Errorf("read network: %w", err)
	}
	nodes := make([]model.Node, o.Nodes)
	for i := range nodes {
		if nodes[i], err = s.JoinNode(ctx, node(i)); err != nil {
			return fmt.Errorf("make up node %d: %w", i, err)
		}
	}
	return each(o.Endpoints, func(i int) error {
		if err := s.PutEndpoint(ctx, endpoint(network, nodes, i)); err != nil {
			return fmt.Errorf("make up endpoint %d: %w", i, err)
		}
		return nil
	})
}

// remove takes away what fill made, or a part of it.
func remove(ctx context.Context, s store.Store, o Options) error {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	return each(o.Nodes, func(i int) error {
		if err := s.LeaveNode(ctx, node(i).Name); err != nil {
			return fmt.Errorf("remove made-up node %d: %w", i, err)
		}
		return nil
	})
}

// each calls do for 0..n-1, several at a time, until one fails.
func each(n int, do func(int) error) error {
	var next atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		group.Go(func() {
			for errs[w] == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[w] = do(i); errs[w] != nil {
					next.Store(int64(n))
				}
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// Package populate fills a network's store with nodes and endpoints that do not exist, so that a
// bench can measure what a large network costs on a small machine, and takes them away again.
package populate

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
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

// plainEvery is how many made-up endpoints there are for one that is not intercepted: such have a
// route of their own.
const plainEvery = 10

// The limits of Options. A node of the default network has a prefix of /24.
const (
	MaxNodes     = 10000
	perNode      = 250
	MaxEndpoints = MaxNodes * perNode
)

// firstPrefix is the number of the pool's first prefix that a made-up node has: those before are
// the live nodes'.
const firstPrefix = 64

// writers is how many nodes are removed at a time; each waits for the store most of the time.
const writers = 8

// undoTimeout bounds taking everything away.
const undoTimeout = time.Minute

// Options say what to make up, and where.
type Options struct {
	JoinFile  string // of the network
	NetworkID model.NetworkID
	Nodes     int
	Endpoints int
	// Probes says that the nodes answer probes: then agents probe them.
	Probes bool
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

// Run makes everything up, prints Ready to out, carries out the commands that come in (see
// command), and takes it all away when in or ctx ends. Whoever started it may die: what is in the
// store goes all the same. It must run where the store can be reached: in a node's network
// namespace.
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
	p, err := newPopulation(ctx, s, o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := make(chan string)
	go func() {
		// Any end of the input means that whoever started us is done, or gone.
		defer cancel()
		for scanner := bufio.NewScanner(in); scanner.Scan(); {
			select {
			case lines <- scanner.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { err = errors.Join(err, p.remove(context.WithoutCancel(ctx))) }()
	if err := p.fill(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // told to stop
		}
		return err
	}
	if _, err := fmt.Fprintln(out, Ready); err != nil {
		return err
	}
	for {
		select {
		case line := <-lines:
			if err := p.command(ctx, line, out); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// population is what is made up, and where it is.
type population struct {
	store   *etcd.Store
	options Options
	network store.Network
	nodes   []model.Node // one more than there are: for commands
}

func newPopulation(ctx context.Context, s *etcd.Store, o Options) (*population, error) {
	network, err := s.Network(ctx)
	if err != nil {
		return nil, fmt.Errorf("read network: %w", err)
	}
	p := &population{store: s, options: o, network: network}
	for i := range o.Nodes + 1 {
		n, err := node(network, i)
		if err != nil {
			return nil, err
		}
		n.Planes.TCP.AnswersProbes = o.Probes
		p.nodes = append(p.nodes, n)
	}
	return p, nil
}

// Commands that Run takes, a line each. The answer is a line "revision N": where the store is when
// it is done.
const (
	AddEndpoint    = "add endpoint"    // one more, on the first made-up node; not intercepted
	DeleteEndpoint = "delete endpoint" // that one
	AddNode        = "add node"        // one more, without endpoints
	DeleteNode     = "delete node"     // that one
)

// command carries out one command.
func (p *population) command(ctx context.Context, line string, out io.Writer) (err error) {
	first, last := p.nodes[0], p.nodes[len(p.nodes)-1]
	const spare = perNode + 1
	switch line {
	case AddEndpoint:
		e := endpoint(p.network, []model.Node{first}, spare)
		e.Planes.TCP.Intercepted = false
		err = p.store.PutEndpoint(ctx, e)
	case DeleteEndpoint:
		err = p.store.DeleteEndpoint(ctx, first.Name, spare+1)
	case AddNode:
		_, err = p.store.JoinNode(ctx, last)
	case DeleteNode:
		err = p.store.LeaveNode(ctx, last.Name)
	default:
		err = fmt.Errorf("unknown command %.40q", line)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", line, err)
	}
	revision, err := p.store.Revision(ctx)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "revision", revision)
	return err
}

// node gives the made-up node with number i. Its underlay address is of the block for benchmarks
// (RFC 2544), which nobody has.
func node(network store.Network, i int) (model.Node, error) {
	a := network.Pool[0].Addr().As4()
	at := uint64(binary.BigEndian.Uint32(a[:])) + uint64(firstPrefix+i)<<(32-network.NodePrefixLen)
	if at > math.MaxUint32 || !network.Pool[0].Contains(addr4(uint32(at))) {
		return model.Node{}, fmt.Errorf("pool %s has no room for %d more nodes: bring the lab up with --agent-arg=--pool=10.0.0.0/8", network.Pool[0], i+1)
	}
	hi, lo := byte(i>>8), byte(i)
	return model.Node{
		Name: fmt.Sprintf("bench-%d", i), Underlay: netip.AddrFrom4([4]byte{198, 19, hi, lo}),
		Prefixes: []netip.Prefix{netip.PrefixFrom(addr4(uint32(at)), network.NodePrefixLen)},
		VTEPMAC:  fmt.Sprintf("02:48:c6:13:%02x:%02x", hi, lo), Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: model.DefaultDirectPorts}},
	}, nil
}

func addr4(a uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], a)
	return netip.AddrFrom4(b)
}

// endpoint gives the made-up endpoint with number i, on a node that has joined: those of one app
// are on ten nodes.
func endpoint(network store.Network, nodes []model.Node, i int) model.Endpoint {
	n := nodes[i%len(nodes)]
	a := n.Prefixes[0].Addr().As4()
	a[3] += byte(2 + i/len(nodes))
	return model.Endpoint{
		ID: model.EndpointID(1 + i/len(nodes)), Node: n.Name, Name: fmt.Sprintf("bench/e%d", i),
		Addrs: model.OverlayAddrs(network.Prefix6, netip.AddrFrom4(a)), Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: i%plainEvery != 0}},
		Labels: map[string]string{AppLabel: AppName(i / AppSize)}, Created: time.Now().UTC(),
	}
}

func (p *population) fill(ctx context.Context) error {
	nodes := p.nodes[:p.options.Nodes]
	endpoints := make([]model.Endpoint, p.options.Endpoints)
	for i := range endpoints {
		endpoints[i] = endpoint(p.network, nodes, i)
	}
	return p.store.Fill(ctx, nodes, endpoints)
}

// remove takes away what fill made, or a part of it.
func (p *population) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	return each(len(p.nodes), func(i int) error {
		if err := p.store.LeaveNode(ctx, p.nodes[i].Name); err != nil {
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

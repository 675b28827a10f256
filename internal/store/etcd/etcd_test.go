package etcd

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

const testNetwork model.NetworkID = 7

// logBuffer is where a test's stores log; the buffer is shared by their goroutines.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func logTo(l *logBuffer) Option { return WithLogger(slog.New(slog.NewTextHandler(l, nil))) }

func embedded(t *testing.T, cfg EmbeddedConfig, opts ...Option) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	if cfg.ClientURL == "" {
		cfg.ClientURL = "http://127.0.0.1:0"
	}
	cfg.NetworkID, cfg.UnsafeNoFsync = testNetwork, true
	s, err := Embedded(t.Context(), cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func connect(t *testing.T, to *Store, opts ...Option) *Store {
	t.Helper()
	s, err := Connect(t.Context(), to.Endpoints(), testNetwork, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func closeStore(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

func initNetwork(t *testing.T, s *Store, n store.Network) store.Network {
	t.Helper()
	got, err := s.InitNetwork(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func node(i int) model.Node {
	return model.Node{
		Name:     fmt.Sprintf("n%d", i),
		Underlay: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}),
		VTEPMAC:  fmt.Sprintf("02:00:00:00:00:%02x", i),
		Planes:   model.NodePlanes{TCP: model.TCPNode{DirectPorts: model.DefaultDirectPorts}},
	}
}

func join(t *testing.T, s *Store, n model.Node) model.Node {
	t.Helper()
	got, err := s.JoinNode(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func endpoint(n string, id model.EndpointID, addr string) model.Endpoint {
	return model.Endpoint{
		ID: id, Name: fmt.Sprintf("%s/c%d", n, id), Node: n, Addrs: []netip.Addr{netip.MustParseAddr(addr)},
		Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: true}}, NetnsPath: "/run/netns/x", Labels: map[string]string{"app": "web"},
		Created: time.Unix(1700000000, 0).UTC(),
	}
}

func put(t *testing.T, s *Store, e model.Endpoint) {
	t.Helper()
	if err := s.PutEndpoint(t.Context(), e); err != nil {
		t.Fatal(err)
	}
}

func watch(t *testing.T, s *Store) <-chan store.State {
	t.Helper()
	states, err := s.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return states
}

// await takes states until one satisfies ok.
func await(t *testing.T, states <-chan store.State, what string, ok func(store.State) bool) store.State {
	t.Helper()
	deadline := time.After(20 * time.Second)
	var last store.State
	for {
		select {
		case s, open := <-states:
			if !open {
				t.Fatalf("watch ended while waiting for %s", what)
			}
			if ok(s) {
				return s
			}
			last = s
		case <-deadline:
			t.Fatalf("no state with %s; last: %+v", what, last)
		}
	}
}

func counts(nodes, endpoints int) func(store.State) bool {
	return func(s store.State) bool { return len(s.Nodes) == nodes && s.Endpoints.Len() == endpoints }
}

func TestInitNetworkFirstWriterWins(t *testing.T) {
	t.Parallel()
	a := embedded(t, EmbeddedConfig{})
	b := connect(t, a)
	if _, err := b.Network(t.Context()); !errors.Is(err, store.ErrNoNetwork) {
		t.Errorf("Network before InitNetwork: %v, want ErrNoNetwork", err)
	}
	if _, err := b.JoinNode(t.Context(), node(1)); !errors.Is(err, store.ErrNoNetwork) {
		t.Errorf("JoinNode before InitNetwork: %v, want ErrNoNetwork", err)
	}
	pool := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/20")}
	first := initNetwork(t, a, store.Network{Pool: pool})
	if !reflect.DeepEqual(first, store.Network{ID: testNetwork, Pool: pool}.WithDefaults()) {
		t.Errorf("InitNetwork = %+v", first)
	}
	if second := initNetwork(t, b, store.Network{}); !reflect.DeepEqual(second, first) {
		t.Errorf("without wishes: %+v, want %+v", second, first)
	}
	var mismatch *store.MismatchError
	if _, err := b.InitNetwork(t.Context(), store.Network{Pool: []netip.Prefix{store.DefaultPool}}); !errors.As(err, &mismatch) || mismatch.Field != "pool" {
		t.Errorf("other pool: %v, want a MismatchError of pool", err)
	}
	if _, err := b.InitNetwork(t.Context(), store.Network{ID: 8}); !errors.As(err, &mismatch) || mismatch.Field != "id" {
		t.Errorf("other id: %v, want a MismatchError of id", err)
	}
	if got, err := b.Network(t.Context()); err != nil || !reflect.DeepEqual(got, first) {
		t.Errorf("Network = %+v, %v", got, err)
	}
}

// TestSchemaOfALaterBuild: an agent neither starts in a network whose values it cannot understand
// nor writes to it.
func TestSchemaOfALaterBuild(t *testing.T) {
	s := embedded(t, EmbeddedConfig{})
	n := initNetwork(t, s, store.Network{})
	value, err := store.EncodeNetwork(n)
	if err != nil {
		t.Fatal(err)
	}
	later := strings.Replace(string(value), "{", fmt.Sprintf(`{"schema":%d,`, store.Schema+1), 1)
	if _, err := s.client.Put(t.Context(), s.keys.Network(), later); err != nil {
		t.Fatal(err)
	}
	_, errInit := s.InitNetwork(t.Context(), store.Network{})
	_, errJoin := s.JoinNode(t.Context(), node(1))
	_, errNetwork := s.Network(t.Context())
	for what, err := range map[string]error{"InitNetwork": errInit, "JoinNode": errJoin, "Network": errNetwork} {
		var schema *store.SchemaError
		if !errors.As(err, &schema) || schema.Revision != store.Schema+1 {
			t.Errorf("%s: %v, want a *SchemaError", what, err)
		}
	}
}

func TestJoinNode(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{Pool: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/23")}})
	n1, n2 := join(t, s, node(1)), join(t, s, node(2))
	if n1.Prefixes[0].String() != "10.9.0.0/24" || n2.Prefixes[0].String() != "10.9.1.0/24" {
		t.Errorf("prefixes %s and %s", n1.Prefixes, n2.Prefixes)
	}
	moved := node(1)
	moved.Underlay = netip.MustParseAddr("10.0.0.99")
	if again := join(t, s, moved); !reflect.DeepEqual(again.Prefixes, n1.Prefixes) || again.Underlay != moved.Underlay {
		t.Errorf("returning node: %+v", again)
	}
	if _, err := s.JoinNode(t.Context(), node(3)); !errors.Is(err, store.ErrPoolExhausted) {
		t.Errorf("third node: %v, want ErrPoolExhausted", err)
	}
	n3 := node(3)
	n3.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.9.1.128/25")}
	var overlap *store.OverlapError
	if _, err := s.JoinNode(t.Context(), n3); !errors.As(err, &overlap) || !strings.Contains(overlap.With, "node n2") {
		t.Errorf("overlapping prefix: %v, want an OverlapError naming n2", err)
	}
	n3 = node(3)
	n3.Underlay = node(2).Underlay
	var inUse *store.UnderlayInUseError
	if _, err := s.JoinNode(t.Context(), n3); !errors.As(err, &inUse) || inUse.Node != "n2" {
		t.Errorf("underlay of another: %v, want an UnderlayInUseError naming n2", err)
	}
	if err := s.LeaveNode(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	if n3 := join(t, s, node(3)); n3.Prefixes[0].String() != "10.9.0.0/24" {
		t.Errorf("prefix %s, want that of the node that left", n3.Prefixes)
	}
}

func TestNodesJoiningAtOnceGetDisjointPrefixes(t *testing.T) {
	t.Parallel()
	const nodes = 12
	a := embedded(t, EmbeddedConfig{})
	b := connect(t, a)
	initNetwork(t, a, store.Network{})
	got := make([]model.Node, nodes)
	errs := make([]error, nodes)
	var wg sync.WaitGroup
	for i := range nodes {
		wg.Go(func() { got[i], errs[i] = []*Store{a, b}[i%2].JoinNode(t.Context(), node(i+1)) })
	}
	wg.Wait()
	seen := make(map[netip.Prefix]string)
	for i, n := range got {
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		if other := seen[n.Prefixes[0]]; other != "" {
			t.Errorf("%s and %s both have %s", other, n.Name, n.Prefixes[0])
		}
		seen[n.Prefixes[0]] = n.Name
	}
}

func TestEndpoints(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	var unknown *store.UnknownNodeError
	if err := s.PutEndpoint(t.Context(), endpoint("n1", 1, "10.244.0.2")); !errors.As(err, &unknown) {
		t.Errorf("endpoint of no node: %v, want an UnknownNodeError", err)
	}
	join(t, s, node(1))
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	put(t, s, endpoint("n1", 1, "10.244.0.2"))

	var inUse *store.AddrInUseError
	if err := s.PutEndpoint(t.Context(), endpoint("n1", 2, "10.244.0.2")); !errors.As(err, &inUse) || inUse.Owner != 1 {
		t.Errorf("address of another: %v, want an AddrInUseError naming 1", err)
	}
	var outside *store.AddrOutsideError
	for _, a := range []string{"10.244.1.2", "10.244.0.0", "10.244.0.1", "10.244.0.255"} {
		if err := s.PutEndpoint(t.Context(), endpoint("n1", 2, a)); !errors.As(err, &outside) {
			t.Errorf("address %s: %v, want an AddrOutsideError", a, err)
		}
	}
	put(t, s, endpoint("n1", 1, "10.244.0.3")) // moves, so that its old address is free
	put(t, s, endpoint("n1", 2, "10.244.0.2"))

	var held *store.PrefixInUseError
	elsewhere := node(1)
	elsewhere.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.244.7.0/24")}
	if _, err := s.JoinNode(t.Context(), elsewhere); !errors.As(err, &held) {
		t.Errorf("node giving up a prefix in use: %v, want a PrefixInUseError", err)
	}
	for range 2 { // absent the second time
		if err := s.DeleteEndpoint(t.Context(), "n1", 2); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, endpoint("n1", 3, "10.244.0.2"))
	for range 2 {
		if err := s.LeaveNode(t.Context(), "n1"); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := s.client.Get(t.Context(), s.keys.Root(), clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) != 1 || string(resp.Kvs[0].Key) != s.keys.Network() {
		t.Errorf("after the only node left: %v", resp.Kvs)
	}
}

// TestDualStack: the IPv6 address is stored with the endpoint, needs no entry of its own, and has
// to be the one that follows from the IPv4 address.
func TestDualStack(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	if err := s.PutEndpoint(t.Context(), endpoint("n1", 1, "10.244.0.2")); !errors.Is(err, store.ErrNoNetwork) {
		t.Errorf("endpoint before the network: %v, want ErrNoNetwork", err)
	}
	network := initNetwork(t, s, store.Network{})
	if want := model.DefaultPrefix6(testNetwork); network.Prefix6 != want {
		t.Errorf("prefix6 %s, want %s", network.Prefix6, want)
	}
	var mismatch *store.MismatchError
	if _, err := s.InitNetwork(t.Context(), store.Network{NoPrefix6: true}); !errors.As(err, &mismatch) || mismatch.Field != "prefix6" {
		t.Errorf("wish for an IPv4-only network: %v", err)
	}
	join(t, s, node(1))
	e := endpoint("n1", 1, "10.244.0.2")
	for _, a := range []netip.Addr{model.Overlay6(network.Prefix6, e.Addrs[0].Next()), model.Overlay6(netip.MustParsePrefix("fd00::/96"), e.Addrs[0])} {
		wrong := e
		wrong.Addrs = []netip.Addr{e.Addrs[0], a}
		if err := s.PutEndpoint(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), a.String()) {
			t.Errorf("%v: %v, want an error that names the second", wrong.Addrs, err)
		}
	}
	e.Addrs = model.OverlayAddrs(network.Prefix6, e.Addrs[0])
	put(t, s, e)
	if got := slices.Collect((<-watch(t, s)).Endpoints.All()); len(got) != 1 || !reflect.DeepEqual(got[0], e) {
		t.Errorf("stored %+v, want %+v", got, e)
	}
	resp, err := s.client.Get(t.Context(), s.keys.Addrs("n1"), clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Key) != s.keys.Addr("n1", e.Addrs[0]) {
		t.Errorf("entries: %v, %v", resp.Kvs, err)
	}
}

func TestIPv4OnlyNetwork(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	for range 2 { // made, then found
		if got := initNetwork(t, s, store.Network{NoPrefix6: true}); got.Prefix6.IsValid() || got.NoPrefix6 {
			t.Errorf("network %+v, want one without prefix6", got)
		}
	}
	initNetwork(t, s, store.Network{})
	var mismatch *store.MismatchError
	if _, err := s.InitNetwork(t.Context(), store.Network{Prefix6: model.DefaultPrefix6(testNetwork)}); !errors.As(err, &mismatch) || mismatch.Have != "none" {
		t.Errorf("wish for a dual-stack network: %v", err)
	}
	join(t, s, node(1))
	e := endpoint("n1", 1, "10.244.0.2")
	e.Addrs = model.OverlayAddrs(model.DefaultPrefix6(testNetwork), e.Addrs[0])
	var outside *store.AddrOutsideError
	if err := s.PutEndpoint(t.Context(), e); !errors.As(err, &outside) {
		t.Errorf("endpoint with an IPv6 address: %v, want an AddrOutsideError", err)
	}
}

func TestConnectSaysWhatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	mute := "http://" + l.Addr().String() // accepts and says nothing
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refusing := "http://" + gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	for url, reason := range map[string]string{mute: "it accepts connections", refusing: "connection refused"} {
		began := time.Now()
		_, err := Connect(t.Context(), []string{url}, testNetwork, WithTimeout(300*time.Millisecond))
		var unreachable *UnreachableError
		if !errors.As(err, &unreachable) || !strings.Contains(err.Error(), url) || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want an UnreachableError with %q", url, err, reason)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("%s: took %s", url, took)
		}
	}
}

func TestConnectRefusesNonsense(t *testing.T) {
	t.Parallel()
	for _, endpoints := range [][]string{nil, {""}, {"10.0.0.1:2379"}, {"http://10.0.0.1"}, {"ftp://10.0.0.1:1"}, {"http://10.0.0.1:1/x"}} {
		if _, err := Connect(t.Context(), endpoints, testNetwork); err == nil || !strings.Contains(err.Error(), "store endpoint") {
			t.Errorf("endpoints %q: %v", endpoints, err)
		}
	}
	if _, err := Connect(t.Context(), []string{"http://127.0.0.1:1"}, 5000); err == nil {
		t.Error("network id 5000 was accepted")
	}
}

package policy

import (
	"context"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/generate"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

var (
	policySeed = flag.Uint64("policy.seed", 0, "the random rules to begin with; 0: some fixed ones")
	policyFor  = flag.Duration("policy.for", 8*time.Second, "try random rules for this long")
)

//go:embed testdata/policy_differ.py
var policyDifferScript string

// policyEnds are the containers; each has an intercepted and a plain process.
var policyEnds = []string{"n1/c1", "n1/c2", "n2/c1", "n2/c2"}

// clearPolicy leaves the lab as tests expect it: no policies, no labels.
func clearPolicy(t testing.TB) {
	t.Helper()
	t.Cleanup(func() {
		if err := labHeddle("policy", "delete", "--all"); err != nil {
			t.Error(err)
		}
		for _, c := range policyEnds {
			if err := labHeddle(labelArgs(c, nil)...); err != nil {
				t.Error(err)
			}
		}
	})
}

// labHeddle runs the command line for the lab, also when the test has ended.
func labHeddle(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, lab.Bin, append(args, "--lab", lab.Name)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("heddle %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

var policyLabels = []string{"app", "tier", "zone", policy.NamespaceLabel}

// labelArgs is the command that gives a container exactly these labels.
func labelArgs(container string, labels map[string]string) []string {
	node, _, _ := strings.Cut(container, "/")
	args := []string{"endpoints", "label", "--node", node, container}
	for _, k := range policyLabels {
		if v, ok := labels[k]; ok {
			args = append(args, k+"="+v)
		} else {
			args = append(args, k+"-")
		}
	}
	return args
}

// policySnapshot is the lab as the evaluator sees it, with the peers that try what it says.
type policySnapshot struct {
	t       *testing.T
	clients map[string]*lab.Peer // by "container mode" and node
	ports   map[string]int       // that mode's processes listen at, everywhere
	addrs   []netip.Addr
	state   policy.State
}

// TestPolicyDiffer puts random rules in force for containers with random labels, and compares what
// connections, datagrams and pings meet with what the rules say, between all kinds of processes:
// intercepted, plain, on the nodes and outside, in both families. In TCP the kind of the refusal
// has to be right, too.
func TestPolicyDiffer(t *testing.T) {
	clearPolicy(t)
	lab.UnlimitedICMP(t)
	w := newPolicySnapshot(t)
	seed := *policySeed
	if seed == 0 {
		seed = 1
	}
	end := time.Now().Add(*policyFor)
	rounds, tries, allowed := 0, 0, 0
	for ; rounds < 3 || time.Now().Before(end); rounds++ {
		n, ok := w.round(seed)
		tries, allowed = tries+n, allowed+ok
		if t.Failed() {
			t.Fatalf("in round %d: repeat it with -policy.seed=%d", rounds, seed)
		}
		seed++
	}
	t.Logf("%d rounds, %d tries, %d of them allowed", rounds, tries, allowed)
	if allowed == 0 || allowed == tries {
		t.Error("the rules allowed everything or nothing: that tells nothing")
	}
}

func newPolicySnapshot(t *testing.T) *policySnapshot {
	t.Helper()
	w := &policySnapshot{t: t, clients: make(map[string]*lab.Peer), ports: map[string]int{"overlay": lab.FreePort(), "heddle": lab.FreePort(), "host": lab.FreePort()}}
	w.readLab()
	add := func(key string, p *lab.Peer, mode string, addrs ...netip.Addr) {
		p.Must("%s", policyDifferScript)
		p.Must("serve_policy([%d], %s)", w.ports[mode], lab.JSON(t, append([]netip.Addr{}, addrs...)))
		w.clients[key] = p
	}
	for _, c := range policyEnds {
		for _, mode := range lab.Modes {
			add(c+" "+mode, lab.StartPeer(t, mode, c), mode)
		}
	}
	for _, n := range w.state.Nodes {
		add(n.Name, lab.StartPeer(t, "host", n.Name+"/c1"), "host", n.Addrs...)
	}
	add("outside", lab.StartOutside(t), "host", netip.MustParseAddr(lab.OutsideTarget(t)))
	for _, c := range policyEnds {
		for _, a := range lab.OutsideTargets(t, c) {
			w.addrs = append(w.addrs, w.source("outside", netip.MustParseAddr(a))) // rules are made about what is there
		}
	}
	return w
}

// readLab asks the agents for what the evaluator has to know.
func (w *policySnapshot) readLab() {
	w.t.Helper()
	var status []struct {
		Node    model.Node
		Network struct {
			Pool    []netip.Prefix
			Prefix6 netip.Prefix
		}
	}
	lab.Query(w.t, &status, "status")
	if len(status) != 2 {
		w.t.Fatalf("status: %+v", status)
	}
	w.state.Pool, w.state.Prefix6 = status[0].Network.Pool, status[0].Network.Prefix6
	for _, st := range status {
		n := policy.Node{Name: st.Node.Name, Addrs: []netip.Addr{st.Node.Underlay}}
		for _, p := range model.WithOverlay6(w.state.Prefix6, st.Node.Prefixes) {
			n.Addrs = append(n.Addrs, model.Gateway(p))
		}
		w.state.Nodes = append(w.state.Nodes, n)
		w.addrs = append(w.addrs, n.Addrs...)
	}
	w.addrs = append(w.addrs, netip.MustParseAddr(lab.OutsideTarget(w.t)))
	w.readEndpoints()
	for e := range w.state.Endpoints.All() {
		w.addrs = append(w.addrs, e.Addrs...)
	}
}

func (w *policySnapshot) readEndpoints() {
	w.t.Helper()
	var all []model.Endpoint
	lab.Query(w.t, &all, "endpoints")
	if len(all) != len(policyEnds) {
		w.t.Fatalf("endpoints: %+v", all)
	}
	w.state.Endpoints = model.EndpointsOf(all...)
}

// apply puts the rules of a seed in force.
func (w *policySnapshot) apply(g *generate.Generator) {
	w.t.Helper()
	for _, c := range policyEnds {
		lab.Heddle(w.t, labelArgs(c, g.Labels())...)
	}
	w.readEndpoints()
	// The same names each time, so that each round replaces the last one's.
	type document struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		*policy.Policy
		Metadata *policy.Namespace `json:"metadata,omitempty"`
		Items    []any             `json:"items,omitempty"`
	}
	w.state.Policies, w.state.Namespaces = nil, nil
	list := document{APIVersion: "v1", Kind: "List"}
	for i := range 4 {
		p := g.Policy(fmt.Sprintf("random-%d", i))
		w.state.Policies = append(w.state.Policies, p)
		list.Items = append(list.Items, document{APIVersion: "heddle.dev/v1", Kind: "Policy", Policy: p})
	}
	for _, namespace := range g.Namespaces {
		doc, p := networkPolicy(g, namespace, "random")
		w.state.Policies = append(w.state.Policies, p)
		list.Items = append(list.Items, doc)
	}
	for _, name := range g.Namespaces {
		n := policy.Namespace{Name: name, Labels: g.Labels()}
		w.state.Namespaces = append(w.state.Namespaces, n)
		list.Items = append(list.Items, document{APIVersion: "v1", Kind: "Namespace", Metadata: &n})
	}
	raw, err := json.Marshal(list)
	testutil.NoError(w.t, err)
	file := filepath.Join(w.t.TempDir(), "policies.json")
	testutil.NoError(w.t, os.WriteFile(file, raw, 0o600))
	lab.Heddle(w.t, "policy", "apply", "-f", file)
}

// try is one connection, datagram or ping.
type try struct {
	from  string
	mode  string // of the process that listens; empty: none is needed
	probe policy.Probe
}

// round puts one set of rules in force and tries what it says.
func (w *policySnapshot) round(seed uint64) (tries, allowed int) {
	w.t.Helper()
	g := generate.New(seed)
	g.Namespaces, g.Addrs = []string{"n1", "n2"}, w.addrs
	g.Ports = []uint16{uint16(w.ports["overlay"]), uint16(w.ports["heddle"]), uint16(w.ports["host"])}
	w.apply(g)
	rnd := rand.New(rand.NewPCG(seed, 1))
	batches := make(map[string][]try)
	for _, from := range slices.Sorted(maps.Keys(w.clients)) { // in order, so that a seed is a seed
		if batch := w.choose(rnd, from); len(batch) > 0 {
			batches[from] = batch
		}
	}
	// All clients at once, each all of its own at once.
	for from, batch := range batches {
		var lines []any
		for _, x := range batch {
			verdict := policy.Decide(&w.state, x.probe)
			answered := verdict == model.VerdictAllow || verdict == model.VerdictReject && x.probe.Protocol == model.ProtocolTCP
			lines = append(lines, []any{policy.ProtocolName(x.probe.Protocol), x.probe.To.String(), x.probe.Port, answered})
		}
		raw, err := json.Marshal(lines)
		testutil.NoError(w.t, err)
		w.clients[from].Begin(fmt.Sprintf("probe_all(json.loads(%q))", raw))
	}
	for from, batch := range batches {
		var got []string
		reply := w.clients[from].Reply("probe_all")
		if err := json.Unmarshal([]byte(reply), &got); err != nil || len(got) != len(batch) {
			w.t.Fatalf("%s: %v: %s", from, err, reply)
		}
		for i, x := range batch {
			tries++
			if w.judge(x, got[i]) {
				allowed++
			}
		}
	}
	return tries, allowed
}

// choose picks what a client tries: of everything something.
func (w *policySnapshot) choose(rnd *rand.Rand, from string) (out []try) {
	container, mode, isContainer := strings.Cut(from, " ")
	for range 14 {
		x := try{from: from}
		target := w.addrs[rnd.IntN(len(w.addrs))]
		e := w.endpointAt(target)
		if e == nil && !isContainer {
			continue // between nodes and outside nobody judges
		}
		if !w.reachable(target) {
			continue
		}
		x.probe = policy.Probe{To: target, Protocol: []model.Protocol{model.ProtocolTCP, model.ProtocolTCP, model.ProtocolUDP, model.ProtocolICMP}[rnd.IntN(4)]}
		if mode == "heddle" {
			x.probe.Protocol = model.ProtocolTCP // others are the plain process's, as it is
		}
		x.mode = lab.Modes[rnd.IntN(2)]
		if e == nil {
			x.mode = "host"
		}
		if x.probe.Protocol.HasPorts() {
			x.probe.Port = uint16(w.ports[x.mode])
		}
		if isContainer {
			x.probe.From = w.ownAddr(container, target)
		} else {
			x.probe.From = w.source(from, target)
		}
		out = append(out, x)
	}
	return out
}

// reachable reports whether there is somebody at a whom every peer reaches: the addresses that the
// host outside sends from are for rules only.
func (w *policySnapshot) reachable(a netip.Addr) bool {
	return w.endpointAt(a) != nil || a.String() == lab.OutsideTarget(w.t) ||
		slices.ContainsFunc(w.state.Nodes, func(n policy.Node) bool { return slices.Contains(n.Addrs, a) })
}

func (w *policySnapshot) endpointAt(a netip.Addr) *model.Endpoint {
	for e := range w.state.Endpoints.All() {
		if slices.Contains(e.Addrs, a) {
			return &e
		}
	}
	return nil
}

// ownAddr is the container's address in the family of target.
func (w *policySnapshot) ownAddr(container string, target netip.Addr) netip.Addr {
	for e := range w.state.Endpoints.All() {
		if e.Name == container && target.Is4() {
			return e.Addr4()
		} else if e.Name == container {
			return e.Addr6()
		}
	}
	w.t.Fatalf("no endpoint %s", container)
	return netip.Addr{}
}

// source asks where a node sends from.
func (w *policySnapshot) source(node string, target netip.Addr) (a netip.Addr) {
	w.t.Helper()
	testutil.NoError(w.t, json.Unmarshal([]byte(w.clients[node].Must("source_of(%q)", target.String())), &a))
	return a
}

// judge compares what a try met with what the rules say; it reports whether they allow it.
func (w *policySnapshot) judge(x try, got string) bool {
	w.t.Helper()
	verdict := policy.Decide(&w.state, x.probe)
	want := map[model.Verdict][]string{model.VerdictAllow: {"answer"}, model.VerdictReject: {"refused"}, model.VerdictDrop: {"nothing"}}[verdict]
	if verdict == model.VerdictReject && x.probe.Protocol != model.ProtocolTCP {
		want = []string{"refused", "nothing"} // whether an ICMP error arrives, and what a program hears of it, is chance
	}
	if !slices.Contains(want, got) {
		why, _ := json.Marshal(policy.Explain(&w.state, x.probe))
		w.t.Errorf("%s to %s (%s) from %s, %s port %d: %s, rules say %s: %s", x.from, x.probe.To, x.mode, x.probe.From,
			policy.ProtocolName(x.probe.Protocol), x.probe.Port, got, verdict, why)
	}
	return verdict == model.VerdictAllow
}

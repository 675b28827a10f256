package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/lab/fabric"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/patience"
)

// parallel is how many containers or nodes are set up at once: the work is the kernel's and runc's.
const parallel = 4

// congestionControl is what the lab's namespaces use, so that a lab measures the same on every
// machine.
const congestionControl = "cubic"

// peersKnown bounds how long nodes may take to hear of each other.
const peersKnown = time.Minute

// ErrNotRoot means that a command needs root and does not have it.
var ErrNotRoot = errors.New("needs root: labs are made of network namespaces, mounts and cgroups; run it with sudo")

// up is one run of Up. Its fields are set before goroutines start, save state.Overlay and lost,
// which mu guards.
type up struct {
	lab      Lab
	programs programs
	groups   cgroups
	progress io.Writer

	mu    sync.Mutex
	state State
	// lost are nodes whose agent found no seccomp listeners: their containers' sockets go nowhere.
	lost map[string]bool
}

// Up brings the lab up, or completes what an earlier Up began. It writes a line for each step to
// progress. After an error, Up can be repeated and Down removes what there is.
func (l Lab) Up(ctx context.Context, size Size, progress io.Writer) (err error) {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	u := up{lab: l, progress: progress, lost: map[string]bool{}}
	if u.programs, err = findPrograms(); err != nil {
		return err
	}
	u.programs.agentArgs, u.programs.nodeArgs = size.AgentArgs, size.NodeArgs
	if u.groups, err = findCgroups(); err != nil {
		return err
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := l.Load(); errors.Is(err, ErrNotUp) {
		// A Down that was killed, or anything else that is called as this lab's would be.
		if err := l.clear(ctx); err != nil {
			return fmt.Errorf("lab %s: remove what is left of an earlier lab: %w", l.name, err)
		}
	}
	if u.state, err = l.prepare(size); err != nil {
		return err
	}
	if u.state.Ready {
		for _, part := range l.missing(u.state, u.groups) {
			fmt.Fprintf(progress, "lab %s: %s is down\n", l.name, part)
		}
	}
	for _, step := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"network namespaces and fabric", u.wire},
		{"store members", u.startMembers},
		{"agents", u.startAgents},
		{"containers", u.startContainers},
		{"nodes know each other", u.awaitPeers},
	} {
		if step.name == "store members" && u.state.StoreMembers == 0 {
			continue
		}
		began := time.Now()
		if err := errors.Join(ctx.Err(), step.run(ctx)); err != nil {
			return fmt.Errorf("lab %s: %s: %w\nnext: `heddle lab up%s` tries again from here, `heddle lab down%s` removes what there is", l.name, step.name, err, l.flag(), l.flag())
		}
		fmt.Fprintf(progress, "lab %s: %s: %.2f s\n", l.name, step.name, time.Since(began).Seconds())
	}
	u.state.Ready = true
	if err := l.save(u.state); err != nil {
		return err
	}
	fmt.Fprintf(progress, "lab %s: up: %d nodes, %d containers each; try: heddle lab exec%s n1/c1 -- ip addr\n", l.name, u.state.Nodes, u.state.Containers, l.flag())
	return nil
}

// each calls fn for every element of list, some at once, and joins the errors. After one error, no
// more are begun.
func each[T any](ctx context.Context, list []T, fn func(context.Context, T) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	places := make(chan struct{}, parallel)
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i, x := range list {
		places <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-places }()
			if errs[i] = fn(ctx, x); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// wire makes the lab's network namespaces and joins the nodes.
func (u *up) wire(context.Context) error {
	hosts := append(append(u.state.nodes(), outside), u.state.members()...)
	names := append([]string{fabricSpace}, hosts...)
	for _, c := range u.state.containers() {
		names = append(names, c.suffix())
	}
	for _, n := range names {
		if err := netns.Create(u.lab.netnsName(n)); err != nil {
			return err
		}
	}
	for _, c := range u.state.containers() {
		if err := u.lab.setupContainer(c); err != nil {
			return err
		}
	}
	if err := u.plug(hosts); err != nil {
		return err
	}
	for _, name := range hosts {
		if err := netns.Do(u.lab.netns(name), func() error { return u.setupHost(name) }); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// setupContainer configures the network namespace of c as a container engine would.
func (l Lab) setupContainer(c container) error {
	err := netns.Do(l.netns(c.suffix()), func() error {
		return errors.Join(fabric.SetupLoopback(nil), fabric.SetCongestionControl(congestionControl))
	})
	if err != nil {
		return fmt.Errorf("%s: %w", c, err)
	}
	return nil
}

// AddNamespace makes a network namespace as those of the lab's containers are, for a further
// container of node that is the caller's: it is not in the lab's list, but goes with the lab. i
// counts from 1 and must be none of the lab's.
func (l Lab) AddNamespace(node string, i int) (name, path string, err error) {
	c := container{node, fmt.Sprintf("c%d", i)}
	if err := netns.Create(l.netnsName(c.suffix())); err != nil {
		return c.String(), "", err
	}
	return c.String(), l.netns(c.suffix()), l.setupContainer(c)
}

// RemoveNamespace undoes AddNamespace.
func (l Lab) RemoveNamespace(node string, i int) error {
	return netns.Delete(l.netnsName(container{node, fmt.Sprintf("c%d", i)}.suffix()))
}

// setupHost configures the calling thread's network namespace, that of host name on the fabric.
func (u *up) setupHost(name string) error {
	if err := fabric.SetCongestionControl(congestionControl); err != nil {
		return err
	}
	if name == outside {
		return fabric.SetupHost(fabric.Host{
			Addrs: u.state.fabricAddrs(outsideHost), Loopback: []netip.Addr{u.state.outsideAddr()}})
	}
	if slices.Contains(u.state.members(), name) {
		return fabric.SetupHost(fabric.Host{Addrs: u.state.fabricAddrs(u.state.memberHost(name))})
	}
	if err := fabric.AllowForwarding6(); err != nil {
		return err
	}
	return fabric.SetupHost(fabric.Host{
		Addrs: u.state.fabricAddrs(u.state.nodeHost(name)), Gateway: u.state.fabricAddr(outsideHost)})
}

// plug joins hosts to the fabric.
func (u *up) plug(hosts []string) error {
	var ports []fabric.Port
	for _, name := range hosts {
		f, err := netns.Open(u.lab.netns(name))
		if err != nil {
			return err
		}
		defer f.Close()
		ports = append(ports, fabric.Port{Name: name, Netns: f})
	}
	return netns.Do(u.lab.netns(fabricSpace), func() error { return fabric.Wire(ports) })
}

// startAgents starts the first node's agent, which serves the store, and then the others'.
// Meanwhile the containers' root file systems are made.
func (u *up) startAgents(ctx context.Context) error {
	roots := make(chan error, 1)
	go func() {
		roots <- each(ctx, u.state.containers(), func(_ context.Context, c container) error { return u.lab.mountRoot(c) })
	}()
	start := func(ctx context.Context, node string) error {
		fresh, err := u.lab.ensureAgent(ctx, u.state, u.programs, u.groups, node)
		u.mu.Lock()
		defer u.mu.Unlock()
		u.lost[node] = fresh
		return err
	}
	nodes := u.state.nodes()
	err := start(ctx, nodes[0])
	if err == nil {
		err = each(ctx, nodes[1:], start)
	}
	return errors.Join(err, <-roots)
}

// startContainers makes endpoints and starts the runc containers that do not run.
func (u *up) startContainers(ctx context.Context) error {
	if err := os.MkdirAll(u.lab.runcRoot(), 0o711); err != nil {
		return err
	}
	running, err := u.lab.runningContainers(ctx, u.programs)
	if err != nil {
		return err
	}
	return each(ctx, u.state.containers(), func(ctx context.Context, c container) error {
		if err := u.startContainer(ctx, c, running); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		return nil
	})
}

func (u *up) startContainer(ctx context.Context, c container, running map[string]containerState) error {
	client := api.Dial(u.lab.apiSocket(c.node))
	defer client.Close()
	e, err := client.CreateEndpoint(ctx, api.EndpointRequest{Name: c.String(), NetnsPath: u.lab.netns(c.suffix()), Intercepted: true})
	if err != nil {
		return fmt.Errorf("make endpoint: %w", err)
	}
	u.mu.Lock()
	u.state.Overlay[c.String()] = e.Addr4()
	delete(u.state.Overlay6, c.String()) // the node may have lost IPv6
	if a := e.Addr6(); a.IsValid() {
		u.state.Overlay6[c.String()] = a
	}
	lost := u.lost[c.node]
	u.mu.Unlock()

	first, runs := running[u.lab.runcID(c, ModeHeddle)]
	pid := first.Pid
	if !runs || lost {
		// The others live in the first one's process namespace and end with it.
		group := filepath.Join(u.groups.v2, u.lab.cgroup(), c.suffix())
		if err := errors.Join(killCgroup(group, agentStops), removeCgroup(group, agentStops)); err != nil {
			return err
		}
		none := func(string) bool { return false }
		return u.startModes(ctx, c, 0, none)
	}
	return u.startModes(ctx, c, pid, func(id string) bool { _, ok := running[id]; return ok })
}

// startModes starts the runc containers of c that do not run, the one whose namespaces the others
// join first. pid is that one's process if it runs.
func (u *up) startModes(ctx context.Context, c container, pid int, runs func(id string) bool) (err error) {
	if pid == 0 {
		if pid, err = u.lab.start(ctx, u.programs, c, ModeHeddle, 0); err != nil {
			return err
		}
	}
	for _, m := range []Mode{ModeOverlay, ModeHost} {
		if runs(u.lab.runcID(c, m)) {
			continue
		}
		if _, err := u.lab.start(ctx, u.programs, c, m, pid); err != nil {
			return err
		}
	}
	return nil
}

// awaitPeers waits until every agent has heard of every node and knows what the direct path to it
// is worth.
func (u *up) awaitPeers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience.For(peersKnown))
	defer cancel()
	return each(ctx, u.state.nodes(), func(ctx context.Context, node string) error {
		client := api.Dial(u.lab.apiSocket(node))
		defer client.Close()
		for {
			st, err := client.Status(ctx)
			unproven := st.Direct.Peers[model.PeerUnproven]
			if err == nil && st.Peers+1 >= u.state.Nodes && unproven == 0 {
				return nil
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s knows %d of %d nodes, and of %d not whether the direct path works; see %s", node, st.Peers+1, u.state.Nodes, unproven, filepath.Join(u.lab.nodeDir(node), "heddled.log"))
			case <-time.After(killPoll):
			}
		}
	})
}

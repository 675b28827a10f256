package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// faultKind is a way to kill something.
type faultKind struct {
	name string
	make func(*chaos, fault)
}

// faultKinds are what TestChaos kills.
var faultKinds = []faultKind{
	{"agent killed", func(c *chaos, f fault) { c.endAgents(syscall.SIGKILL, f.node) }},
	{"agent told to end", func(c *chaos, f fault) { c.endAgents(syscall.SIGTERM, f.node) }},
	{"both agents killed at once", func(c *chaos, f fault) { c.endAgents(syscall.SIGKILL, "n1", "n2") }},
	{"one agent told to end, the other killed", (*chaos).endUnlike},
	{"agent killed while it starts", (*chaos).killStart},
	{"agent told to end while it starts", (*chaos).endStart},
	{"fd keeper killed", (*chaos).killKeeper},
	{"CNI plugin killed in ADD", (*chaos).killAdd},
	{"CNI plugin killed in DEL", (*chaos).killDel},
	{"agent killed in ADD", (*chaos).killAgentInAdd},
	{"agent killed in DEL", (*chaos).killAgentInDel},
	{"runtime killed in run", (*chaos).killRun},
	{"runtime killed in exec", (*chaos).killExec},
	{"container killed", (*chaos).killContainer},
	{"agent killed, a container started meanwhile", (*chaos).startWithoutAgent},
	{"agent killed while a container starts", (*chaos).killAgentInRun},
}

// chaos makes faults.
type chaos struct {
	t        *testing.T
	group    string // cgroup of the lab
	engines  map[string]*lab.CNIEngine
	took     map[string]time.Duration // what operations take that nothing disturbs
	number   int                      // of the fault
	survived map[string]int
	kinds    []faultKind
	loads    []*chaosLoad
	cluster  bool // the store is one, and not n1's agent's
}

func newChaos(t *testing.T, kinds []faultKind) *chaos {
	c := &chaos{t: t, kinds: kinds, group: filepath.Join(lab.Cgroup2, "heddle-"+lab.Name), engines: map[string]*lab.CNIEngine{}, took: map[string]time.Duration{}, survived: map[string]int{}}
	for _, node := range []string{"n1", "n2"} {
		c.engines[node] = lab.NewCNIEngine(t, node, "chaos", lab.CNIPlugin)
	}
	return c
}

// make makes a fault and gets over it.
func (c *chaos) make(number int, f fault) {
	c.t.Helper()
	c.number = number
	time.Sleep(f.after) // what the schedule says
	before := c.t.Failed()
	for _, k := range c.kinds {
		if k.name == f.kind {
			k.make(c, f)
		}
	}
	if c.t.Failed() && !before {
		c.t.Logf("at fault %d: %s", number, f)
	} else if testing.Verbose() {
		c.t.Logf("%s: fault %d: %s", time.Now().Format(time.TimeOnly), number, f)
	}
}

func (c *chaos) survive(what string) { c.survived[what]++ }

// at gives the moment of an operation at which a fault cuts it. Some come too late.
func (c *chaos) at(f fault, operation string) time.Duration {
	return time.Duration(f.cut * 1.1 * float64(c.took[operation]))
}

// processes gives a node's agent and fd keeper, 0 for one that does not run.
func (c *chaos) processes(node string) (agent, keeper int) {
	raw, _ := os.ReadFile(filepath.Join(c.group, node, "cgroup.procs"))
	for pid := range strings.FieldsSeq(string(raw)) {
		cmdline, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if err != nil || len(cmdline) == 0 || strings.HasPrefix(string(cmdline), "heddled-lockwait\x00") {
			continue
		}
		n, _ := strconv.Atoi(pid)
		if strings.Contains(string(cmdline), "\x00park\x00") {
			keeper = n
		} else if agent == 0 || n < agent { // what it starts looks like it for a moment
			agent = n
		}
	}
	return agent, keeper
}

// awaitKeeper waits until a node's fd keeper has all that its agent has: until then the end of both
// would be the end of calls.
func (c *chaos) awaitKeeper(node string) {
	c.t.Helper()
	testutil.Eventually(c.t, "the fd keeper of "+node+" to have every listener", func() (bool, string) {
		agent, keeper := c.processes(node)
		if agent == 0 || keeper == 0 {
			return false, fmt.Sprintf("agent %d, fd keeper %d", agent, keeper)
		}
		have, want := lab.Listeners(c.t, keeper), lab.Listeners(c.t, agent)
		return have == want && want > 0, fmt.Sprintf("fd keeper %d has %d, agent %d", keeper, have, want)
	})
}

// up brings agents back that are missing.
func (c *chaos) up() {
	c.t.Helper()
	err := lab.Command("up")
	for range 2 { // it gives an agent 20 s to answer, which is not enough everywhere
		if err == nil {
			return
		}
		err = lab.Command("up")
	}
	testutil.NoError(c.t, err)
}

// endAgents ends agents at once and brings them back.
func (c *chaos) endAgents(sig syscall.Signal, nodes ...string) {
	c.t.Helper()
	errs := make(chan error, len(nodes))
	for _, node := range nodes {
		agent, _ := c.processes(node)
		go func() { errs <- lab.KillAgent(agent, sig) }()
	}
	for range nodes {
		testutil.NoError(c.t, <-errs)
	}
	what := "agent"
	if len(nodes) > 1 {
		what = "both agents"
	}
	if nodes[0] == "n1" && !c.cluster {
		what += " with the store"
	}
	c.up()
	c.survive(fmt.Sprintf("%s ended by %s", what, map[syscall.Signal]string{syscall.SIGKILL: "KILL", syscall.SIGTERM: "TERM"}[sig]))
}

// endUnlike kills n2's agent while n1's, with the store, ends in good order: it has a client that
// says nothing any more.
func (c *chaos) endUnlike(f fault) {
	c.t.Helper()
	one, _ := c.processes("n1")
	two, _ := c.processes("n2")
	ended := make(chan error, 1)
	go func() { ended <- lab.KillAgent(one, syscall.SIGTERM) }()
	testutil.NoError(c.t, errors.Join(lab.KillAgent(two, syscall.SIGKILL), <-ended))
	c.up()
	c.survive(f.kind)
}

// cutStart ends the agent, starts it, and gives the new one sig at a moment of its start.
func (c *chaos) cutStart(f fault, sig syscall.Signal) {
	c.t.Helper()
	old, _ := c.processes(f.node)
	testutil.NoError(c.t, lab.KillAgent(old, syscall.SIGKILL))
	started := make(chan struct{})
	go func() {
		defer close(started)
		_ = lab.Command("up") // fails if the agent is killed in time
	}()
	for agent := 0; agent == 0 || agent == old; {
		select {
		case <-started: // it came and went, or did not come on a machine that is too busy
			c.up()
			return
		case <-time.After(time.Millisecond):
			agent, _ = c.processes(f.node)
		}
	}
	time.Sleep(c.at(f, "start")) // what the schedule says
	agent, _ := c.processes(f.node)
	if err := lab.KillAgent(agent, sig); err != nil {
		c.t.Error(err)
	}
	<-started
	c.up()
	c.survive(f.kind)
}

func (c *chaos) killStart(f fault) { c.cutStart(f, syscall.SIGKILL) }

func (c *chaos) endStart(f fault) { c.cutStart(f, syscall.SIGTERM) }

func (c *chaos) killKeeper(f fault) {
	c.t.Helper()
	c.awaitKeeper(f.node)
	_, keeper := c.processes(f.node)
	testutil.NoError(c.t, syscall.Kill(keeper, syscall.SIGKILL))
	testutil.Eventually(c.t, "another fd keeper on "+f.node, func() (bool, string) {
		_, now := c.processes(f.node)
		return now != 0 && now != keeper, fmt.Sprint(now)
	})
	c.awaitKeeper(f.node)
	c.survive(f.kind)
}

// attachment makes a network namespace for an attachment.
func (c *chaos) attachment(node, name string) *libcni.RuntimeConf {
	c.t.Helper()
	rt := c.engines[node].Conf(fmt.Sprintf("%s-%d", name, c.number))
	testutil.NoError(c.t, netns.Create(filepath.Base(rt.NetNS)))
	return rt
}

// again repeats an operation until it succeeds, as engines do while the agent is away; any other
// error is one.
func (c *chaos) again(what string, f func(context.Context) error) {
	c.t.Helper()
	testutil.Eventually(c.t, what, func() (bool, string) {
		ctx, cancel := context.WithTimeout(c.t.Context(), testutil.WaitTimeout)
		defer cancel()
		err := f(ctx)
		if err != nil && !away(err) {
			c.t.Fatalf("%s: %v", what, err)
		}
		return err == nil, fmt.Sprint(err)
	})
}

// away reports whether an operation failed because the agent is not there, or ended while it was at
// it.
func away(err error) bool {
	var said *types.Error
	return errors.As(err, &said) && said.Code == types.ErrTryAgainLater
}

func (c *chaos) add(node string, rt *libcni.RuntimeConf) {
	c.t.Helper()
	e := c.engines[node]
	c.again("ADD of "+rt.ContainerID, func(ctx context.Context) error {
		_, err := e.CNI.AddNetworkList(ctx, e.List, rt)
		return err
	})
	c.again("CHECK of "+rt.ContainerID, func(ctx context.Context) error { return e.CNI.CheckNetworkList(ctx, e.List, rt) })
}

// del removes an attachment and its namespace.
func (c *chaos) del(node string, rt *libcni.RuntimeConf) {
	c.t.Helper()
	e := c.engines[node]
	c.again("DEL of "+rt.ContainerID, func(ctx context.Context) error { return e.CNI.DelNetworkList(ctx, e.List, rt) })
	if err := netns.Delete(filepath.Base(rt.NetNS)); err != nil {
		c.t.Error(err)
	}
}

// cutPlugin runs a plugin and kills it after a while. It reports whether that came in time.
func (c *chaos) cutPlugin(f fault, operation string, run func(context.Context) error) (cut bool) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), c.at(f, operation))
	defer cancel()
	err := run(ctx)
	if err != nil && ctx.Err() == nil {
		c.t.Errorf("%s: %v", operation, err)
	}
	return err != nil
}

func (c *chaos) killAdd(f fault) {
	c.t.Helper()
	e, rt := c.engines[f.node], c.attachment(f.node, "add")
	cut := c.cutPlugin(f, "ADD", func(ctx context.Context) error {
		_, err := e.CNI.AddNetworkList(ctx, e.List, rt)
		return err
	})
	if f.repeat {
		c.add(f.node, rt)
	}
	c.del(f.node, rt)
	if cut {
		c.survive(f.kind)
	}
}

func (c *chaos) killDel(f fault) {
	c.t.Helper()
	e, rt := c.engines[f.node], c.attachment(f.node, "del")
	c.add(f.node, rt)
	cut := c.cutPlugin(f, "DEL", func(ctx context.Context) error { return e.CNI.DelNetworkList(ctx, e.List, rt) })
	if f.repeat {
		c.del(f.node, rt)
		rt = c.attachment(f.node, "del")
		c.add(f.node, rt)
	}
	c.del(f.node, rt)
	if cut {
		c.survive(f.kind)
	}
}

// killAgentDuring kills a node's agent at a moment of an operation and brings it back when that has
// ended.
func (c *chaos) killAgentDuring(f fault, operation string, run func() error) (err error) {
	c.t.Helper()
	agent, _ := c.processes(f.node)
	ended := make(chan error, 1)
	go func() { ended <- run() }()
	time.Sleep(c.at(f, operation)) // what the schedule says
	testutil.NoError(c.t, lab.KillAgent(agent, syscall.SIGKILL))
	err = <-ended
	c.up()
	return err
}

func (c *chaos) killAgentInAdd(f fault) {
	c.t.Helper()
	e, rt := c.engines[f.node], c.attachment(f.node, "cut-add")
	err := c.killAgentDuring(f, "ADD", func() error {
		_, err := e.CNI.AddNetworkList(c.t.Context(), e.List, rt)
		return err
	})
	if err != nil && !away(err) {
		c.t.Errorf("ADD while the agent ended: %v", err)
	}
	if f.repeat || err == nil {
		c.add(f.node, rt)
	}
	c.del(f.node, rt)
	c.survive(f.kind)
}

func (c *chaos) killAgentInDel(f fault) {
	c.t.Helper()
	e, rt := c.engines[f.node], c.attachment(f.node, "cut-del")
	c.add(f.node, rt)
	if err := c.killAgentDuring(f, "DEL", func() error { return e.CNI.DelNetworkList(c.t.Context(), e.List, rt) }); err != nil {
		c.t.Errorf("DEL while the agent ended: %v", err)
	}
	if f.repeat {
		c.del(f.node, rt)
	} else if err := netns.Delete(filepath.Base(rt.NetNS)); err != nil {
		c.t.Error(err)
	}
	if e.Endpoint(rt) != nil {
		c.t.Errorf("endpoint of %s is there after DEL", rt.ContainerID)
	}
	c.survive(f.kind)
}

// startChurn has endpoints come and go on both nodes; the function ends it and says how many there
// were.
func (c *chaos) startChurn() (stop func() int) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var count atomic.Int64
	for node, e := range c.engines {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := c.comeAndGo(e, fmt.Sprintf("churn-%s-%d", node, i)); err != nil {
					c.t.Errorf("endpoint on %s: %v", node, err)
					return
				}
				count.Add(1)
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	stopped := sync.OnceValue(func() int {
		cancel()
		wg.Wait()
		return int(count.Load())
	})
	c.t.Cleanup(func() { stopped() })
	return stopped
}

// comeAndGo attaches a namespace and detaches it again, as often as it takes.
func (c *chaos) comeAndGo(e *lab.CNIEngine, name string) (err error) {
	rt := e.Conf(name)
	if err := netns.Create(filepath.Base(rt.NetNS)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, netns.Delete(filepath.Base(rt.NetNS))) }()
	ctx, cancel := context.WithTimeout(context.Background(), 3*testutil.WaitTimeout)
	defer cancel()
	repeat := func(f func() error) (err error) {
		for err = f(); away(err); err = f() {
			time.Sleep(50 * time.Millisecond) // as an engine would
		}
		return err
	}
	add := repeat(func() error {
		_, err := e.CNI.AddNetworkList(ctx, e.List, rt)
		return err
	})
	return errors.Join(add, repeat(func() error { return e.CNI.DelNetworkList(ctx, e.List, rt) }))
}

package lifecycle

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// box is a container that TestChaos makes for one fault.
type box struct {
	c      *chaos
	node   string
	rt     *libcni.RuntimeConf
	id     string
	bundle string
}

// box attaches a container to be.
func (c *chaos) box(node string) *box {
	c.t.Helper()
	b := &box{c: c, node: node, rt: c.attachment(node, "box"), id: fmt.Sprintf("box-%d", c.number)}
	c.add(node, b.rt)
	var err error
	if b.bundle, err = os.MkdirTemp("", "heddle-chaos"); err != nil {
		c.t.Fatal(err)
	}
	return b
}

func (b *box) engine() *lab.CNIEngine { return b.c.engines[b.node] }

// run starts the container; its runtime is killed with ctx.
func (b *box) run(ctx context.Context) (pid string, err error) {
	return b.engine().TryRun(ctx, b.bundle, b.id, b.rt.NetNS)
}

// talk is a program that needs a socket from the agent and an answer over the network.
const talk = `import socket
l = socket.create_server(("127.0.0.1", 0))
s = socket.create_connection(l.getsockname())
s.sendall(b"hello")
assert l.accept()[0].recv(5) == b"hello"`

// exec runs talk in the container.
func (b *box) exec(ctx context.Context) (said string, err error) {
	out, err := b.engine().Runtime(ctx, "exec", b.id, lab.Python, "-c", talk).CombinedOutput()
	return string(out), err
}

// works demands that a program in the container gets on.
func (b *box) works() {
	b.c.t.Helper()
	ctx, cancel := context.WithTimeout(b.c.t.Context(), 2*testutil.WaitTimeout)
	defer cancel()
	if said, err := b.exec(ctx); err != nil {
		b.c.t.Errorf("container %s of %s: %v\n%s", b.id, b.node, err, said)
	}
}

// start starts the container, which must succeed.
func (b *box) start() (pid int) {
	b.c.t.Helper()
	ctx, cancel := context.WithTimeout(b.c.t.Context(), 2*testutil.WaitTimeout)
	defer cancel()
	text, err := b.run(ctx)
	testutil.NoError(b.c.t, err)
	if pid, err = strconv.Atoi(text); err != nil {
		b.c.t.Fatal(err)
	}
	return pid
}

// delete removes the container as an engine does, its cgroup too: a runtime that is killed early
// leaves it, and a process.
func (b *box) delete() {
	b.c.t.Helper()
	if out, err := b.engine().Runtime(context.Background(), "delete", "--force", b.id).CombinedOutput(); err != nil && !strings.Contains(string(out), "does not exist") {
		b.c.t.Errorf("delete %s: %v\n%s", b.id, err, out)
	}
	groups, err := filepath.Glob("/sys/fs/cgroup/*/" + lab.Name + "-" + b.id)
	testutil.NoError(b.c.t, err)
	testutil.Eventually(b.c.t, "the cgroups of "+b.id+" to go", func() (bool, string) {
		left := ""
		for _, dir := range groups {
			raw, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			for pid := range strings.FieldsSeq(string(raw)) {
				if n, _ := strconv.Atoi(pid); n > 1 {
					_ = syscall.Kill(n, syscall.SIGKILL)
				}
			}
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				left += err.Error() + "\n"
			}
		}
		return left == "", left
	})
	b.c.del(b.node, b.rt)
	for _, dir := range []string{b.bundle, filepath.Join(b.engine().Root, b.id)} {
		if err := os.RemoveAll(dir); err != nil {
			b.c.t.Error(err)
		}
	}
}

func (c *chaos) killRun(f fault) {
	c.t.Helper()
	b := c.box(f.node)
	ctx, cancel := context.WithTimeout(c.t.Context(), c.at(f, "run"))
	defer cancel()
	if _, err := b.run(ctx); err == nil {
		b.works()
	} else if ctx.Err() == nil {
		c.t.Error(err)
	} else {
		c.survive(f.kind)
	}
	b.delete()
	if f.repeat {
		b := c.box(f.node)
		b.start()
		b.works()
		b.delete()
	}
}

func (c *chaos) killExec(f fault) {
	c.t.Helper()
	b := c.box(f.node)
	b.start()
	ctx, cancel := context.WithTimeout(c.t.Context(), c.at(f, "exec"))
	defer cancel()
	if said, err := b.exec(ctx); err != nil && ctx.Err() == nil {
		c.t.Errorf("%v\n%s", err, said)
	} else if err != nil {
		c.survive(f.kind)
	}
	if f.repeat {
		b.works()
	}
	b.delete()
}

func (c *chaos) killContainer(f fault) {
	c.t.Helper()
	b := c.box(f.node)
	pid := b.start()
	if f.repeat {
		b.works()
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		c.t.Error(err)
	}
	b.delete()
	c.survive(f.kind)
}

// startWithoutAgent starts a container that has its endpoint while no agent runs. It must work as
// soon as one does.
func (c *chaos) startWithoutAgent(f fault) {
	c.t.Helper()
	b := c.box(f.node)
	agent, _ := c.processes(f.node)
	testutil.NoError(c.t, lab.KillAgent(agent, syscall.SIGKILL))
	b.start()
	c.up()
	b.works()
	b.delete()
	c.survive(f.kind)
}

// killAgentInRun kills the agent while a container starts. The one hand-off that the agent has
// taken and not yet parked is lost; such a container gets ENOSYS, and its engine starts another.
func (c *chaos) killAgentInRun(f fault) {
	c.t.Helper()
	b := c.box(f.node)
	err := c.killAgentDuring(f, "run", func() error {
		ctx, cancel := context.WithTimeout(c.t.Context(), 2*testutil.WaitTimeout)
		defer cancel()
		_, err := b.run(ctx)
		return err
	})
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*testutil.WaitTimeout)
	defer cancel()
	kind := f.kind
	switch said, xerr := b.exec(ctx); {
	case err != nil:
		kind += ", and it did not start"
		c.t.Logf("fault %d: %v", c.number, err)
	case xerr != nil && strings.Contains(said, "Function not implemented"):
		kind += ", and it got ENOSYS"
	case xerr != nil:
		c.t.Errorf("container %s of %s: %v\n%s", b.id, b.node, xerr, said)
	}
	b.delete()
	again := c.box(f.node)
	again.start()
	again.works()
	again.delete()
	c.survive(kind)
}

// measure finds what operations take.
func (c *chaos) measure() {
	c.t.Helper()
	timed := func(what string, f func()) {
		began := time.Now()
		f()
		c.took[what] = time.Since(began)
	}
	e, rt := c.engines["n2"], c.attachment("n2", "measure")
	timed("ADD", func() {
		if _, err := e.CNI.AddNetworkList(c.t.Context(), e.List, rt); err != nil {
			c.t.Fatal(err)
		}
	})
	timed("DEL", func() {
		testutil.NoError(c.t, e.CNI.DelNetworkList(c.t.Context(), e.List, rt))
	})
	c.del("n2", rt)
	b := c.box("n2")
	timed("run", func() { b.start() })
	timed("exec", b.works)
	b.delete()
	agent, _ := c.processes("n2")
	testutil.NoError(c.t, lab.KillAgent(agent, syscall.SIGKILL))
	timed("start", c.up)
	c.t.Logf("undisturbed: %v", c.took)
}

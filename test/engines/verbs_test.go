package engines

import (
	"encoding/json"
	"os/exec"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// verbsContainer is one of runc's with an RDMA device, and an endpoint made by hand.
type verbsContainer struct {
	t          *testing.T
	name, node string
	dir        string
	run        engineCLI
	addr       string
}

// endpointByHand makes an endpoint on a node, in a network namespace of its own, whose path it gives
// with the address.
func endpointByHand(t *testing.T, node, name string) (path, addr string) {
	t.Helper()
	space := engineNetwork() + "-" + name + "-" + node
	testutil.NoError(t, netns.Create(space))
	t.Cleanup(func() { testutil.NoError(t, netns.Delete(space)) })
	var e model.Endpoint
	raw := lab.Heddle(t, "endpoints", "add", name, "--netns", netns.Path(space), "--lab", lab.Name, "--node", node, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &e); err != nil {
		t.Fatalf("endpoints add: %v: %s", err, raw)
	}
	return netns.Path(space), e.Addrs[0].String()
}

// start makes the endpoint on a node, and starts the container.
func (c *verbsContainer) start(node string) {
	c.t.Helper()
	space, addr := endpointByHand(c.t, node, c.name)
	c.node, c.addr = node, addr
	c.run = runBundle(c.t, node, c.dir, c.name, space, stay, func(s *specs.Spec) {
		s.Annotations[model.AnnotationVerbs] = "true"
		s.Process.Env = []string{"PATH=/bin:/usr/bin"}
	})
}

func (c *verbsContainer) exec(argv ...string) (stdout, stderr string, err error) {
	return c.run.try(slices.Concat([]string{"exec", c.name}, argv)...)
}

// TestMigrateVerbs: a container that was stopped is at another node with its address, and so with
// its GID: peers reach its queue pairs there, from another node before and from the same one then.
func TestMigrateVerbs(t *testing.T) {
	lab.NeedPrograms(t, "runc", "runc")
	dirs := engineDirs(t, "n1", "n2")
	root := verbsRoot(t)
	moves, peer := &verbsContainer{t: t, name: "moves", dir: dirs["n1"]}, &verbsContainer{t: t, name: "peer", dir: dirs["n2"]}
	for _, c := range []*verbsContainer{moves, peer} {
		unpackArchive(t, c.dir, root)
	}
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	moves.start("n1")
	peer.start("n2")
	addr := moves.addr
	pingpong(t, addr, moves.exec, peer.exec)

	moves.run.must("delete", "-f", moves.name)
	if out, err := exec.CommandContext(t.Context(), lab.Bin, "migrate", moves.name, "--to", "n2", "--lab", lab.Name, "--node", "n1").CombinedOutput(); err != nil {
		t.Fatalf("migrate: %v\n%s", err, out)
	}
	moves.start("n2")
	if moves.addr != addr {
		t.Fatalf("address %s, was %s", moves.addr, addr)
	}
	pingpong(t, addr, moves.exec, peer.exec)
	pingpong(t, peer.addr, peer.exec, moves.exec)
	for _, c := range []*verbsContainer{moves, peer} {
		c.run.must("delete", "-f", c.name)
		lab.Heddle(t, "endpoints", "delete", c.name, "--node", c.node)
	}
	for node, was := range before {
		sameNode(t, node, was)
	}
}

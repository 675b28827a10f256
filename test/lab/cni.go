package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// Joined starts a container in a network and gives its address and a peer in it.
func (e *CNIEngine) Joined(id string) (netip.Addr, *Peer) {
	e.t.Helper()
	rt := e.Sandbox(id)
	r := e.Add(rt)
	e.Run(id, rt.NetNS)
	return AddrOf(r, 0), e.Peer(id)
}

// The tests here are container engines: they make network namespaces on a node of the lab, have
// CNI's own library run the plugins there, and start containers by heddle-runtime that name no
// endpoint.

// PluginExec runs plugins in a node's network namespace.
type PluginExec struct {
	Node string
	version.PluginDecoder
}

// FindInPath gives the plugin's program.
func (e *PluginExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// ExecPlugin runs the plugin to its end.
func (e *PluginExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "nsenter", "--net="+netns.Path(Name+"-"+e.Node), path)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, bytes.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	var said types.Error
	if json.Unmarshal(stdout.Bytes(), &said) != nil || said.Msg == "" {
		return nil, fmt.Errorf("%s: %w: %s%s", path, err, &stdout, &stderr)
	}
	return nil, &said
}

// CNIEngine is a container engine on a node of the lab.
type CNIEngine struct {
	t    *testing.T
	Node string
	CNI  *libcni.CNIConfig
	List *libcni.NetworkConfigList
	Root string // of its runtime
}

// NewCNIEngine gives an engine with one network: plugins is the list of its configuration, in which
// SOCKET is the node's API socket.
func NewCNIEngine(t *testing.T, node, network, plugins string) *CNIEngine {
	t.Helper()
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q,"plugins":[%s]}`, network, strings.ReplaceAll(plugins, "SOCKET", APISocket(node)))
	list, err := libcni.NetworkConfFromBytes([]byte(conf))
	testutil.NoError(t, err)
	path := []string{filepath.Dir(Bin), "/usr/lib/cni"}
	return &CNIEngine{t: t, Node: node, List: list, Root: t.TempDir(),
		CNI: libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), &PluginExec{Node: node})}
}

// CNIPlugin is the configuration of Heddle's plugin, for NewCNIEngine.
const CNIPlugin = `{"type":"heddle-cni","socket":"SOCKET","capabilities":{"ips":true},"labels":{"by":"cni"}}`

// Client is one of the node's agent.
func (e *CNIEngine) Client() *api.Client { return api.Dial(APISocket(e.Node)) }

// Conf is the attachment of container id. Where the network has the capability it asks for a cap of
// what it sends, 1 Gbit/s.
func (e *CNIEngine) Conf(id string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: netns.Path(Name + "-" + id), IfName: "eth0",
		CapabilityArgs: map[string]any{"bandwidth": map[string]any{"egressRate": 1000000000, "egressBurst": 4294967295}},
		Args:           [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", id}}}
}

// Sandbox makes container id's network namespace; it goes, and the attachment before, with the
// test.
func (e *CNIEngine) Sandbox(id string) *libcni.RuntimeConf {
	e.t.Helper()
	rt := e.Conf(id)
	testutil.NoError(e.t, netns.Create(filepath.Base(rt.NetNS)))
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
		defer cancel()
		if err := e.CNI.DelNetworkList(ctx, e.List, rt); err != nil {
			e.t.Errorf("delete %s at the end: %v", id, err)
		}
		if err := netns.Delete(filepath.Base(rt.NetNS)); err != nil {
			e.t.Error(err)
		}
	})
	return rt
}

// Add attaches a sandbox.
func (e *CNIEngine) Add(rt *libcni.RuntimeConf) *current.Result {
	e.t.Helper()
	r, err := e.CNI.AddNetworkList(e.t.Context(), e.List, rt)
	if err != nil {
		e.t.Fatalf("add %s: %v", rt.ContainerID, err)
	}
	result, err := current.NewResultFromResult(r)
	testutil.NoError(e.t, err)
	return result
}

// Endpoint gives the endpoint of an attachment, nil if there is none.
func (e *CNIEngine) Endpoint(rt *libcni.RuntimeConf) *model.Endpoint {
	e.t.Helper()
	list, err := e.Client().Endpoints(e.t.Context())
	testutil.NoError(e.t, err)
	i := slices.IndexFunc(list, func(p model.Endpoint) bool {
		return p.CNI != nil && p.CNI.ContainerID == rt.ContainerID && p.CNI.Network == e.List.Name
	})
	if i < 0 {
		return nil
	}
	return &list[i]
}

// Run starts a container by heddle-runtime, without a word of Heddle in its configuration. With a
// netnsPath of "" it gets a network namespace of its own.
func (e *CNIEngine) Run(id, netnsPath string, env ...string) (pid string) {
	e.t.Helper()
	bundle := e.t.TempDir()
	e.t.Cleanup(func() { _ = e.Runtime(context.Background(), "delete", "--force", id).Run() }) // it may not have started
	pid, err := e.TryRun(e.t.Context(), bundle, id, netnsPath, env...)
	testutil.NoError(e.t, err)
	return pid
}

// TryRun is run for a container that may not start, or whose runtime is killed with ctx. The caller
// deletes it.
func (e *CNIEngine) TryRun(ctx context.Context, bundle, id, netnsPath string, env ...string) (pid string, err error) {
	if err := e.writeBundle(bundle, id, netnsPath); err != nil {
		return "", err
	}
	log := filepath.Join(bundle, "output")
	out, err := os.Create(log)
	if err != nil {
		return "", err
	}
	defer out.Close()
	pidFile := filepath.Join(bundle, "pid")
	cmd := e.Runtime(ctx, "run", "--detach", "--bundle", bundle, "--pid-file", pidFile, id)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = out, out // a pipe would be the container's as well
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(log)
		return "", fmt.Errorf("run %s: %w\n%s", id, err, said)
	}
	text, err := os.ReadFile(pidFile)
	return strings.TrimSpace(string(text)), err
}

// writeBundle makes a container's configuration in a directory of its own.
func (e *CNIEngine) writeBundle(dir, id, netnsPath string) error {
	raw, err := os.ReadFile(filepath.Join("/run/heddle/lab", Name, e.Node, "c1/heddle/config.json"))
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		return err
	}
	spec.Annotations, spec.Linux.Seccomp, spec.Linux.Namespaces = nil, nil, nil
	spec.Process.Args, spec.Linux.CgroupsPath = []string{"sleep", "infinity"}, "/"+Name+"-"+id
	for _, kind := range []specs.LinuxNamespaceType{specs.MountNamespace, specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace} {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind})
	}
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: netnsPath})
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == "/dev/shm" || m.Destination == "/dev/pts" })
	if raw, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o644)
}

// Runtime gives a command of the node's heddle-runtime.
func (e *CNIEngine) Runtime(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(Bin), "heddle-runtime"), append([]string{"--root", e.Root}, args...)...)
	cmd.Env = append(os.Environ(), "HEDDLE_SECCOMP_SOCKET="+filepath.Join(filepath.Dir(APISocket(e.Node)), "seccomp.sock"))
	return cmd
}

// Peer starts a peer in a running container.
func (e *CNIEngine) Peer(id string) *Peer {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(e.t, id, e.Runtime(ctx, "exec", id, Python, "-c", peerScript), cancel)
}

// Path gives the path of the connection of an endpoint whose own port is local.
func (e *CNIEngine) Path(name string, local uint16) model.Path {
	e.t.Helper()
	found := model.PathNone
	testutil.Eventually(e.t, fmt.Sprintf("a connection of %s from port %d", name, local), func() (bool, string) {
		list, err := e.Client().Connections(e.t.Context(), api.ConnectionFilter{Endpoint: name})
		testutil.NoError(e.t, err)
		for _, c := range list {
			if c.Local.Port() == local {
				found = c.Path
				return true, ""
			}
		}
		return false, fmt.Sprintf("%+v", list)
	})
	return found
}

// ConnectPeers opens a connection from client to server at target and sends something through it;
// it gives the client's port.
func ConnectPeers(t *testing.T, client, server *Peer, target netip.Addr) uint16 {
	t.Helper()
	family, wildcard := 4, "0.0.0.0"
	if target.Is6() {
		family, wildcard = 6, "::"
	}
	port := FreePort()
	server.Must(`l = listen(%d, %q, %d)`, family, wildcard, port)
	client.Must(`s = connect(%d, %q, %d)`, family, target, port)
	server.Must(`c, who = l.accept()`)
	client.Must(`send(s, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	return client.PortOf("s")
}

// AddrOf gives address i of a result.
func AddrOf(r *current.Result, i int) netip.Addr {
	a, _ := netip.AddrFromSlice(r.IPs[i].Address.IP)
	return a.Unmap()
}

// MigrateTo gives an attachment whose container has ended to another node.
func (e *CNIEngine) MigrateTo(rt *libcni.RuntimeConf, to string) {
	e.t.Helper()
	said := Heddle(e.t, "migrate", e.nameOf(rt), "--to", to, "--node", e.Node)
	if !strings.Contains(said, "waits on node "+to) {
		e.t.Fatalf("migrate: %s", said)
	}
}

func (e *CNIEngine) nameOf(rt *libcni.RuntimeConf) string {
	return e.List.Name + "/" + rt.ContainerID + "/" + rt.IfName
}

// AwaitMove waits until a node knows where addr has moved to; "" is home.
func AwaitMove(t *testing.T, node string, addr netip.Addr, to string) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("%s to know that %s is on %q", node, addr, to), func() (bool, string) {
		got := ""
		for _, m := range MovesOf(t, node) {
			if m.Addr == addr {
				got = m.Node
			}
		}
		return got == to, got
	})
}

// GiveBack takes a move that waits away: its address goes home.
func (e *CNIEngine) GiveBack(rt *libcni.RuntimeConf, addr netip.Addr, from string) {
	e.t.Helper()
	testutil.Eventually(e.t, from+" to give the address back", func() (bool, string) { // it may have yet to hear of it
		Heddle(e.t, "endpoints", "delete", "--ignore-missing", e.nameOf(rt), "--node", from)
		left := MovesOf(e.t, from)
		for _, m := range left {
			if m.Addr == addr {
				return false, fmt.Sprint(left)
			}
		}
		return true, ""
	})
}

// Ended ends a container that run started.
func (e *CNIEngine) Ended(id string) {
	e.t.Helper()
	if out, err := e.Runtime(e.t.Context(), "delete", "--force", id).CombinedOutput(); err != nil {
		e.t.Fatalf("delete %s: %v\n%s", id, err, out)
	}
}

// MovesOf lists the addresses that a node knows to have moved.
func MovesOf(t *testing.T, node string) (moves []api.Move) {
	t.Helper()
	Query(t, &moves, "migrate", "--node", node)
	return moves
}

package test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
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
)

// The tests here are container engines: they make network namespaces on a node of the lab, have CNI's own library run the
// plugins there, and start containers by heddle-runtime that name no endpoint.

// pluginExec runs plugins in a node's network namespace.
type pluginExec struct {
	node string
	version.PluginDecoder
}

func (e *pluginExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func (e *pluginExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "nsenter", "--net="+netns.Path(labName+"-"+e.node), path)
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

// engine is a container engine on a node of the lab.
type engine struct {
	t    *testing.T
	node string
	cni  *libcni.CNIConfig
	list *libcni.NetworkConfigList
	root string // of its runtime
}

func apiSocket(node string) string { return "/run/heddle/lab/" + labName + "/" + node + "/api.sock" }

// newEngine gives an engine with one network: plugins is the list of its configuration, in which SOCKET is the node's API
// socket.
func newEngine(t *testing.T, node, network, plugins string) *engine {
	t.Helper()
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q,"plugins":[%s]}`, network, strings.ReplaceAll(plugins, "SOCKET", apiSocket(node)))
	list, err := libcni.NetworkConfFromBytes([]byte(conf))
	if err != nil {
		t.Fatal(err)
	}
	path := []string{filepath.Dir(heddleBin), "/usr/lib/cni"}
	return &engine{t: t, node: node, list: list, root: t.TempDir(),
		cni: libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), &pluginExec{node: node})}
}

const mainPlugin = `{"type":"heddle-cni","socket":"SOCKET","capabilities":{"ips":true},"labels":{"by":"cni"}}`

func (e *engine) client() *api.Client { return api.Dial(apiSocket(e.node)) }

// conf is the attachment of container id.
func (e *engine) conf(id string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: netns.Path(labName + "-" + id), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", id}}}
}

// sandbox makes container id's network namespace; it goes, and the attachment before, with the test.
func (e *engine) sandbox(id string) *libcni.RuntimeConf {
	e.t.Helper()
	rt := e.conf(id)
	if err := netns.Create(filepath.Base(rt.NetNS)); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := e.cni.DelNetworkList(ctx, e.list, rt); err != nil {
			e.t.Errorf("delete %s at the end: %v", id, err)
		}
		if err := netns.Delete(filepath.Base(rt.NetNS)); err != nil {
			e.t.Error(err)
		}
	})
	return rt
}

// add attaches a sandbox.
func (e *engine) add(rt *libcni.RuntimeConf) *current.Result {
	e.t.Helper()
	r, err := e.cni.AddNetworkList(e.t.Context(), e.list, rt)
	if err != nil {
		e.t.Fatalf("add %s: %v", rt.ContainerID, err)
	}
	result, err := current.NewResultFromResult(r)
	if err != nil {
		e.t.Fatal(err)
	}
	return result
}

// endpoint gives the endpoint of an attachment, nil if there is none.
func (e *engine) endpoint(rt *libcni.RuntimeConf) *model.Endpoint {
	e.t.Helper()
	list, err := e.client().Endpoints(e.t.Context())
	if err != nil {
		e.t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(p model.Endpoint) bool {
		return p.CNI != nil && p.CNI.ContainerID == rt.ContainerID && p.CNI.Network == e.list.Name
	})
	if i < 0 {
		return nil
	}
	return &list[i]
}

// wantCode checks that err is CNI's with this code, and says text.
func wantCode(t *testing.T, err error, code uint, text string) {
	t.Helper()
	var said *types.Error
	if !errors.As(err, &said) || said.Code != code || !strings.Contains(said.Error(), text) {
		t.Errorf("error %v, want code %d and %q", err, code, text)
	}
}

// run starts a container by heddle-runtime, without a word of Heddle in its configuration. With a netnsPath of "" it gets a
// network namespace of its own.
func (e *engine) run(id, netnsPath string, env ...string) (pid string) {
	e.t.Helper()
	bundle := e.t.TempDir()
	e.t.Cleanup(func() { _ = e.runtime(context.Background(), "delete", "--force", id).Run() }) // it may not have started
	pid, err := e.tryRun(e.t.Context(), bundle, id, netnsPath, env...)
	if err != nil {
		e.t.Fatal(err)
	}
	return pid
}

// tryRun is run for a container that may not start, or whose runtime is killed with ctx. The caller deletes it.
func (e *engine) tryRun(ctx context.Context, bundle, id, netnsPath string, env ...string) (pid string, err error) {
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
	cmd := e.runtime(ctx, "run", "--detach", "--bundle", bundle, "--pid-file", pidFile, id)
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
func (e *engine) writeBundle(dir, id, netnsPath string) error {
	raw, err := os.ReadFile(filepath.Join("/run/heddle/lab", labName, e.node, "c1/heddle/config.json"))
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		return err
	}
	spec.Annotations, spec.Linux.Seccomp, spec.Linux.Namespaces = nil, nil, nil
	spec.Process.Args, spec.Linux.CgroupsPath = []string{"sleep", "infinity"}, "/"+labName+"-"+id
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

// runtime gives a command of the node's heddle-runtime.
func (e *engine) runtime(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(heddleBin), "heddle-runtime"), append([]string{"--root", e.root}, args...)...)
	cmd.Env = append(os.Environ(), "HEDDLE_SECCOMP_SOCKET="+filepath.Join(filepath.Dir(apiSocket(e.node)), "seccomp.sock"))
	return cmd
}

// peer starts a peer in a running container.
func (e *engine) peer(id string) *peer {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(e.t, id, e.runtime(ctx, "exec", id, python, "-c", peerScript), cancel)
}

// path gives the path of the connection of an endpoint whose own port is local.
func (e *engine) path(name string, local uint16) model.Path {
	e.t.Helper()
	var found model.Path
	eventually(e.t, fmt.Sprintf("a connection of %s from port %d", name, local), func() (bool, string) {
		list, err := e.client().Connections(e.t.Context(), api.ConnectionFilter{Endpoint: name})
		if err != nil {
			e.t.Fatal(err)
		}
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

// connectPeers opens a connection from client to server at target and sends something through it; it gives the client's
// port.
func connectPeers(t *testing.T, client, server *peer, target netip.Addr) uint16 {
	t.Helper()
	family, wildcard := 4, "0.0.0.0"
	if target.Is6() {
		family, wildcard = 6, "::"
	}
	port := freePort()
	server.must(`l = listen(%d, %q, %d)`, family, wildcard, port)
	client.must(`s = connect(%d, %q, %d)`, family, target, port)
	server.must(`c, who = l.accept()`)
	client.must(`send(s, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	return client.portOf("s")
}

// TestCNI: two engines, each with a container that was attached by CNI alone; what they are told is what is there, and
// their connections are direct.
func TestCNI(t *testing.T) {
	a, b := newEngine(t, "n1", "heddle", mainPlugin), newEngine(t, "n2", "heddle", mainPlugin)
	one, two := a.sandbox("cni-one"), b.sandbox("cni-two")
	want := netip.MustParseAddr(address(t, "overlay", "n1/c1"))
	for want = want.Next(); want.As4()[3] < 200; {
		want = want.Next() // one that nobody was given
	}
	one.CapabilityArgs = map[string]any{"ips": []string{want.String() + "/24"}}
	result, other := a.add(one), b.add(two)
	checkResult(t, a, one, result)
	if got := addrOf(result, 0); got != want {
		t.Errorf("address %s, want %s as asked for", got, want)
	}
	// An engine that was killed before it noted the result.
	if again := a.add(one); addrOf(again, 0) != addrOf(result, 0) || addrOf(again, 1) != addrOf(result, 1) {
		t.Errorf("second ADD: %v, first %v", again.IPs, result.IPs)
	}
	e := a.endpoint(one)
	if e == nil || e.Labels["io.heddle.namespace"] != "shop" || e.Labels["io.heddle.pod"] != "cni-one" || e.Labels["by"] != "cni" {
		t.Fatalf("endpoint %+v", e)
	}
	if err := a.cni.CheckNetworkList(t.Context(), a.list, one); err != nil {
		t.Errorf("check: %v", err)
	}
	if err := a.cni.GetStatusNetworkList(t.Context(), a.list); err != nil {
		t.Errorf("status: %v", err)
	}
	a.run("cni-one", one.NetNS)
	b.run("cni-two", two.NetNS)
	client, server := a.peer("cni-one"), b.peer("cni-two")
	before := counters(t, "n2")["accept_direct"]
	for i := range other.IPs {
		port := connectPeers(t, client, server, addrOf(other, i))
		if path := a.path(e.Name, port); path != model.PathDirect {
			t.Errorf("to %s: path %s, want direct", addrOf(other, i), path)
		}
	}
	if got := counters(t, "n2")["accept_direct"] - before; got < uint64(len(other.IPs)) {
		t.Errorf("%d direct connections counted, want %d", got, len(other.IPs))
	}
	// The lab's own containers are of the same overlay.
	plain := startPeer(t, "overlay", "n2/c1")
	connectPeers(t, plain, client, addrOf(result, 0))

	if out, err := exec.Command("nsenter", "--net="+one.NetNS, "ip", "addr", "flush", "dev", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err := a.cni.CheckNetworkList(t.Context(), a.list, one)
	wantCode(t, err, 103, "lacks address")
}

func addrOf(r *current.Result, i int) netip.Addr {
	a, _ := netip.AddrFromSlice(r.IPs[i].Address.IP)
	return a.Unmap()
}

// checkResult compares a result with the sandbox.
func checkResult(t *testing.T, e *engine, rt *libcni.RuntimeConf, r *current.Result) {
	t.Helper()
	if len(r.Interfaces) != 2 || r.Interfaces[1].Name != "eth0" || r.Interfaces[1].Sandbox != rt.NetNS || r.Interfaces[0].Sandbox != "" {
		t.Fatalf("interfaces %v", r.Interfaces)
	}
	if len(r.IPs) != 2 || len(r.Routes) != 4 {
		t.Fatalf("addresses %v, routes %v: want both families'", r.IPs, r.Routes)
	}
	show := func(ns string, argv ...string) string {
		out, err := exec.Command("nsenter", append([]string{"--net=" + ns, "ip"}, argv...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %v: %v: %s", argv, err, out)
		}
		return string(out)
	}
	inside := show(rt.NetNS, "addr", "show", "dev", "eth0")
	for _, want := range []string{r.Interfaces[1].Mac, r.IPs[0].Address.String(), r.IPs[1].Address.String(), fmt.Sprintf("mtu %d", r.Interfaces[1].Mtu)} {
		if !strings.Contains(inside, want) {
			t.Errorf("eth0 lacks %s:\n%s", want, inside)
		}
	}
	if link := show(netns.Path(labName+"-"+e.node), "link", "show", "dev", r.Interfaces[0].Name); !strings.Contains(link, r.Interfaces[0].Mac) {
		t.Errorf("node's device: %s, want %s", link, r.Interfaces[0].Mac)
	}
	routes := show(rt.NetNS, "route") + show(rt.NetNS, "-6", "route")
	for _, ip := range r.IPs {
		if !strings.Contains(routes, "default via "+ip.Gateway.String()) {
			t.Errorf("no default route via %s:\n%s", ip.Gateway, routes)
		}
	}
}

// TestCNIDelete: DEL succeeds whatever is there, also while no agent runs; then the next agent deletes.
func TestCNIDelete(t *testing.T) {
	e := newEngine(t, "n1", "heddle", mainPlugin)
	del := func(what string, rt *libcni.RuntimeConf) {
		t.Helper()
		if err := e.cni.DelNetworkList(t.Context(), e.list, rt); err != nil {
			t.Errorf("delete %s: %v", what, err)
		}
	}
	del("what never was", e.conf("cni-never"))
	rt := e.sandbox("cni-del")
	e.add(rt)
	del("an attachment", rt)
	del("it again", rt)
	if e.endpoint(rt) != nil {
		t.Error("its endpoint is there")
	}
	e.add(rt) // the name is free again
	if err := netns.Delete(filepath.Base(rt.NetNS)); err != nil {
		t.Fatal(err)
	}
	gone := *rt
	gone.NetNS = ""
	del("an attachment without its namespace", &gone)
	if e.endpoint(rt) != nil {
		t.Error("the endpoint without namespace is there")
	}

	rt = e.sandbox("cni-away")
	e.add(rt)
	kept := e.sandbox("cni-kept")
	e.add(kept)
	// What the conflict says, before the agent goes: a namespace has one endpoint.
	twice := e.conf("cni-twice")
	twice.NetNS = kept.NetNS
	_, err := e.cni.AddNetworkList(t.Context(), e.list, twice)
	wantCode(t, err, 102, "cni-kept")
	endAgent(t, "n1", syscall.SIGTERM)
	_, err = e.cni.AddNetworkList(t.Context(), e.list, e.sandbox("cni-late"))
	wantCode(t, err, types.ErrTryAgainLater, "start heddled")
	wantCode(t, e.cni.GetStatusNetworkList(t.Context(), e.list), types.ErrLimitedConnectivity, "does not run")
	del("an attachment without an agent", rt)
	del("it again", rt)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if e.endpoint(rt) != nil {
		t.Error("the endpoint that was deleted without an agent is there")
	}
	if e.endpoint(kept) == nil {
		t.Error("another endpoint went with it")
	}
	if left, err := filepath.Glob(filepath.Dir(apiSocket("n1")) + "/deleted/*"); err != nil || len(left) > 0 {
		t.Errorf("deletions left: %v %v", left, err)
	}
	e.add(rt)
	if e.endpoint(rt) == nil {
		t.Error("no endpoint after another ADD")
	}
}

// TestCNIWithoutStore: ADD while the store is away fails, and works when it is back, with the same name.
func TestCNIWithoutStore(t *testing.T) {
	e := newEngine(t, "n2", "heddle", mainPlugin)
	rt := e.sandbox("cni-storeless")
	endAgent(t, "n1", syscall.SIGKILL)
	_, err := e.cni.AddNetworkList(t.Context(), e.list, rt)
	wantCode(t, err, types.ErrTryAgainLater, "etcd")
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	e.add(rt)
	if e.endpoint(rt) == nil {
		t.Error("no endpoint")
	}
}

// TestCNIGC: GC removes the attachments of its network that are not valid any more, and nothing else.
func TestCNIGC(t *testing.T) {
	e, other := newEngine(t, "n1", "heddle", mainPlugin), newEngine(t, "n1", "other", mainPlugin)
	stale, valid, foreign := e.sandbox("cni-stale"), e.sandbox("cni-valid"), other.sandbox("cni-foreign")
	e.add(stale)
	e.add(valid)
	other.add(foreign)
	heddle(t, "endpoints", "add", "heddle/x/eth0", "--netns", e.sandbox("cni-hand").NetNS, "--lab", labName, "--node", "n1")
	t.Cleanup(func() {
		if out, err := exec.Command(heddleBin, "endpoints", "delete", "heddle/x/eth0", "--lab", labName, "--node", "n1").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	// A cache of its own, so that the library has no DEL to do first.
	e.cni = libcni.NewCNIConfigWithCacheDir(e.cni.Path, t.TempDir(), &pluginExec{node: e.node})
	keep := []types.GCAttachment{{ContainerID: valid.ContainerID, IfName: valid.IfName}}
	if err := e.cni.GCNetworkList(t.Context(), e.list, &libcni.GCArgs{ValidAttachments: keep}); err != nil {
		t.Fatal(err)
	}
	if e.endpoint(stale) != nil {
		t.Error("a stale endpoint is there")
	}
	if e.endpoint(valid) == nil || other.endpoint(foreign) == nil {
		t.Error("GC removed a valid endpoint, or one of another network")
	}
	if out := heddle(t, "endpoints", "--lab", labName, "--node", "n1"); !strings.Contains(out, "heddle/x/eth0") {
		t.Errorf("GC removed an endpoint that no CNI runtime made:\n%s", out)
	}
}

// TestCNIMany: a hundred attachments at once, and their deletion.
func TestCNIMany(t *testing.T) {
	const n = 100
	e := newEngine(t, "n1", "heddle", mainPlugin)
	var all []*libcni.RuntimeConf
	for i := range n {
		rt := e.conf(fmt.Sprintf("cni-many%d", i))
		if err := netns.Create(filepath.Base(rt.NetNS)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netns.Delete(filepath.Base(rt.NetNS)) })
		all = append(all, rt)
	}
	t.Cleanup(func() { // of a test that failed
		list, _ := e.client().Endpoints(context.Background())
		for _, p := range list {
			if p.CNI != nil && p.CNI.Network == e.list.Name {
				_ = e.client().DeleteEndpoint(context.Background(), p.Name)
			}
		}
	})
	each := func(f func(*libcni.RuntimeConf) error) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make(chan error, n)
		for _, rt := range all {
			wg.Go(func() { errs <- f(rt) })
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			if err != nil {
				t.Error(err)
			}
		}
	}
	var mu sync.Mutex
	owner := map[string]string{}
	each(func(rt *libcni.RuntimeConf) error {
		r, err := e.cni.AddNetworkList(t.Context(), e.list, rt)
		if err != nil {
			return fmt.Errorf("add %s: %w", rt.ContainerID, err)
		}
		result, err := current.NewResultFromResult(r)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		for i := range result.IPs {
			if other := owner[addrOf(result, i).String()]; other != "" {
				return fmt.Errorf("%s and %s have the address %s", other, rt.ContainerID, addrOf(result, i))
			}
			owner[addrOf(result, i).String()] = rt.ContainerID
		}
		return nil
	})
	list, err := e.client().Endpoints(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	count := func(list []model.Endpoint) (n int) {
		for _, p := range list {
			if p.CNI != nil {
				n++
			}
		}
		return n
	}
	if got := count(list); got != n || len(owner) != 2*n {
		t.Errorf("%d endpoints with %d addresses, want %d with %d", got, len(owner), n, 2*n)
	}
	each(func(rt *libcni.RuntimeConf) error { return e.cni.DelNetworkList(t.Context(), e.list, rt) })
	if list, err = e.client().Endpoints(t.Context()); err != nil || count(list) != 0 {
		t.Errorf("%d endpoints left, %v", count(list), err)
	}
}

// TestCNILate: an engine that attaches the container after the runtime has made it, and a container whose endpoint goes
// and comes back.
func TestCNILate(t *testing.T) {
	e, far := newEngine(t, "n1", "heddle", mainPlugin), startPeer(t, "heddle", "n2/c1")
	pid := e.run("cni-late", "", "HEDDLE_INTERCEPT=all")
	rt := e.conf("cni-late")
	rt.NetNS = "/proc/" + pid + "/ns/net"
	t.Cleanup(func() { _ = e.cni.DelNetworkList(context.Background(), e.list, rt) })
	early := e.peer("cni-late")
	early.must(`tcp().close()`) // of its own stack: there is no endpoint yet
	for range 2 {
		e.add(rt)
		port := connectPeers(t, early, far, netip.MustParseAddr(address(t, "overlay", "n2/c1")))
		if path := e.path(e.endpoint(rt).Name, port); path != model.PathDirect {
			t.Errorf("path %s, want direct", path)
		}
		early.must(`s.close()`)
		if err := e.cni.DelNetworkList(t.Context(), e.list, rt); err != nil {
			t.Fatal(err)
		}
		early.expect(`"ENETDOWN"`, `error_of(tcp)`)
	}
}

package engines

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// wantCode checks that err is CNI's with this code, and says text.
func wantCode(t *testing.T, err error, code uint, text string) {
	t.Helper()
	var said *types.Error
	if !errors.As(err, &said) || said.Code != code || !strings.Contains(said.Error(), text) {
		t.Errorf("error %v, want code %d and %q", err, code, text)
	}
}

// TestCNI: two engines, each with a container that was attached by CNI alone; what they are told is
// what is there, and their connections are direct.
func TestCNI(t *testing.T) {
	a, b := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), lab.NewCNIEngine(t, "n2", "heddle", lab.CNIPlugin)
	one, two := a.Sandbox("cni-one"), b.Sandbox("cni-two")
	want := netip.MustParseAddr(lab.Address(t, "overlay", "n1/c1"))
	for want = want.Next(); want.As4()[3] < 200; {
		want = want.Next() // one that nobody was given
	}
	one.CapabilityArgs = map[string]any{"ips": []string{want.String() + "/24"}}
	result, other := a.Add(one), b.Add(two)
	checkResult(t, a, one, result)
	if got := lab.AddrOf(result, 0); got != want {
		t.Errorf("address %s, want %s as asked for", got, want)
	}
	// An engine that was killed before it noted the result.
	if again := a.Add(one); lab.AddrOf(again, 0) != lab.AddrOf(result, 0) || lab.AddrOf(again, 1) != lab.AddrOf(result, 1) {
		t.Errorf("second ADD: %v, first %v", again.IPs, result.IPs)
	}
	e := a.Endpoint(one)
	if e == nil || e.Labels["io.heddle.namespace"] != "shop" || e.Labels["io.heddle.pod"] != "cni-one" || e.Labels["by"] != "cni" {
		t.Fatalf("endpoint %+v", e)
	}
	if err := a.CNI.CheckNetworkList(t.Context(), a.List, one); err != nil {
		t.Errorf("check: %v", err)
	}
	if err := a.CNI.GetStatusNetworkList(t.Context(), a.List); err != nil {
		t.Errorf("status: %v", err)
	}
	a.Run("cni-one", one.NetNS)
	b.Run("cni-two", two.NetNS)
	client, server := a.Peer("cni-one"), b.Peer("cni-two")
	before := lab.Counters(t, "n2")["accept_direct"]
	for i := range other.IPs {
		port := lab.ConnectPeers(t, client, server, lab.AddrOf(other, i))
		if path := a.Path(e.Name, port); path != names.PathDirect {
			t.Errorf("to %s: path %s, want direct", lab.AddrOf(other, i), path)
		}
	}
	if got := lab.Counters(t, "n2")["accept_direct"] - before; got < uint64(len(other.IPs)) {
		t.Errorf("%d direct connections counted, want %d", got, len(other.IPs))
	}
	// The lab's own containers are of the same overlay.
	plain := lab.StartPeer(t, "overlay", "n2/c1")
	lab.ConnectPeers(t, plain, client, lab.AddrOf(result, 0))

	if out, err := exec.Command("nsenter", "--net="+one.NetNS, "ip", "addr", "flush", "dev", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err := a.CNI.CheckNetworkList(t.Context(), a.List, one)
	wantCode(t, err, 103, "lacks address")
}

// checkResult compares a result with the sandbox.
func checkResult(t *testing.T, e *lab.CNIEngine, rt *libcni.RuntimeConf, r *current.Result) {
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
	if link := show(netns.Path(lab.Name+"-"+e.Node), "link", "show", "dev", r.Interfaces[0].Name); !strings.Contains(link, r.Interfaces[0].Mac) {
		t.Errorf("node's device: %s, want %s", link, r.Interfaces[0].Mac)
	}
	routes := show(rt.NetNS, "route") + show(rt.NetNS, "-6", "route")
	for _, ip := range r.IPs {
		if !strings.Contains(routes, "default via "+ip.Gateway.String()) {
			t.Errorf("no default route via %s:\n%s", ip.Gateway, routes)
		}
	}
}

// TestCNIPorts: the capability portMappings, which is what Podman's -p and Kubernetes' hostPort come
// to, publishes ports of the node.
func TestCNIPorts(t *testing.T) {
	e := lab.NewCNIEngine(t, "n1", "heddle", `{"type":"heddle-cni","socket":"SOCKET","capabilities":{"portMappings":true}}`)
	port, inside := lab.FreePort(), lab.FreePort()
	mapping := func(to int, protocol string) map[string]any {
		return map[string]any{"portMappings": []map[string]any{{"hostPort": port, "containerPort": to, "protocol": protocol}}}
	}
	rt := e.Sandbox("cni-ports")
	rt.CapabilityArgs = mapping(inside, "tcp")
	e.Add(rt)
	e.Add(rt) // repeated
	e.Run("cni-ports", rt.NetNS)
	e.Peer("cni-ports").Must(`l = listen(4, "0.0.0.0", %d)`, inside)
	for _, client := range []*lab.Peer{lab.StartOutside(t), lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "heddle", "n2/c1")} {
		client.Must(`connect(4, %q, %d).close()`, lab.Address(t, "host", "n1/c1"), port)
	}
	other := e.Sandbox("cni-ports-too")
	for _, c := range []struct {
		to       int
		protocol string
		code     uint
		text     string
	}{{inside, "tcp", 102, "leads to heddle/cni-ports/eth0"}, {inside, "sctp", types.ErrUnsupportedField, "portMappings"}, {0, "tcp", types.ErrInvalidNetworkConfig, "port: want 1..65535"}} {
		other.CapabilityArgs = mapping(c.to, c.protocol)
		_, err := e.CNI.AddNetworkList(t.Context(), e.List, other)
		wantCode(t, err, c.code, c.text)
		if e.Endpoint(other) != nil {
			t.Errorf("refused with %q, and there is an endpoint", c.text)
		}
	}
	testutil.NoError(t, e.CNI.DelNetworkList(t.Context(), e.List, rt))
	if ports := portsOn(t, "n1"); len(ports) > 0 {
		t.Errorf("after DEL: %v", ports)
	}
}

// TestCNIDelete: DEL succeeds whatever is there, also while no agent runs; then the next agent
// deletes.
func TestCNIDelete(t *testing.T) {
	e := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin)
	del := func(what string, rt *libcni.RuntimeConf) {
		t.Helper()
		if err := e.CNI.DelNetworkList(t.Context(), e.List, rt); err != nil {
			t.Errorf("delete %s: %v", what, err)
		}
	}
	del("what never was", e.Conf("cni-never"))
	rt := e.Sandbox("cni-del")
	e.Add(rt)
	del("an attachment", rt)
	del("it again", rt)
	if e.Endpoint(rt) != nil {
		t.Error("its endpoint is there")
	}
	e.Add(rt) // the name is free again
	testutil.NoError(t, netns.Delete(filepath.Base(rt.NetNS)))
	gone := *rt
	gone.NetNS = ""
	del("an attachment without its namespace", &gone)
	if e.Endpoint(rt) != nil {
		t.Error("the endpoint without namespace is there")
	}

	rt = e.Sandbox("cni-away")
	e.Add(rt)
	kept := e.Sandbox("cni-kept")
	e.Add(kept)
	// What the conflict says, before the agent goes: a namespace has one endpoint.
	twice := e.Conf("cni-twice")
	twice.NetNS = kept.NetNS
	_, err := e.CNI.AddNetworkList(t.Context(), e.List, twice)
	wantCode(t, err, 102, "cni-kept")
	lab.EndAgent(t, "n1", syscall.SIGTERM)
	_, err = e.CNI.AddNetworkList(t.Context(), e.List, e.Sandbox("cni-late"))
	wantCode(t, err, types.ErrTryAgainLater, "start heddled")
	wantCode(t, e.CNI.GetStatusNetworkList(t.Context(), e.List), types.ErrLimitedConnectivity, "does not run")
	del("an attachment without an agent", rt)
	del("it again", rt)
	testutil.NoError(t, lab.Command("up"))
	if e.Endpoint(rt) != nil {
		t.Error("the endpoint that was deleted without an agent is there")
	}
	if e.Endpoint(kept) == nil {
		t.Error("another endpoint went with it")
	}
	if left, err := filepath.Glob(filepath.Dir(lab.APISocket("n1")) + "/deleted/*"); err != nil || len(left) > 0 {
		t.Errorf("deletions left: %v %v", left, err)
	}
	e.Add(rt)
	if e.Endpoint(rt) == nil {
		t.Error("no endpoint after another ADD")
	}
}

// TestCNIWithoutStore: ADD while the store is away fails, and works when it is back, with the same
// name. DEL succeeds, and the store is told when it is back.
func TestCNIWithoutStore(t *testing.T) {
	e := lab.NewCNIEngine(t, "n2", "heddle", lab.CNIPlugin)
	rt, ends := e.Sandbox("cni-storeless"), e.Sandbox("cni-storeless-ends")
	e.Add(ends)
	lab.EndAgent(t, "n1", syscall.SIGKILL)
	_, err := e.CNI.AddNetworkList(t.Context(), e.List, rt)
	wantCode(t, err, types.ErrTryAgainLater, "etcd")
	testutil.NoError(t, e.CNI.DelNetworkList(t.Context(), e.List, ends))
	if e.Endpoint(ends) != nil {
		t.Error("an endpoint that was deleted is there")
	}
	testutil.NoError(t, lab.Command("up"))
	testutil.Eventually(t, "the store to be told", func() (bool, string) {
		left, err := filepath.Glob(filepath.Dir(lab.APISocket("n2")) + "/deleted/*")
		return err == nil && len(left) == 0, fmt.Sprint(left, err)
	})
	e.Add(rt)
	if e.Endpoint(rt) == nil {
		t.Error("no endpoint")
	}
}

// TestCNIGC: GC removes the attachments of its network that are not valid any more, and nothing
// else.
func TestCNIGC(t *testing.T) {
	e, other := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), lab.NewCNIEngine(t, "n1", "other", lab.CNIPlugin)
	stale, valid, foreign := e.Sandbox("cni-stale"), e.Sandbox("cni-valid"), other.Sandbox("cni-foreign")
	e.Add(stale)
	e.Add(valid)
	other.Add(foreign)
	lab.Heddle(t, "endpoints", "add", "heddle/x/eth0", "--netns", e.Sandbox("cni-hand").NetNS, "--node", "n1")
	t.Cleanup(func() {
		if out, err := exec.Command(lab.Bin, "endpoints", "delete", "heddle/x/eth0", "--lab", lab.Name, "--node", "n1").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	// A cache of its own, so that the library has no DEL to do first.
	e.CNI = libcni.NewCNIConfigWithCacheDir(e.CNI.Path, t.TempDir(), &lab.PluginExec{Node: e.Node})
	keep := []types.GCAttachment{{ContainerID: valid.ContainerID, IfName: valid.IfName}}
	testutil.NoError(t, e.CNI.GCNetworkList(t.Context(), e.List, &libcni.GCArgs{ValidAttachments: keep}))
	if e.Endpoint(stale) != nil {
		t.Error("a stale endpoint is there")
	}
	if e.Endpoint(valid) == nil || other.Endpoint(foreign) == nil {
		t.Error("GC removed a valid endpoint, or one of another network")
	}
	if out := lab.Heddle(t, "endpoints", "--node", "n1"); !strings.Contains(out, "heddle/x/eth0") {
		t.Errorf("GC removed an endpoint that no CNI runtime made:\n%s", out)
	}
}

// TestCNIMany: a hundred attachments at once, and their deletion.
func TestCNIMany(t *testing.T) {
	const n = 100
	e := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin)
	var all []*libcni.RuntimeConf
	for i := range n {
		rt := e.Conf(fmt.Sprintf("cni-many%d", i))
		testutil.NoError(t, netns.Create(filepath.Base(rt.NetNS)))
		t.Cleanup(func() { _ = netns.Delete(filepath.Base(rt.NetNS)) })
		all = append(all, rt)
	}
	t.Cleanup(func() { // of a test that failed
		list, _ := e.Client().Endpoints(context.Background())
		for _, p := range list {
			if p.CNI != nil && p.CNI.Network == e.List.Name {
				_ = e.Client().DeleteEndpoint(context.Background(), p.Name)
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
		r, err := e.CNI.AddNetworkList(t.Context(), e.List, rt)
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
			if other := owner[lab.AddrOf(result, i).String()]; other != "" {
				return fmt.Errorf("%s and %s have the address %s", other, rt.ContainerID, lab.AddrOf(result, i))
			}
			owner[lab.AddrOf(result, i).String()] = rt.ContainerID
		}
		return nil
	})
	list, err := e.Client().Endpoints(t.Context())
	testutil.NoError(t, err)
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
	each(func(rt *libcni.RuntimeConf) error { return e.CNI.DelNetworkList(t.Context(), e.List, rt) })
	if list, err = e.Client().Endpoints(t.Context()); err != nil || count(list) != 0 {
		t.Errorf("%d endpoints left, %v", count(list), err)
	}
}

// TestCNILate: an engine that attaches the container after the runtime has made it, and a container
// whose endpoint goes and comes back.
func TestCNILate(t *testing.T) {
	e, far := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), lab.StartPeer(t, "heddle", "n2/c1")
	pid := e.Run("cni-late", "", "HEDDLE_INTERCEPT=all")
	rt := e.Conf("cni-late")
	rt.NetNS = "/proc/" + pid + "/ns/net"
	t.Cleanup(func() { _ = e.CNI.DelNetworkList(context.Background(), e.List, rt) })
	early := e.Peer("cni-late")
	early.Must(`tcp().close()`) // of its own stack: there is no endpoint yet
	for range 2 {
		e.Add(rt)
		port := lab.ConnectPeers(t, early, far, netip.MustParseAddr(lab.Address(t, "overlay", "n2/c1")))
		if path := e.Path(e.Endpoint(rt).Name, port); path != names.PathDirect {
			t.Errorf("path %s, want direct", path)
		}
		early.Must(`s.close()`)
		testutil.NoError(t, e.CNI.DelNetworkList(t.Context(), e.List, rt))
		early.Expect(`"ENETDOWN"`, `error_of(tcp)`)
	}
}

package attack

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/peerapi"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trust"
	"heddle.dev/heddle/test/lab"
)

const storePort = 2379

func init() {
	attacks = append(attacks,
		attack{"connect to the store", model.ProtectStore, "n1", connectToStore("heddle")},
		attack{"connect to the store from the container's own stack", model.ProtectStore, "n1", connectToStore("overlay")},
		attack{"ask the store without a certificate", model.ProtectStoreCertificates, "n1", askStore},
		attack{"ask an agent without the key of a node", model.ProtectPeerKeys, "n1", askAgent},
	)
}

// askAgent asks n1's agent for its connections from the other node, as no agent of the network.
func askAgent(t *testing.T) string {
	at := fmt.Sprintf("https://%s:%d/v1/connections", lab.Address(t, "host", "n1/c1"), peerapi.DefaultPort)
	if got, err := lab.TryInNode(t, "n2", "curl", "--insecure", "--silent", "--show-error", "--max-time", "60", at); err == nil {
		return got
	} else if !strings.Contains(got+err.Error(), "certificate") {
		t.Errorf("neither answered nor asked for a certificate: %v: %s", err, got)
	}
	return ""
}

// connectToStore connects to the nodes' store from a container.
func connectToStore(mode string) func(*testing.T) string {
	return func(t *testing.T) string {
		p := lab.StartPeer(t, mode, "n1/c1")
		return gained(t, "connect to the store", p.Do(`error_of(tcp(4).connect, (%q, %d))`, lab.Address(t, "host", "n1/c1"), storePort), `"ECONNREFUSED"`, `"ok"`)
	}
}

// askStore asks the store for its version from the other node, without the network's certificate.
func askStore(t *testing.T) string {
	at := "https://" + lab.Address(t, "host", "n1/c1") + ":2379/version"
	if got := getStore(t, at, &tls.Config{InsecureSkipVerify: true}); !strings.Contains(got, "certificate required") {
		return got
	}
	return ""
}

// TestStoreIsNotForContainers: no container of any node, intercepted or not, reaches the nodes'
// store, whatever address family its socket has; the nodes do.
func TestStoreIsNotForContainers(t *testing.T) {
	n1 := lab.Address(t, "host", "n1/c1")
	for _, node := range []string{"n1", "n2"} {
		for _, mode := range []string{"heddle", "overlay"} {
			t.Run(mode+" on "+node, func(t *testing.T) {
				p := lab.StartPeer(t, mode, node+"/c1")
				before := lab.Counters(t, node)["refuse_store"]
				p.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, n1, storePort)
				p.Expect(`{"error": "ECONNREFUSED"}`, `connect(6, "::ffff:%s", %d)`, n1, storePort)
				// Bound, it would leave from another address.
				p.Must(`s = tcp(4)`)
				p.Must(`s.bind(("0.0.0.0", 0))`)
				p.Expect(`"ECONNREFUSED"`, `error_of(s.connect, (%q, %d))`, n1, storePort)
				if after := lab.Counters(t, node)["refuse_store"]; after < before+3 {
					t.Errorf("refuse_store of %s rose by %d, want 3", node, after-before)
				}
			})
		}
		t.Run(node+" itself", func(t *testing.T) {
			lab.StartPeer(t, "host", node+"/c1").Must(`s = connect(4, %q, %d)`, n1, storePort)
		})
	}
}

// TestGuardsReturn: who takes the node's packet filter away does so for a moment, or until an agent
// runs.
func TestGuardsReturn(t *testing.T) {
	n1 := lab.Address(t, "host", "n1/c1")
	p := lab.StartPeer(t, "heddle", "n2/c1")
	guarded := func() {
		t.Helper()
		testutil.Eventually(t, "the overlay is open to n1 again", func() (bool, string) {
			out, err := exec.Command("nsenter", "--net="+netns.Path(lab.Name+"-n2"), "nft", "list", "set", "inet", "heddle", "nodes").CombinedOutput()
			return err == nil && strings.Contains(string(out), n1), string(out)
		})
		p.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, n1, storePort)
	}
	lab.Shell(t, lab.Name+"-n2", "nft delete table inet heddle")
	guarded()
	p.Must(`s = tcp(4)`)
	lab.EndAgent(t, "n2", syscall.SIGTERM)
	lab.Shell(t, lab.Name+"-n2", "nft delete table inet heddle")
	p.Must(`s.connect((%q, %d))`, n1, storePort) // without the guard it gets through: the test can fail
	testutil.NoError(t, lab.Command("up"))
	guarded()
}

// getStore asks the store of n1 from n2 by HTTP and gives the answer, or the error.
func getStore(t *testing.T, url string, cfg *tls.Config) (answer string) {
	t.Helper()
	n1 := lab.Address(t, "host", "n1/c1")
	err := netns.Do(netns.Path(lab.Name+"-n2"), func() error {
		// The connection is made here: goroutines of the client are in another namespace.
		conn, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(n1), storePort).String())
		if err != nil {
			return err
		}
		defer conn.Close()
		dial := func(context.Context, string, string) (net.Conn, error) { return conn, nil }
		client := http.Client{Timeout: testutil.WaitTimeout, Transport: &http.Transport{TLSClientConfig: cfg, DialContext: dial}}
		resp, err := client.Get(url)
		if err != nil {
			answer = err.Error()
			return nil
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		answer = resp.Status + " " + string(raw)
		return err
	})
	testutil.NoError(t, err)
	return answer
}

// TestStoreAsksForCertificates: on the network of the nodes, too, the store answers to nobody
// without the network's certificate, and there is no other way to it.
func TestStoreAsksForCertificates(t *testing.T) {
	n1 := lab.Address(t, "host", "n1/c1")
	join, err := trust.ReadJoin("/run/heddle/lab/" + lab.Name + "/n1/" + trust.JoinFile)
	testutil.NoError(t, err)
	nobody := join.TLS()
	nobody.Certificates = nil
	at := netip.MustParseAddr(n1).String() + ":2379/version"
	if got := getStore(t, "https://"+at, join.TLS()); !strings.HasPrefix(got, "200") || !strings.Contains(got, "etcdserver") {
		t.Errorf("a node: %s", got)
	}
	if got := getStore(t, "https://"+at, nobody); !strings.Contains(got, "certificate required") {
		t.Errorf("without certificate: %s", got)
	}
	if got := getStore(t, "http://"+at, nil); strings.Contains(got, "etcdserver") {
		t.Errorf("without TLS: %s", got)
	}
	for line := range strings.Lines(lab.Shell(t, lab.Name+"-n1", "ss -ltnpH")) {
		local := strings.Fields(line)[3]
		// Other agents ask at the second: see askAgent.
		if !strings.Contains(line, "heddled") || local == fmt.Sprint(n1, ":", storePort) || local == fmt.Sprint(n1, ":", peerapi.DefaultPort) {
			continue
		}
		// Probes of other nodes are steered to an alias of loopback (decision 0022).
		if at, err := netip.ParseAddrPort(local); err != nil || !at.Addr().IsLoopback() {
			t.Errorf("the agent listens at %s, too", local)
		}
	}
}

// TestExternalStore: nodes on an etcd of somebody else's, with its certificates; containers are
// kept from it, too.
func TestExternalStore(t *testing.T) {
	a, b := lab.BareNodes(t)
	dir := t.TempDir()
	authority, err := trust.OpenAuthority(dir)
	testutil.NoError(t, err)
	files, err := authority.Server(netip.MustParseAddr(a.Underlay))
	testutil.NoError(t, err)
	at := "https://" + a.Underlay + ":2379"
	cmd := exec.Command("etcd", "--name", "m1", "--data-dir", filepath.Join(dir, "data"), "--unsafe-no-fsync",
		"--listen-client-urls", at, "--advertise-client-urls", at, "--listen-peer-urls", "http://127.0.0.1:2380",
		"--initial-advertise-peer-urls", "http://127.0.0.1:2380", "--initial-cluster", "m1=http://127.0.0.1:2380",
		"--cert-file", files.CertAndKey, "--key-file", files.CertAndKey, "--client-cert-auth", "--trusted-ca-file", files.CA)
	testutil.NoError(t, netns.Start(netns.Path(a.Name), cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	testutil.Eventually(t, "etcd to listen", func() (bool, string) {
		out := lab.Shell(t, a.Name, "ss -ltnH")
		return strings.Contains(out, a.Underlay+":2379"), out
	})
	said := a.Fails(t, nil, a.Args("--store", at))
	if !strings.Contains(said, "--store-ca") {
		t.Errorf("without certificates it said: %s", said)
	}
	own := []string{"--store", at, "--store-ca", files.CA, "--store-cert", files.CertAndKey, "--store-key", files.CertAndKey}
	a.Start(t, a.Args(own...))
	b.Start(t, b.Args(own...))
	testutil.Eventually(t, "the nodes to know each other", func() (bool, string) {
		_, out := lab.AskAgent(t, b.Socket(), "GET", "/v1/status", "")
		return strings.Contains(out, `"peers":1`), out
	})
	for _, n := range []lab.BareNode{a, b} {
		if rules := lab.Shell(t, n.Name, "nft list chain inet heddle guard-out"); !strings.Contains(rules, a.Underlay) || !strings.Contains(rules, "2379") {
			t.Errorf("%s does not keep containers from the store:\n%s", n.Name, rules)
		}
	}
}

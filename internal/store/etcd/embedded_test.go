package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/trust"
)

func TestEmbeddedRefusals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	running := embedded(t, EmbeddedConfig{Dir: dir})
	for name, c := range map[string]struct {
		cfg  EmbeddedConfig
		want string
	}{
		"port in use":         {EmbeddedConfig{Dir: t.TempDir(), ClientURL: running.Endpoints()[0]}, "give another --store-port (HEDDLED_STORE_PORT)"},
		"foreign address":     {EmbeddedConfig{Dir: t.TempDir(), ClientURL: "http://192.0.2.1:2379"}, "use an address that this node has"},
		"directory in use":    {EmbeddedConfig{Dir: dir, ClientURL: "http://127.0.0.1:0"}, "in use by another agent"},
		"no directory":        {EmbeddedConfig{ClientURL: "http://127.0.0.1:0"}, "store directory"},
		"directory is a file": {EmbeddedConfig{Dir: "/dev/null", ClientURL: "http://127.0.0.1:0"}, "store directory"},
		"name in URL":         {EmbeddedConfig{Dir: t.TempDir(), ClientURL: "http://localhost:2379"}, "want https://ADDRESS:PORT"},
		"bad peer URL":        {EmbeddedConfig{Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", PeerURL: "x"}, "store peer URL"},
	} {
		c.cfg.NetworkID, c.cfg.UnsafeNoFsync = testNetwork, true
		s, err := Embedded(t.Context(), c.cfg)
		if err == nil {
			closeStore(t, s)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

func TestEmbeddedStopsStartingWithItsContext(t *testing.T) {
	t.Parallel()
	var log logBuffer
	cfg := EmbeddedConfig{NetworkID: testNetwork, Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s, err := Embedded(ctx, cfg, logTo(&log)); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v, %v", s, err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for { // until the directory is given back
		s, err := Embedded(t.Context(), cfg)
		if err == nil {
			closeStore(t, s)
			break
		}
		if !strings.Contains(err.Error(), "in use by another agent") || time.Now().After(deadline) {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
	if text := log.String(); text != "" {
		t.Errorf("logged:\n%s", text)
	}
}

func TestEmbeddedReportsDamagedData(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"member/snap/db", "member/wal/0000000000000000-0000000000000000.wal"} {
		var log logBuffer
		dir := busyDir(t)
		s := embedded(t, EmbeddedConfig{Dir: dir})
		initNetwork(t, s, store.Network{})
		closeStore(t, s)
		path := filepath.Join(dir, file)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range min(len(data), 64<<10) {
			data[i] ^= 0x5a
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		again, err := Embedded(t.Context(), EmbeddedConfig{NetworkID: testNetwork, Dir: dir, ClientURL: "http://127.0.0.1:0"}, logTo(&log))
		if err == nil {
			closeStore(t, again)
		}
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("damaged %s: %v, want an error naming the directory", file, err)
		}
	}
}

// busyDir gives a directory that goes with the test, also if etcd, which does not end all it has
// begun when it cannot start, makes one file more in it meanwhile.
func busyDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "etcd") // t.TempDir tries once to remove it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		deadline := time.Now().Add(10 * time.Second)
		for os.RemoveAll(dir) != nil {
			if time.Now().After(deadline) {
				t.Errorf("%s cannot be removed", dir)
				return
			}
			runtime.Gosched()
		}
	})
	return dir
}

func TestCloseLeavesNoGoroutines(t *testing.T) {
	var log logBuffer
	run := func() {
		s, err := Embedded(t.Context(), EmbeddedConfig{NetworkID: testNetwork, Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true}, logTo(&log))
		if err != nil {
			t.Fatal(err)
		}
		c := connect(t, s, logTo(&log))
		<-watch(t, c)
		<-watch(t, s)
		closeStore(t, c)
		closeStore(t, s)
	}
	run() // what is started once in a process is there now
	before := runtime.NumGoroutine()
	run()
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
		runtime.Gosched()
	}
	if text := log.String(); text != "" {
		t.Errorf("logged in ordinary use:\n%s", text)
	}
}

// freePort gives a port of 127.0.0.1 that nobody listens on.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// TestExternalEtcd runs against the etcd program, if the machine has it. Debian 12 has version 3.4,
// the oldest that the schema asks for.
func TestExternalEtcd(t *testing.T) {
	t.Parallel()
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Skip("needs etcd in PATH: apt-get install etcd-server")
	}
	a, cfg := secure(t)
	files := trust.ClientFiles{CA: cfg.TLS.CA, Cert: cfg.TLS.CertAndKey, Key: cfg.TLS.CertAndKey} // any of the authority's will do
	settings, err := files.TLS()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("http", func(t *testing.T) { externalEtcd(t, path, "http", nil) })
	t.Run("https", func(t *testing.T) {
		externalEtcd(t, path, "https", settings, "--cert-file", files.Cert, "--key-file", files.Key, "--client-cert-auth", "--trusted-ca-file", files.CA)
	})
	t.Run("https, another's certificate", func(t *testing.T) {
		client := startEtcd(t, path, "https", "--cert-file", files.Cert, "--key-file", files.Key, "--client-cert-auth", "--trusted-ca-file", files.CA)
		if s, err := Connect(t.Context(), []string{client}, testNetwork, WithTimeout(20*time.Second), WithTLS(joinTLS(t, a))); err == nil {
			closeStore(t, s)
		} else {
			t.Fatal(err) // it runs
		}
		other, _ := secure(t)
		foreign := joinTLS(t, other)
		foreign.RootCAs = settings.RootCAs
		if _, err := Connect(t.Context(), []string{client}, testNetwork, WithTimeout(DefaultTimeout), WithTLS(foreign)); err == nil || !strings.Contains(err.Error(), "refuses this node's certificate") {
			t.Errorf("%v", err)
		}
	})
}

// startEtcd runs the etcd program until the end of the test and gives its URL.
func startEtcd(t *testing.T, path, scheme string, args ...string) string {
	t.Helper()
	client, peer := fmt.Sprintf("%s://127.0.0.1:%d", scheme, freePort(t)), fmt.Sprintf("http://127.0.0.1:%d", freePort(t))
	cmd := exec.Command(path, append(args, "--name", "m1", "--data-dir", t.TempDir(), "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "m1="+peer)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Errorf("kill etcd: %v", err)
		}
		_ = cmd.Wait() // says that it was killed
	})
	return client
}

// externalEtcd uses a store in the etcd program.
func externalEtcd(t *testing.T, path, scheme string, settings *tls.Config, args ...string) {
	s, err := Connect(t.Context(), []string{startEtcd(t, path, scheme, args...)}, testNetwork, WithTimeout(20*time.Second), WithTLS(settings))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	initNetwork(t, s, store.Network{})
	states := watch(t, s)
	if err := s.HoldName(t.Context(), nameLease("a"), false); err != nil {
		t.Fatal(err)
	}
	heldBy(t, states, "a")
	join(t, s, node(1))
	if n2 := join(t, s, node(2)); n2.Prefixes[0].String() != "10.244.1.0/24" {
		t.Errorf("prefixes of the second node: %s", n2.Prefixes)
	}
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	var inUse *store.AddrInUseError
	if err := s.PutEndpoint(t.Context(), endpoint("n1", 2, "10.244.0.2")); !errors.As(err, &inUse) {
		t.Errorf("address of another: %v, want an AddrInUseError", err)
	}
	await(t, states, "2 nodes and 1 endpoint", counts(2, 1))
	if err := s.LeaveNode(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	await(t, states, "1 node", counts(1, 0))
}

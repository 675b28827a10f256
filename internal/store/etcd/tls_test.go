package etcd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trust"
)

// secure makes an authority and what an embedded store with TLS is started with.
func secure(t *testing.T) (*trust.Authority, EmbeddedConfig) {
	t.Helper()
	a, err := trust.OpenAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	files, err := a.Server(netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	return a, EmbeddedConfig{ClientURL: "https://127.0.0.1:0", TLS: ServerTLS{CertAndKey: files.CertAndKey, CA: files.CA}}
}

// join gives the TLS settings of a node of a's network.
func joinTLS(t *testing.T, a *trust.Authority) *tls.Config {
	t.Helper()
	j, err := a.Join(filepath.Join(t.TempDir(), trust.JoinFile), "https://127.0.0.1:2379")
	if err != nil {
		t.Fatal(err)
	}
	return j.TLS()
}

// TestTLSKeepsStrangersOut: whoever has no certificate of the network's authority, or speaks
// without TLS, learns what is amiss and nothing else.
func TestTLSKeepsStrangersOut(t *testing.T) {
	t.Parallel()
	a, cfg := secure(t)
	s := embedded(t, cfg, WithTLS(joinTLS(t, a)))
	initNetwork(t, s, store.Network{})
	other, _ := secure(t)
	nobody := joinTLS(t, a)
	nobody.Certificates = nil
	foreign := joinTLS(t, a)
	foreign.Certificates = joinTLS(t, other).Certificates
	plain := "http://" + strings.TrimPrefix(s.Endpoints()[0], "https://")
	for name, c := range map[string]struct {
		endpoint string
		cfg      *tls.Config
		want     string
	}{
		"no certificate":            {s.Endpoints()[0], nobody, "refuses this node's certificate"},
		"another network's":         {s.Endpoints()[0], foreign, "refuses this node's certificate"},
		"the store of another":      {s.Endpoints()[0], joinTLS(t, other), "signed by an authority that is not trusted here"},
		"the machine's authorities": {s.Endpoints()[0], nil, "signed by an authority that is not trusted here"},
		"without TLS":               {plain, nil, "it speaks TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Connect(t.Context(), []string{c.endpoint}, testNetwork, WithTLS(c.cfg), WithTimeout(2*time.Second))
			if err == nil {
				closeStore(t, got)
			}
			var unreachable *UnreachableError
			if !errors.As(err, &unreachable) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	t.Run("a node", func(t *testing.T) {
		c := connect(t, s, WithTLS(joinTLS(t, a)))
		if _, err := c.Network(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Run("no port without", func(t *testing.T) {
		for _, at := range []string{s.server.etcd.Clients[0].Addr().String(), s.server.etcd.Peers[0].Addr().String()} {
			conn, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err := conn.Write([]byte("GET /version HTTP/1.0\r\n\r\n")); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 512)
			n, _ := conn.Read(b)
			if answer := string(b[:n]); strings.Contains(answer, " 200 ") {
				t.Errorf("%s answers without TLS: %q", at, answer)
			}
		}
	})
}

// TestClocksDiffer: a node's clock may be a day behind the store's, or ahead by years; beyond that
// the error says that one of the two clocks is wrong, and which.
func TestClocksDiffer(t *testing.T) {
	t.Parallel()
	a, cfg := secure(t)
	s := embedded(t, cfg, WithTLS(joinTLS(t, a)))
	initNetwork(t, s, store.Network{})
	at := func(off time.Duration) *tls.Config {
		c := joinTLS(t, a)
		c.Time = func() time.Time { return time.Now().Add(off) }
		return c
	}
	const day = 24 * time.Hour
	for _, off := range []time.Duration{-23 * time.Hour, 9 * 365 * day} {
		if _, err := connect(t, s, WithTLS(at(off))).Network(t.Context()); err != nil {
			t.Errorf("a clock that is off by %s: %v", off, err)
		}
	}
	pair, err := tls.LoadX509KeyPair(cfg.TLS.CertAndKey, cfg.TLS.CertAndKey)
	testutil.NoError(t, err)
	behind := &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: joinTLS(t, a).RootCAs, ClientAuth: tls.RequireAndVerifyClientCert, Time: at(-2 * day).Time}
	l, err := tls.Listen("tcp", "127.0.0.1:0", behind)
	testutil.NoError(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).Handshake() // fails: that is what is tried
			c.Close()
		}
	}()
	for name, c := range map[string]struct {
		endpoint string
		cfg      *tls.Config
		want     string
	}{
		"the node's is behind":  {s.Endpoints()[0], at(-25 * time.Hour), "the clock here is wrong"},
		"the node's is ahead":   {s.Endpoints()[0], at(11 * 365 * day), "the clock here is wrong"},
		"the store's is behind": {"https://" + l.Addr().String(), joinTLS(t, a), "its clock is wrong"},
	} {
		if _, err := Connect(t.Context(), []string{c.endpoint}, testNetwork, WithTLS(c.cfg), WithTimeout(2*time.Second)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestRenewedPair: a pair that is renewed on the disk is what the next connection shows, without a
// restart.
func TestRenewedPair(t *testing.T) {
	t.Parallel()
	a, cfg := secure(t)
	_, other := secure(t)
	files := trust.ClientFiles{CA: cfg.TLS.CA, Cert: filepath.Join(t.TempDir(), "node.pem"), Key: filepath.Join(t.TempDir(), "node-key.pem")}
	renew := func(from string) {
		for _, path := range []string{files.Cert, files.Key} {
			raw, err := os.ReadFile(from)
			testutil.NoError(t, err)
			testutil.NoError(t, os.WriteFile(path, raw, 0o600))
		}
	}
	renew(cfg.TLS.CertAndKey)
	settings, err := files.TLS()
	testutil.NoError(t, err)
	cfg.Dir, cfg.ClientURL = t.TempDir(), fmt.Sprintf("https://127.0.0.1:%d", freePort(t))
	s := embedded(t, cfg, WithTLS(joinTLS(t, a)))
	initNetwork(t, s, store.Network{})
	c := connect(t, s, WithTLS(settings), WithTimeout(4*time.Second))
	closeStore(t, s)

	// From now on only the new pair is accepted.
	cfg.TLS.CA = other.TLS.CA
	renewed, err := trust.ClientFiles{CA: files.CA, Cert: other.TLS.CertAndKey, Key: other.TLS.CertAndKey}.TLS()
	testutil.NoError(t, err)
	embedded(t, cfg, WithTLS(renewed))
	if _, err := c.Network(t.Context()); err == nil || !strings.Contains(err.Error(), "where --store-cert and --store-key say") {
		t.Errorf("with the old pair: %v", err)
	}
	testutil.NoError(t, os.Remove(files.Key))
	if _, err := c.Network(t.Context()); err == nil || !strings.Contains(err.Error(), "--store-key") {
		t.Errorf("without a key: %v", err)
	}
	renew(other.TLS.CertAndKey)
	if _, err := c.Network(t.Context()); err != nil {
		t.Errorf("with the new pair: %v", err)
	}
}

// TestUpgradeToTLS: data of a store without TLS is there after it gets one.
func TestUpgradeToTLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plain := embedded(t, EmbeddedConfig{Dir: dir})
	initNetwork(t, plain, store.Network{})
	n1 := join(t, plain, node(1))
	closeStore(t, plain)
	a, cfg := secure(t)
	cfg.Dir = dir
	s := embedded(t, cfg, WithTLS(joinTLS(t, a)))
	states := watch(t, s)
	if st := await(t, states, "1 node", counts(1, 0)); st.Nodes[0].Underlay != n1.Underlay {
		t.Errorf("node %+v, was %+v", st.Nodes[0], n1)
	}
}

// TestRefusesPlainServer: https to a store without TLS says so.
func TestRefusesPlainServer(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	a, _ := secure(t)
	at := "https://" + strings.TrimPrefix(s.Endpoints()[0], "http://")
	_, err := Connect(t.Context(), []string{at}, testNetwork, WithTLS(joinTLS(t, a)), WithTimeout(2*time.Second))
	if err == nil || !strings.Contains(err.Error(), "does not speak TLS") {
		t.Errorf("%v", err)
	}
}

// TestLogin: an etcd with users asks for name and password.
func TestLogin(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	ctx := t.Context()
	for _, do := range []func() error{
		func() error { _, err := s.client.RoleAdd(ctx, "root"); return err },
		func() error { _, err := s.client.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := s.client.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := s.client.UserAdd(ctx, "reader", "secret"); return err },
		func() error { _, err := s.client.AuthEnable(ctx); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	// etcd compares passwords slowly on purpose, and the race detector makes that seconds of a busy
	// processor.
	patient := WithTimeout(time.Minute)
	if _, err := connect(t, s, WithUser("root", "secret"), patient).Network(ctx); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct{ user, password, want string }{
		"no user":        {"", "", "check --store-user"},
		"wrong password": {"root", "guess", "--store-password-file"},
		"no rights":      {"reader", "secret", "below /heddle/"},
	} {
		got, err := Connect(ctx, s.Endpoints(), testNetwork, WithUser(c.user, c.password), patient)
		if err == nil {
			closeStore(t, got)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

package trust

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const testStore = "https://192.0.2.1:2379"

func authority(t testing.TB) *Authority {
	t.Helper()
	a, err := OpenAuthority(filepath.Join(t.TempDir(), "trust"))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestAuthorityIsKept: the next agent signs with the same authority, and copies of the join file
// stay good.
func TestAuthorityIsKept(t *testing.T) {
	a := authority(t)
	path := filepath.Join(t.TempDir(), JoinFile)
	first, err := a.Join(path, testStore)
	if err != nil {
		t.Fatal(err)
	}
	again, err := OpenAuthority(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	second, err := again.Join(path, testStore)
	if err != nil {
		t.Fatal(err)
	}
	if !second.cert.Equal(first.cert) || !second.ca.Equal(a.cert) {
		t.Error("the join file has changed")
	}
	moved, err := again.Join(path, "https://192.0.2.7:2379")
	if err != nil || moved.Store != "https://192.0.2.7:2379" {
		t.Errorf("after the store moved: %+v, %v", moved, err)
	}
	for _, p := range []string{path, filepath.Join(a.dir, authorityFile)} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v: want mode 0600", p, info, err)
		}
	}
}

// TestServerFiles: the store's certificate is for its addresses, and the node's is not one of a
// store.
func TestServerFiles(t *testing.T) {
	a := authority(t)
	files, err := a.Server(netip.MustParseAddr("192.0.2.1"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(files.CertAndKey)
	if err != nil {
		t.Fatal(err)
	}
	certs, key, _, err := parsePEM(raw)
	if err != nil || len(certs) != 1 || key == nil {
		t.Fatalf("%v: %d certificates", err, len(certs))
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	verify := func(c *x509.Certificate, name string, use x509.ExtKeyUsage) error {
		_, err := c.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, KeyUsages: []x509.ExtKeyUsage{use}})
		return err
	}
	if err := verify(certs[0], "192.0.2.1", x509.ExtKeyUsageServerAuth); err != nil {
		t.Error(err)
	}
	if verify(certs[0], "192.0.2.2", x509.ExtKeyUsageServerAuth) == nil {
		t.Error("the certificate is good for another address")
	}
	j, err := a.Join(filepath.Join(t.TempDir(), JoinFile), testStore)
	if err != nil {
		t.Fatal(err)
	}
	if verify(j.cert, "", x509.ExtKeyUsageServerAuth) == nil {
		t.Error("a node could pass for the store")
	}
}

// TestJoinFileRefused: a join file that cannot work is refused before anybody is asked.
func TestJoinFileRefused(t *testing.T) {
	a := authority(t)
	path := filepath.Join(t.TempDir(), JoinFile)
	if _, err := a.Join(path, testStore); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), JoinFile)
	if _, err := authority(t).Join(other, testStore); err != nil {
		t.Fatal(err)
	}
	foreign, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	blocks := func(raw []byte) (out []*pem.Block) {
		for b, rest := pem.Decode(raw); b != nil; b, rest = pem.Decode(rest) {
			out = append(out, b)
		}
		return out
	}
	text := func(bs ...*pem.Block) (out []byte) {
		for _, b := range bs {
			out = append(out, pem.EncodeToMemory(b)...)
		}
		return out
	}
	g, f := blocks(good), blocks(foreign)
	for name, c := range map[string]struct {
		raw  []byte
		want string
	}{
		"empty":                {nil, "want a network"},
		"no PEM":               {[]byte("root:x:0:0"), "something else"},
		"cut":                  {good[:len(good)-30], "something else"},
		"trailing":             {append(append([]byte{}, good...), "x"...), "something else"},
		"without key":          {text(g[0], g[1], g[2]), "want a network"},
		"other key":            {text(g[0], g[1], g[2], f[3]), "not that of the node's certificate"},
		"other authority":      {text(g[0], f[1], g[2], g[3]), "do not belong together"},
		"certificates swapped": {text(g[0], g[2], g[1], g[3]), "key is not"},
		"two keys":             {text(g[0], g[1], g[2], g[3], g[3]), "too many"},
		"plain store":          {text(&pem.Block{Type: pemNetwork, Headers: map[string]string{storeHeader: "http://192.0.2.1:2379"}}, g[1], g[2], g[3]), "https://ADDRESS:PORT"},
		"long":                 {make([]byte, maxFile+1), "longer"},
	} {
		if _, err := ParseJoin(c.raw); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := ReadJoin(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "first node") {
		t.Errorf("missing file: %v", err)
	}
}

// TestExpired: what has expired is refused with the date, and an authority that has expired is not
// used to sign.
func TestExpired(t *testing.T) {
	a := authority(t)
	template := x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	a.cert.NotAfter = time.Now().Add(-time.Hour) // of what it signs
	pair, err := a.issue(&template)
	if err != nil {
		t.Fatal(err)
	}
	raw := pem.EncodeToMemory(&pem.Block{Type: pemNetwork, Headers: map[string]string{storeHeader: testStore}})
	raw = append(append(raw, pemCert(a.cert)...), pair...)
	if _, err := ParseJoin(raw); err == nil || !strings.Contains(err.Error(), "expired at") {
		t.Errorf("join file: %v", err)
	}
}

func TestClientFiles(t *testing.T) {
	a := authority(t)
	files, err := a.Server(netip.MustParseAddr("192.0.2.1"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg, err := (ClientFiles{}).TLS(); cfg != nil || err != nil {
		t.Errorf("without files: %v, %v", cfg, err)
	}
	cfg, err := ClientFiles{CA: files.CA, Cert: files.CertAndKey, Key: files.CertAndKey}.TLS()
	if err != nil || cfg.GetClientCertificate == nil || cfg.RootCAs == nil {
		t.Errorf("with all: %v, %v", cfg, err)
	}
	for _, c := range []struct {
		files ClientFiles
		want  string
	}{
		{ClientFiles{CA: "/none"}, "--store-ca"},
		{ClientFiles{CA: "/dev/null"}, "--store-ca"},
		{ClientFiles{Cert: files.CertAndKey}, "both or neither"},
		{ClientFiles{Cert: "/none", Key: files.CertAndKey}, "--store-cert"},
		{ClientFiles{Cert: files.CertAndKey, Key: "/none"}, "--store-key"},
		{ClientFiles{Cert: files.CertAndKey, Key: files.CA}, "--store-key"},
	} {
		if _, err := c.files.TLS(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.files, err, c.want)
		}
	}
}

func TestReadPassword(t *testing.T) {
	path := filepath.Join(t.TempDir(), "word")
	for text, want := range map[string]string{"secret\n": "secret", "a b": "a b", "": "", "x\ny\n": ""} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadPassword(path); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// FuzzParseJoin feeds arbitrary bytes to the parser of join files: what it takes can be used.
func FuzzParseJoin(f *testing.F) {
	path := filepath.Join(f.TempDir(), JoinFile)
	if _, err := authority(f).Join(path, testStore); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte("-----BEGIN HEDDLE NETWORK-----\nStore: https://192.0.2.1:2379\n\n-----END HEDDLE NETWORK-----\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		j, err := ParseJoin(raw)
		if err != nil {
			return
		}
		if cfg := j.TLS(); cfg.RootCAs == nil || len(cfg.Certificates) != 1 || !strings.HasPrefix(j.Store, "https://") {
			t.Errorf("accepted %q", raw)
		}
	})
}

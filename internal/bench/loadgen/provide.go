package loadgen

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// selfSigned makes a key and a certificate that says nothing.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	certificate, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: key}, err
}

// Files that guard --provide makes.
const (
	keyFile         = "key.pem"
	certificateFile = "certificate.pem"
	resolverFile    = "unbound.conf"
	queriesFile     = "queries"
)

// hosts is how many names the zone has, each with an address of its own.
const hosts = 250

// providers make files in a folder, by what --provide says.
var providers = map[string]func(folder, listen string) error{
	"certificate": provideCertificate,
	"zone":        provideZone,
	"queries":     provideQueries,
}

func provideCertificate(folder, _ string) error {
	pair, err := selfSigned()
	if err != nil {
		return err
	}
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return err
	}
	write := func(name, kind string, bytes []byte) error {
		return os.WriteFile(filepath.Join(folder, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes}), 0o600)
	}
	return errors.Join(write(keyFile, "PRIVATE KEY", key), write(certificateFile, "CERTIFICATE", pair.Certificate[0]))
}

// provideZone makes the configuration of unbound: one thread that answers for the hosts of bench.
// from what it has been told, and asks nobody.
func provideZone(folder, listen string) error {
	at, err := netip.ParseAddrPort(listen)
	if err != nil {
		return fmt.Errorf("--listen %q: want ADDRESS:PORT", listen)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `server:
  interface: %s@%d
  access-control: 0.0.0.0/0 allow
  access-control: ::/0 allow
  username: ""
  chroot: ""
  directory: "%s"
  pidfile: ""
  use-syslog: no
  verbosity: 0
  num-threads: 1
  so-reuseport: no
  so-rcvbuf: 0
  module-config: "iterator"
  do-daemonize: no
  local-zone: "bench." static
`, at.Addr(), at.Port(), folder)
	for i := range hosts {
		fmt.Fprintf(&b, "  local-data: \"host%d.bench. A 192.0.2.%d\"\n", i, i)
	}
	b.WriteString("remote-control:\n  control-enable: no\n")
	return os.WriteFile(filepath.Join(folder, resolverFile), []byte(b.String()), 0o600)
}

// provideQueries makes what dnsperf asks for.
func provideQueries(folder, _ string) error {
	var b strings.Builder
	for i := range hosts {
		fmt.Fprintf(&b, "host%d.bench A\n", i)
	}
	return os.WriteFile(filepath.Join(folder, queriesFile), []byte(b.String()), 0o600)
}

// provided makes the folder that the command of s wants and puts its path into the command; remove
// takes it away.
func provided(s *settings) (remove func() error, err error) {
	if s.provide == "" {
		return func() error { return nil }, nil
	}
	provide := providers[s.provide]
	if provide == nil {
		return nil, fmt.Errorf("--provide %q: want certificate, queries or zone", s.provide)
	}
	folder, err := os.MkdirTemp("", "heddle-bench-")
	if err != nil {
		return nil, fmt.Errorf("provide %s: %w", s.provide, err)
	}
	remove = func() error { return os.RemoveAll(folder) }
	if err := provide(folder, s.listen); err != nil {
		return nil, errors.Join(fmt.Errorf("provide %s: %w", s.provide, err), remove())
	}
	for i, word := range s.command {
		s.command[i] = strings.ReplaceAll(word, "{}", folder)
	}
	return remove, nil
}

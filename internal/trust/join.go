package trust

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	"heddle.dev/heddle/internal/durable"
)

// JoinFile is the name of the join file in the state directory of the first node.
const JoinFile = "join.pem"

// pemNetwork is the type of the block of a join file that says where the store is; its header is
// storeHeader.
const (
	pemNetwork  = "HEDDLE NETWORK"
	storeHeader = "Store"
)

// Join is what a node needs to reach its network's store.
type Join struct {
	// Store is the store's URL: https, an address, a port.
	Store string

	ca   *x509.Certificate
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Join gives the join file of a network whose store is at this URL, and keeps it at path. A file
// that is there is kept as long as it is this network's, for this store and not about to expire, so
// that copies of it stay equal.
func (a *Authority) Join(path, store string) (Join, error) {
	if have, err := ReadJoin(path); err == nil && have.Store == store && have.ca.Equal(a.cert) && time.Until(have.cert.NotAfter) > renewal {
		return have, nil
	}
	pair, err := a.issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "heddle node"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return Join{}, err
	}
	raw := pem.EncodeToMemory(&pem.Block{Type: pemNetwork, Headers: map[string]string{storeHeader: store}})
	raw = append(append(raw, pemCert(a.cert)...), pair...)
	j, err := ParseJoin(raw)
	if err != nil {
		return Join{}, fmt.Errorf("make join file: %w", err)
	}
	return j, durable.WriteFile(path, raw, 0o600)
}

// ReadJoin reads a join file. An error names the file and the remedy.
func ReadJoin(path string) (Join, error) {
	raw, err := readFile(path)
	if err != nil {
		return Join{}, fmt.Errorf("join file: %w; copy %s from the state directory of the network's first node", err, JoinFile)
	}
	j, err := ParseJoin(raw)
	if err != nil {
		return Join{}, fmt.Errorf("join file %s: %w; copy %s anew from the state directory of the network's first node", path, err, JoinFile)
	}
	return j, nil
}

// ParseJoin reads the bytes of a join file: the network's block, the authority's certificate, the
// node's and its key. It refuses what could not work: certificates that have expired or that the
// authority has not signed.
func ParseJoin(raw []byte) (Join, error) {
	certs, key, network, err := parsePEM(raw)
	if err != nil {
		return Join{}, err
	}
	if network == nil || len(certs) != 2 || key == nil {
		return Join{}, errors.New("want a network, two certificates and a key")
	}
	j := Join{Store: network.Headers[storeHeader], ca: certs[0], cert: certs[1], key: key}
	u, err := url.Parse(j.Store)
	if err != nil || u.Scheme != "https" || u.Path != "" || u.Port() == "" || net.ParseIP(u.Hostname()) == nil {
		return Join{}, fmt.Errorf("store %.80q: want https://ADDRESS:PORT", j.Store)
	}
	if !key.PublicKey.Equal(j.cert.PublicKey) {
		return Join{}, errors.New("the key is not that of the node's certificate")
	}
	if now := time.Now(); now.After(j.cert.NotAfter) || now.After(j.ca.NotAfter) {
		return Join{}, fmt.Errorf("its certificate expired at %s", j.cert.NotAfter.Format(time.DateOnly))
	}
	if !j.ca.IsCA {
		return Join{}, errors.New("its first certificate is no certificate authority")
	}
	if err := j.cert.CheckSignatureFrom(j.ca); err != nil {
		return Join{}, fmt.Errorf("its certificates do not belong together: %w", err)
	}
	return j, nil
}

// TLS gives the settings of a client of the network's store.
func (j Join) TLS() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(j.ca)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool,
		Certificates: []tls.Certificate{{Certificate: [][]byte{j.cert.Raw}, PrivateKey: j.key, Leaf: j.cert}},
	}
}

// ClientFiles are the flags of a node that uses an etcd of somebody else's, each the path of a PEM
// file or "".
type ClientFiles struct {
	CA        string // --store-ca: who signs the store's certificate; "" takes the machine's authorities
	Cert, Key string // --store-cert and --store-key: what the node shows; both or neither
}

// TLS gives the settings of a client, nil without any file. The pair is read anew for each
// connection: it may be renewed. An error names the flag and the remedy.
func (f ClientFiles) TLS() (*tls.Config, error) {
	if f == (ClientFiles{}) {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CA != "" {
		raw, err := readFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("--store-ca: %w; give the PEM file of the authority that signed the store's certificate", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(raw) {
			return nil, fmt.Errorf("--store-ca %s: no certificate in it; give a PEM file", f.CA)
		}
	}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("--store-cert, --store-key: give both or neither")
	}
	if f.Cert == "" {
		return cfg, nil
	}
	if _, err := f.pair(); err != nil {
		return nil, err
	}
	cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return f.pair() }
	return cfg, nil
}

// pair reads what the node shows.
func (f ClientFiles) pair() (*tls.Certificate, error) {
	cert, err := readFile(f.Cert)
	if err != nil {
		return nil, fmt.Errorf("--store-cert: %w; give the PEM file of the certificate that the store asks of its clients", err)
	}
	key, err := readFile(f.Key)
	if err != nil {
		return nil, fmt.Errorf("--store-key: %w; give the PEM file of the key of --store-cert", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("--store-cert %s, --store-key %s: %w", f.Cert, f.Key, err)
	}
	if time.Now().After(pair.Leaf.NotAfter) {
		return nil, fmt.Errorf("--store-cert %s: expired at %s; put a new one there", f.Cert, pair.Leaf.NotAfter.Format(time.DateOnly))
	}
	return &pair, nil
}

// ReadPassword reads the file of --store-password-file: one line.
func ReadPassword(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("--store-password-file: %w", err)
	}
	word := string(bytes.TrimRight(raw, "\r\n"))
	if word == "" || bytes.ContainsAny([]byte(word), "\r\n") {
		return "", fmt.Errorf("--store-password-file %s: want one line with the password", path)
	}
	return word, nil
}

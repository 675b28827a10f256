// Package trust says who may speak to a network's store. The agent that runs the embedded store is
// the network's certificate authority: it signs the store's own certificate and that of the join
// file, which an operator carries to every further node. Whoever has the join file is a node of the
// network; nobody else gets through the TLS handshake.
// docs/decisions/0017-store-trust-and-membership.md has the reasons.
package trust

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"heddle.dev/heddle/internal/durable"
)

// Validity of certificates. They begin in the past, since the clocks of nodes differ.
const (
	lifetime = 10 * 365 * 24 * time.Hour
	renewal  = 365 * 24 * time.Hour // a certificate with less left is replaced when the first node's agent starts
	skew     = 24 * time.Hour
)

// maxFile bounds what is read of a file with certificates, in bytes.
const maxFile = 64 << 10

// Types of PEM blocks.
const (
	pemCertificate = "CERTIFICATE"
	pemKey         = "PRIVATE KEY"
)

// Names of the files in an authority's directory, all of mode 0600.
const (
	authorityFile = "ca.pem"     // certificate and key of the authority
	caFile        = "ca-crt.pem" // its certificate alone, for etcd
	serverFile    = "store.pem"  // certificate and key of the embedded store
)

// Authority signs certificates for the nodes of one network.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// ServerFiles are the paths that the embedded store is started with: PEM files, mode 0600.
type ServerFiles struct {
	// CertAndKey holds the store's certificate and its key.
	CertAndKey string
	// CA holds the authority's certificate: a client needs one that it has signed.
	CA string
}

// OpenAuthority reads the authority kept in dir, or makes one there. dir is made if missing, mode
// 0700. An authority that cannot be used is an error that says how to get another.
func OpenAuthority(dir string) (*Authority, error) {
	if err := durable.MakeDir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("network CA: %w", err)
	}
	path := filepath.Join(dir, authorityFile)
	raw, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return makeAuthority(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("network CA: %w", err)
	}
	a, err := parseAuthority(raw)
	if err != nil {
		return nil, fmt.Errorf("network CA %s: %w; remove it to get a new one, and carry the new join file to every node", path, err)
	}
	a.dir = dir
	return a, nil
}

func makeAuthority(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make network CA: %w", err)
	}
	a := &Authority{dir: dir, key: key}
	template := x509.Certificate{
		Subject: pkix.Name{CommonName: "heddle network"}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	if a.cert, err = a.sign(&template, &template, &key.PublicKey); err != nil {
		return nil, fmt.Errorf("make network CA: %w", err)
	}
	raw, err := pemPair(a.cert, key)
	if err != nil {
		return nil, fmt.Errorf("make network CA: %w", err)
	}
	return a, durable.WriteFile(filepath.Join(dir, authorityFile), raw, 0o600)
}

// parseAuthority reads what makeAuthority wrote.
func parseAuthority(raw []byte) (*Authority, error) {
	certs, key, _, err := parsePEM(raw)
	if err != nil {
		return nil, err
	}
	if len(certs) != 1 || key == nil {
		return nil, errors.New("want one certificate and its key")
	}
	if !certs[0].IsCA || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, errors.New("certificate and key are no certificate authority")
	}
	if now := time.Now(); now.After(certs[0].NotAfter) {
		return nil, fmt.Errorf("expired at %s", certs[0].NotAfter.Format(time.DateOnly))
	}
	return &Authority{cert: certs[0], key: key}, nil
}

// ServerFilesIn gives the paths of the files that Server writes for an authority in dir.
func ServerFilesIn(dir string) ServerFiles {
	return ServerFiles{CertAndKey: filepath.Join(dir, serverFile), CA: filepath.Join(dir, caFile)}
}

// Server writes the files that a store which nodes reach at these addresses is started with. Its
// certificate is made anew each time.
func (a *Authority) Server(addrs ...netip.Addr) (ServerFiles, error) {
	files := ServerFilesIn(a.dir)
	template := x509.Certificate{
		Subject: pkix.Name{CommonName: "heddle store"}, KeyUsage: x509.KeyUsageDigitalSignature,
		// etcd is a client of itself, too.
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, addr := range addrs {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	pair, err := a.issue(&template)
	if err != nil {
		return files, err
	}
	if err := durable.WriteFile(files.CertAndKey, pair, 0o600); err != nil {
		return files, err
	}
	return files, durable.WriteFile(files.CA, pemCert(a.cert), 0o600)
}

// issue gives a new key and the certificate for it in PEM.
func (a *Authority) issue(template *x509.Certificate) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	cert, err := a.sign(template, a.cert, &key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	return pemPair(cert, key)
}

// sign completes template and signs it with the authority's key. Nothing outlives the authority.
func (a *Authority) sign(template, parent *x509.Certificate, key *ecdsa.PublicKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template.SerialNumber, template.NotBefore, template.NotAfter = serial, now.Add(-skew), now.Add(lifetime)
	if a.cert != nil && template.NotAfter.After(a.cert.NotAfter) {
		template.NotAfter = a.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key, a.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func pemCert(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: c.Raw})
}

func pemPair(c *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return append(pemCert(c), pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der})...), nil
}

// parsePEM reads certificates, one key at most, and one block of our own at most.
func parsePEM(raw []byte) (certs []*x509.Certificate, key *ecdsa.PrivateKey, network *pem.Block, err error) {
	if len(raw) > maxFile {
		return nil, nil, nil, fmt.Errorf("longer than %d bytes", maxFile)
	}
	for {
		block, rest := pem.Decode(raw)
		if block == nil {
			if len(bytes.TrimSpace(rest)) > 0 {
				return nil, nil, nil, errors.New("something else than PEM blocks in it")
			}
			return certs, key, network, nil
		}
		raw = rest
		switch {
		case block.Type == pemCertificate:
			c, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, nil, nil, err
			}
			certs = append(certs, c)
		case block.Type == pemKey && key == nil:
			k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			if err != nil {
				return nil, nil, nil, err
			}
			var ok bool
			if key, ok = k.(*ecdsa.PrivateKey); !ok {
				return nil, nil, nil, fmt.Errorf("key of type %T: want an ECDSA key", k)
			}
		case block.Type == pemNetwork && network == nil:
			network = block
		default:
			return nil, nil, nil, fmt.Errorf("a %.40q block too many", block.Type)
		}
	}
}

// readFile reads a file that is not too long.
func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s: want a regular file of at most %d bytes", path, maxFile)
	}
	return os.ReadFile(path)
}

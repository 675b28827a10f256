// Package peerapi is how agents ask each other: TLS 1.3 with a key of each agent's own, which the
// node's record in the store names. Either end shows its key, and believes no other than those of
// the records: who may write to the store is a node of the network, and nobody else gets through
// the handshake. What may be asked is internal/api's to say.
// docs/decisions/0093-whole-network-questions.md has the reasons.
package peerapi

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/netutil"

	"heddle.dev/heddle/internal/durable"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/patience"
)

// DefaultPort is where agents answer each other, beside the direct ports.
const DefaultPort = 17472

// Answers bounds how long another agent may take to begin an answer.
var Answers = patience.For(2 * time.Second)

// maxConnections bounds how many connections there are at a time: whoever reaches the port can make
// some, and has them until its handshake fails.
const maxConnections = 512

// listenFor bounds how long Listen waits for the port: an agent that was killed keeps it until its
// last thread has ended.
var listenFor = patience.For(5 * time.Second)

// listenAgain is how often Listen tries meanwhile.
const listenAgain = 50 * time.Millisecond

// pemKey is the type of the PEM block in an identity's file.
const pemKey = "PRIVATE KEY"

// Identity is an agent's key. It is read-only once made.
type Identity struct {
	cert tls.Certificate
	key  string
}

// Open reads the identity kept at path, or makes one there with mode 0600. It is kept so that the
// node's record stays the same when its agent starts again.
func Open(path string) (*Identity, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return create(path)
	}
	if err != nil {
		return nil, fmt.Errorf("key for other agents: %w", err)
	}
	key, err := parse(raw)
	if err != nil {
		return nil, fmt.Errorf("key for other agents: %s: %w; remove the file to get another", path, err)
	}
	return identify(key)
}

func create(path string) (*Identity, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key for other agents: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("make key for other agents: %w", err)
	}
	if err := durable.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), 0o600); err != nil {
		return nil, fmt.Errorf("make key for other agents: %w", err)
	}
	return identify(key)
}

// parse reads what create wrote.
func parse(raw []byte) (ed25519.PrivateKey, error) {
	block, rest := pem.Decode(raw)
	if block == nil || block.Type != pemKey || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("want one private key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	ours, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("want an Ed25519 key, not %T", key)
	}
	return ours, nil
}

// identify wraps key into a certificate that says nothing: keys are what is compared.
func identify(key ed25519.PrivateKey) (*Identity, error) {
	template := x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "heddle agent"}, NotAfter: time.Unix(1<<33, 0)}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("key for other agents: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("key for other agents: %w", err)
	}
	return &Identity{tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, keyOf(leaf)}, nil
}

// Key names the identity: the SHA-256 of its public key (SubjectPublicKeyInfo), in hexadecimal.
func (id *Identity) Key() string { return id.key }

func keyOf(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// config is that of either end: the other's key has to be one of those known.
func (id *Identity) config(known func(key string) bool) *tls.Config {
	if !model.ProtectPeerKeys.On() {
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{id.cert}, InsecureSkipVerify: true}
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{id.cert},
		ClientAuth:         tls.RequireAnyClientCert,
		InsecureSkipVerify: true, // no authority signs these: VerifyConnection compares keys
		VerifyConnection: func(state tls.ConnectionState) error {
			if key := keyOf(state.PeerCertificates[0]); !known(key) {
				return fmt.Errorf("key %s is no node's of this network", key)
			}
			return nil
		},
	}
}

// Listen takes the questions of agents whose key is known, at an address of this node.
func (id *Identity) Listen(ctx context.Context, at netip.AddrPort, known func(key string) bool) (net.Listener, error) {
	var lc net.ListenConfig
	again := time.NewTicker(listenAgain)
	defer again.Stop()
	for deadline := time.Now().Add(listenFor); ; {
		l, err := lc.Listen(ctx, "tcp", at.String())
		if err == nil {
			return tls.NewListener(netutil.LimitListener(l, maxConnections), id.config(known)), nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return nil, fmt.Errorf("listen for other agents: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("listen for other agents: %w", context.Cause(ctx))
		case <-again.C:
		}
	}
}

// errSilent is why a question has no answer.
var errSilent = fmt.Errorf("no answer within %s", Answers)

// Get asks the agent at an address, whose key this is, for target: a path with its query. The body
// is the caller's to close. An agent that does not begin to answer in time is an error; what it
// sends after that may take as long as ctx lives.
func (id *Identity) Get(ctx context.Context, at netip.AddrPort, key, target string) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	late := time.AfterFunc(Answers, func() { cancel(errSilent) })
	fail := func(err error) (*http.Response, error) {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+at.String()+target, nil)
	if err != nil {
		return fail(err)
	}
	// A connection a question: they are few, and nothing is kept of a node that has gone.
	transport := &http.Transport{TLSClientConfig: id.config(func(k string) bool { return k == key }), DisableKeepAlives: true, DisableCompression: true}
	resp, err := transport.RoundTrip(req)
	if !late.Stop() || err != nil {
		if err == nil {
			_ = resp.Body.Close()
			err = errSilent
		}
		return fail(err)
	}
	resp.Body = &body{resp.Body, func() { cancel(nil) }}
	return resp, nil
}

// body ends what waits for an answer when its reader is done with it.
type body struct {
	io.ReadCloser
	end func()
}

// Close implements io.Closer.
func (b *body) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

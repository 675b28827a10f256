package api

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"heddle.dev/heddle/internal/model"
)

// Encryption says how the node encrypts what it sends to others.
type Encryption struct {
	// Enabled: it encrypts. All but Peers is empty if not.
	Enabled bool `json:"enabled"`
	// Device is WireGuard's, Endpoint where the node takes encrypted packets, Inner its address for
	// what is to be encrypted, Prefix the addresses of that kind of all nodes.
	Device   string         `json:"device,omitempty"`
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	Inner    netip.Addr     `json:"inner,omitzero"`
	Prefix   netip.Prefix   `json:"prefix,omitzero"`
	// Key is the node's public key, KeySince when it was made.
	Key      model.PublicKey `json:"public_key,omitzero"`
	KeySince time.Time       `json:"key_since,omitzero"`
	// Next is the key that the node is about to use, zero if there is none; Waits names nodes whose
	// kernels have to accept it before, or to send by it.
	Next  model.PublicKey `json:"next_key,omitzero"`
	Waits []string        `json:"waits,omitempty"`
	// Clear is how many direct connections there are from before the node encrypted, which go on in
	// the clear; only `GET /v1/status` says so.
	Clear int `json:"clear,omitempty"`
	// Peers are the other nodes, by name: of a node that does not encrypt those that it does not
	// reach.
	Peers []EncryptedPeer `json:"peers,omitempty"`
}

// EncryptedPeer is another node.
type EncryptedPeer struct {
	Node  string             `json:"node"`
	State EncryptedPeerState `json:"state"`
	// Reason says why the node is left out.
	Reason model.PlainReason `json:"reason,omitempty"`
	// Endpoint is where it was last heard from, or, before that, where it says that it is.
	Endpoint netip.AddrPort  `json:"endpoint,omitzero"`
	Inner    netip.Addr      `json:"inner,omitzero"`
	Key      model.PublicKey `json:"public_key,omitzero"`
	// Next is a key of the node that is accepted, too.
	Next model.PublicKey `json:"next_key,omitzero"`
	// Handshake is when the last one was, zero if there was none.
	Handshake time.Time `json:"handshake,omitzero"`
	// Sent and Received are bytes on the network that joins the nodes.
	Sent     uint64 `json:"sent_bytes"`
	Received uint64 `json:"received_bytes"`
}

// EncryptedPeerState says how it is with another node.
type EncryptedPeerState string

// The states.
const (
	PeerEncrypted   EncryptedPeerState = "encrypted"    // there is a session
	PeerIdle        EncryptedPeerState = "idle"         // there was one; the next packet makes another
	PeerNoHandshake EncryptedPeerState = "no_handshake" // there was none yet
	PeerLeftOut     EncryptedPeerState = "left_out"     // nothing is sent there: Reason
)

// EncryptedPeerStates lists them.
var EncryptedPeerStates = []EncryptedPeerState{PeerEncrypted, PeerIdle, PeerNoHandshake, PeerLeftOut}

// AcceptedKeys says which keys of another node this node's kernel accepts; zero: none.
type AcceptedKeys struct {
	// Sends is the one that what is for that node is sent by, Accepts another one.
	Sends   model.PublicKey `json:"sends,omitzero"`
	Accepts model.PublicKey `json:"accepts,omitzero"`
}

func (s *server) acceptedKeys(w http.ResponseWriter, r *http.Request) error {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil || len(q) != 1 || len(q["node"]) != 1 {
		return &Error{Code: CodeInvalid, Field: "node", Message: "want ?node=NAME, and nothing else"}
	}
	if err := model.ValidateName("node", q.Get("node")); err != nil {
		return &Error{Code: CodeInvalid, Field: "node", Message: err.Error()}
	}
	keys, err := s.agent.AcceptedKeys(r.Context(), q.Get("node"))
	if err != nil {
		return err
	}
	return s.write(w, keys)
}

// RotateRequest asks that the node take another key.
type RotateRequest struct{}

func (s *server) rotateKey(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	var req RotateRequest
	if err := decodeStrict(r.Body, MaxRequestBytes, &req); err != nil {
		return err
	}
	e, err := s.agent.RotateKey(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, e)
}

// RotateKey has the node take another key; see Agent.
func (c *Client) RotateKey(ctx context.Context) (e Encryption, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/encryption/rotate", RotateRequest{}, &e)
	return e, err
}

// AcceptedKeys says which keys of another node the kernel accepts; see Agent.
func (c *Client) AcceptedKeys(ctx context.Context, node string) (keys AcceptedKeys, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/encryption/accepted?node="+url.QueryEscape(node), nil, &keys)
	return keys, err
}

// collectEncryption gives the metrics of a node that encrypts, or has peers that it does not reach
// because they do.
func collectEncryption(e *Encryption, gauge func(d *prometheus.Desc, v float64, labels ...string), counter func(d *prometheus.Desc, v uint64, labels ...string)) {
	if e == nil {
		return
	}
	count := make(map[EncryptedPeerState]int)
	var sent, received uint64
	for _, p := range e.Peers {
		count[p.State]++
		sent, received = sent+p.Sent, received+p.Received
	}
	for _, state := range EncryptedPeerStates {
		gauge(encryptedPeersDesc, float64(count[state]), string(state))
	}
	if !e.Enabled {
		return
	}
	counter(encryptedBytesDesc, sent, "sent")
	counter(encryptedBytesDesc, received, "received")
	gauge(encryptionKeyDesc, float64(e.KeySince.UnixMilli())/1e3)
}

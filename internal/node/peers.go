package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/peerapi"
)

// peerKeyFile is the file of the agent's key for others, in the state directory.
const peerKeyFile = "peer.pem"

// peers is this agent among the others: it answers what they ask, and asks them. Start sets what it
// has.
type peers struct {
	*host
	identity *peerapi.Identity
	listener net.Listener // nil: it answers none
}

// listen opens the key and the port, and says what the node's record is to have of them. The
// records that say who may ask are read when somebody does: before Run there are none.
func (ps *peers) listen(ctx context.Context) (model.PeerAPI, error) {
	var err error
	if ps.identity, err = peerapi.Open(filepath.Join(ps.cfg.StateDir, peerKeyFile)); err != nil {
		return model.PeerAPI{}, err
	}
	if ps.cfg.PeerPort == 0 {
		return model.PeerAPI{}, nil
	}
	if ps.listener, err = ps.identity.Listen(ctx, netip.AddrPortFrom(ps.cfg.Underlay, ps.cfg.PeerPort), ps.knows); err != nil {
		return model.PeerAPI{}, fmt.Errorf("%w; choose another port with --peer-port", err)
	}
	return model.PeerAPI{Port: ps.cfg.PeerPort, Key: ps.identity.Key()}, nil
}

// knows reports whether key is a node's of this network.
func (ps *peers) knows(key string) bool {
	state, _ := ps.view.last()
	return slices.ContainsFunc(state.Nodes, func(n model.Node) bool { return n.PeerAPI.Key == key })
}

// AskNode asks the agent of another node.
func (ps *peers) AskNode(ctx context.Context, name, target string) (*http.Response, error) {
	state, _ := ps.view.last()
	i := slices.IndexFunc(state.Nodes, func(n model.Node) bool { return n.Name == name })
	if i < 0 {
		return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("no node %s in the network", name), Remedy: "`heddle nodes` lists them"}
	}
	n := state.Nodes[i]
	if n.PeerAPI.Port == 0 {
		return nil, &api.Error{Code: api.CodeUnsupported, Message: "its agent answers no others: it is of an earlier build, or started with --peer-port 0",
			Remedy: "ask on the node itself"}
	}
	resp, err := ps.identity.Get(ctx, netip.AddrPortFrom(n.Outer(), n.PeerAPI.Port), n.PeerAPI.Key, target)
	if err != nil && ctx.Err() == nil {
		return nil, &api.Error{Code: api.CodeUnavailable, Message: "does not answer: " + err.Error(), Remedy: "`heddle nodes` says whether its agent lives"}
	}
	return resp, err
}

package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// record is what an agent writes down of its node beside its sockets, where it lives as long as the
// machine runs, as containers do. The store has the same; the record is for the day the store has
// lost it, and for heddle-runtime. Each endpoint has a file of its own (endpointfile): a change
// costs what it is.
type record struct {
	// Schema is the revision of the store's schema that a reader must know; 0: the first, which
	// every build reads.
	Schema   int             `json:"schema,omitempty"`
	Node     string          `json:"node"`
	Network  model.NetworkID `json:"network"`
	Prefixes []netip.Prefix  `json:"prefixes"`
	// Endpoints are in this file where an earlier build has written it.
	Endpoints []model.Endpoint `json:"endpoints,omitempty"`
	// Moves are those of the endpoints that came from other nodes.
	Moves []model.Move `json:"moves,omitempty"`
}

func (c Config) recordPath() string { return filepath.Join(c.recordDir(), endpointfile.Node) }

func (c Config) recordDir() string { return filepath.Dir(c.APISocket) }

// readRecord reads what an earlier agent of this node wrote down: an empty record if there is none,
// or if it is another node's or network's.
func readRecord(cfg Config) (record, error) {
	raw, err := os.ReadFile(cfg.recordPath())
	if errors.Is(err, os.ErrNotExist) || err == nil && len(raw) == 0 { // empty: the machine lost its power
		return record{}, nil
	}
	if err != nil {
		return record{}, fmt.Errorf("read record of endpoints: %w", err)
	}
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return record{}, fmt.Errorf("record of endpoints %s: %w", cfg.recordPath(), err)
	}
	if err := store.CheckSchema(r.Schema); err != nil {
		return record{}, fmt.Errorf("record of endpoints %s: %w", cfg.recordPath(), err)
	}
	if r.Node != cfg.Name || r.Network != cfg.Network.ID {
		return record{}, nil
	}
	files, err := endpointfile.All(cfg.recordDir())
	if err != nil {
		return record{}, fmt.Errorf("record of endpoints: %w", err)
	}
	for _, e := range files { // an earlier build's file has none beside it
		if e.Node == r.Node {
			r.Endpoints = append(r.Endpoints, e)
		}
	}
	return r, nil
}

// saveNode writes down what is not of one endpoint. It does not wait for a disk: the record has to
// outlive the agent, not the machine and its containers.
func (h *host) saveNode() {
	r := record{Node: h.self.Name, Network: h.network.ID, Prefixes: h.self.Prefixes}
	for _, m := range h.known.moves() {
		if h.known.holds(m.Addr) {
			r.Moves = append(r.Moves, m)
		}
	}
	raw, err := json.Marshal(r)
	if err == nil {
		err = endpointfile.Write(h.cfg.recordPath(), append(raw, '\n'))
	}
	h.unsaved(err)
}

// saveEndpoint writes down an endpoint as it is known now. That the store has one that the record
// lacks does no harm; the other way round the endpoint would come back.
func (h *host) saveEndpoint(id model.EndpointID) {
	e, ok := h.known.withID(id)
	if !ok {
		return // it is being made: it is written down when it is done
	}
	inode, _ := h.known.netnsOf(id)
	raw, err := json.Marshal(e)
	if err == nil {
		err = h.files.Put(id, inode, raw)
	}
	h.unsaved(err)
	if _, moved := h.known.moveOf(e.Addr4()); moved {
		h.saveNode()
	}
}

// dropEndpoint takes an endpoint out of the record. Its move, if it came by one, stays until the
// next time that moves are written down: it is of no use alone.
func (h *host) dropEndpoint(id model.EndpointID) { h.unsaved(h.files.Delete(id)) }

// saveAll writes down all that is known, and nothing else.
func (h *host) saveAll() {
	h.saveNode()
	for _, e := range h.known.all() {
		h.saveEndpoint(e.ID)
	}
	h.unsaved(h.files.Keep())
}

func (h *host) unsaved(err error) {
	if err != nil {
		h.log.Error("endpoints will be lost if the store is", "err", err)
	}
}

// lost gives the endpoints of the record that a state of the store does not have and that could
// live beside those it has.
func (r record) lost(state store.State) (lost []model.Endpoint) {
	ids, names := make(map[model.EndpointID]bool), make(map[string]bool)
	for e := range state.Endpoints.Groups(r.Node).All() {
		ids[e.ID], names[e.Name] = true, true
	}
	for _, e := range r.Endpoints {
		if e.Node == r.Node && !ids[e.ID] && !names[e.Name] {
			lost = append(lost, e)
		}
	}
	return lost
}

// knowsNode reports whether the store has this node.
func knowsNode(state store.State, name string) bool {
	return slices.ContainsFunc(state.Nodes, func(n model.Node) bool { return n.Name == name })
}

// firstState reads what the store holds.
func firstState(ctx context.Context, s store.Store) (store.State, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	states, err := s.Watch(ctx)
	if err != nil {
		return store.State{}, fmt.Errorf("read store: %w", err)
	}
	state, ok := <-states
	if !ok {
		return store.State{}, errors.New("read store: it closed")
	}
	return state, nil
}

// register makes this node one of the network's. If the store does not know it although it has
// endpoints, because the store was lost, it asks for the prefixes it had: its containers have
// addresses in them.
func register(ctx context.Context, s store.Store, r record, want model.Node, log *slog.Logger) (model.Node, error) {
	if len(want.Prefixes) == 0 && len(r.Endpoints) > 0 {
		state, err := firstState(ctx, s)
		if err != nil {
			return model.Node{}, err
		}
		if !knowsNode(state, want.Name) {
			again := want
			again.Prefixes = r.Prefixes
			n, err := s.JoinNode(ctx, again)
			if err == nil {
				log.Warn("the store had lost this node; it has its prefixes again", "prefixes", n.Prefixes)
				return n, nil
			}
			var taken *store.OverlapError
			if !errors.As(err, &taken) {
				return model.Node{}, err
			}
			log.Error("the store had lost this node, and its prefixes cannot be had again: restart its containers", "err", err)
		}
	}
	return s.JoinNode(ctx, want)
}

// adopt gives the store back the endpoints of r that it has lost whose containers live on, and
// returns them. Others are refused: the containers keep running, without a network.
func adopt(ctx context.Context, s store.Store, r record, state store.State, alive func(model.Endpoint) error, log *slog.Logger) (adopted []model.Endpoint) {
	for _, e := range r.lost(state) {
		if alive(e) != nil {
			continue // it ended while no agent ran
		}
		if err := giveBack(ctx, s, r, e); err != nil {
			log.Error("endpoint that the store had lost is refused: its container has no network, and gets ENETDOWN for new TCP sockets; restart it",
				"endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "err", err)
			continue
		}
		log.Warn("endpoint that the store had lost is adopted", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs)
		adopted = append(adopted, e)
	}
	return adopted
}

// giveBack puts an endpoint into a store that has lost it, after the move that brought it to this
// node, if any.
func giveBack(ctx context.Context, s store.Store, r record, e model.Endpoint) error {
	for _, m := range r.Moves {
		if m.Addr != e.Addr4() || m.Node != r.Node {
			continue
		}
		if err := s.KeepMove(ctx, m); err != nil {
			return err
		}
	}
	return s.PutEndpoint(ctx, e)
}

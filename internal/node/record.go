package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// record is what an agent writes down of its node beside its sockets, where it lives as long as the
// machine runs, as containers do. The store has the same; the record is for the day the store has
// lost it.
type record struct {
	// Schema is the revision of the store's schema that a reader must know; 0: the first, which
	// every build reads.
	Schema   int             `json:"schema,omitempty"`
	Node     string          `json:"node"`
	Network  model.NetworkID `json:"network"`
	Prefixes []netip.Prefix  `json:"prefixes"`
	// Endpoints are written one by one (write).
	Endpoints []model.Endpoint `json:"endpoints,omitempty"`
	// Moves are those of the endpoints that came from other nodes.
	Moves []model.Move `json:"moves,omitempty"`
}

func (c Config) recordPath() string { return filepath.Join(filepath.Dir(c.APISocket), "node.json") }

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
	return r, nil
}

// write replaces the record at path in one step, with endpoints as encoded, and without r's. It
// does not wait for a disk: the record has to outlive the agent, not the machine and its
// containers.
func (r record) write(path string, endpoints [][]byte) error {
	r.Endpoints = nil
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write record of endpoints: %w", err)
	}
	next := path + ".new"
	if err := writeParts(next, append(raw[:len(raw)-1], `,"endpoints":[`...), endpoints, "]}\n"); err != nil {
		return fmt.Errorf("write record of endpoints: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write record of endpoints: %w", err)
	}
	return nil
}

// recordBuffer is how much of a record is written at once, in bytes.
const recordBuffer = 1 << 15

// writeParts makes the file at path of a list, what is before and what is behind it, without one
// copy of all of it.
func writeParts(path string, before []byte, list [][]byte, behind string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, recordBuffer)
	_, _ = w.Write(before) // Flush says if one failed
	for i, part := range list {
		if i > 0 {
			_ = w.WriteByte(',')
		}
		_, _ = w.Write(part)
	}
	_, _ = w.WriteString(behind)
	return errors.Join(w.Flush(), f.Close())
}

// saveRecord writes down the endpoints there are, but for except, which is being deleted. That the
// store has an endpoint the record lacks does no harm; the other way round the endpoint would come
// back.
func (h *host) saveRecord(except model.EndpointID) {
	r := record{Node: h.self.Name, Network: h.network.ID, Prefixes: h.self.Prefixes}
	for _, m := range h.known.moves() {
		if id, here := h.known.withAddr(m.Addr); here && id != except {
			r.Moves = append(r.Moves, m)
		}
	}
	endpoints, err := h.known.encodings(except)
	if err == nil {
		err = r.write(h.cfg.recordPath(), endpoints)
	}
	if err != nil {
		h.log.Error("endpoints will be lost if the store is", "err", err)
	}
}

// lost gives the endpoints of the record that a state of the store does not have and that could
// live beside those it has.
func (r record) lost(state store.State) (lost []model.Endpoint) {
	for _, e := range r.Endpoints {
		known := slices.ContainsFunc(state.Endpoints.Of(r.Node), func(k model.Endpoint) bool { return k.ID == e.ID || k.Name == e.Name })
		if e.Node == r.Node && !known {
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
func adopt(ctx context.Context, s store.Store, r record, state store.State, alive func(netnsPath string) error, log *slog.Logger) (adopted []model.Endpoint) {
	for _, e := range r.lost(state) {
		if alive(e.NetnsPath) != nil {
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

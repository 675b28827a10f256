package node

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// memory is the part of a store that joining and adopting need. taken are prefixes other nodes
// have.
type memory struct {
	store.Store
	state store.State
	taken []netip.Prefix
	joins []model.Node
}

func (m *memory) Watch(ctx context.Context) (<-chan store.State, error) {
	ch := make(chan store.State, 1)
	ch <- m.state
	return ch, nil
}

func (m *memory) JoinNode(_ context.Context, n model.Node) (model.Node, error) {
	m.joins = append(m.joins, n)
	for _, p := range n.Prefixes {
		if slices.Contains(m.taken, p) {
			return model.Node{}, &store.OverlapError{Prefix: p, With: "another node's"}
		}
	}
	if len(n.Prefixes) == 0 {
		n.Prefixes = prefixes("10.244.9.0/24")
	}
	return n, nil
}

func (m *memory) PutEndpoint(_ context.Context, e model.Endpoint) error {
	if !netip.MustParsePrefix("10.244.1.0/24").Contains(e.Addr4()) {
		return &store.AddrOutsideError{Addr: e.Addr4(), Node: e.Node, Why: "not in the prefixes of"}
	}
	m.state.Endpoints = model.EndpointsOf(append(slices.Collect(m.state.Endpoints.All()), e)...)
	return nil
}

func prefixes(s ...string) (out []netip.Prefix) {
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func endpointOf(id model.EndpointID, name, addr string) model.Endpoint {
	return model.Endpoint{
		ID: id, Name: name, Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: true}},
		NetnsPath: "/run/netns/" + name, Created: time.Unix(1, 0).UTC(),
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestRecordIsWhatWasWritten(t *testing.T) {
	cfg := Config{Name: "n1", Network: store.Network{ID: 3}, APISocket: filepath.Join(t.TempDir(), "api.sock")}
	if r, err := readRecord(cfg); err != nil || !reflect.DeepEqual(r, record{}) {
		t.Errorf("no record: %+v, %v", r, err)
	}
	want := record{Node: "n1", Network: 3, Prefixes: prefixes("10.244.1.0/24"), Endpoints: []model.Endpoint{endpointOf(7, "c1", "10.244.1.2")}}
	h := recordingHost(cfg.recordDir())
	h.known.add(endpointOf(9, "c2", "10.244.1.3"))
	h.known.add(endpointOf(7, "other", "10.244.1.2"))
	h.known.setNetns(7, 77)
	h.saveAll()
	h.dropEndpoint(9)
	h.known.add(want.Endpoints[0])
	h.saveEndpoint(7)
	if got, err := readRecord(cfg); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if st, err := os.Stat(cfg.recordPath()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	for _, other := range []Config{
		{Name: "n2", Network: cfg.Network, APISocket: cfg.APISocket}, {Name: "n1", Network: store.Network{ID: 4}, APISocket: cfg.APISocket},
	} {
		if r, err := readRecord(other); err != nil || len(r.Endpoints) != 0 {
			t.Errorf("record of another node or network is taken for %s of %d: %+v, %v", other.Name, other.Network.ID, r, err)
		}
	}
	h.dropEndpoint(7) // what follows was written before endpoints had files
	for what, c := range map[string]struct {
		raw  string
		want bool // its endpoint is known, and intercepted
	}{
		"of the schema's first revision": {`{"node":"n1","network":3,"prefixes":["10.244.1.0/24"],"endpoints":[{"id":7,"name":"c1","node":"n1","addrs":["10.244.1.2"],"intercepted":true,` +
			`"netns_path":"/run/netns/c1","created":"1970-01-01T00:00:01Z"}]}`, true},
		"of a later revision": {`{"schema":6,"node":"n1","network":3,"endpoints":[{"id":7,"name":"c1","node":"n1","addrs":["10.244.1.2"],"intercepted":true}]}`, false},
	} {
		if err := os.WriteFile(cfg.recordPath(), []byte(c.raw), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := readRecord(cfg)
		var later *store.SchemaError
		if c.want && (err != nil || !reflect.DeepEqual(r, want)) || !c.want && (!errors.As(err, &later) || len(r.Endpoints) != 0) {
			t.Errorf("%s: %+v, %v", what, r, err)
		}
	}
	if err := os.WriteFile(cfg.recordPath(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := readRecord(cfg); err != nil || len(r.Endpoints) != 0 {
		t.Errorf("an empty record: %+v, %v", r, err)
	}
	if err := os.WriteFile(cfg.recordPath(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := readRecord(cfg); err == nil || len(r.Endpoints) != 0 {
		t.Errorf("half a record: %+v, %v", r, err)
	}
}

// TestRecordOfMany: a change of one of many endpoints writes its file, and no other one.
func TestRecordOfMany(t *testing.T) {
	h := recordingHost(t.TempDir())
	for _, e := range crowd(1000) {
		h.known.add(e)
		h.known.setNetns(e.ID, uint64(e.ID)+5000)
	}
	h.saveAll()
	old := time.Unix(1, 0)
	written := func() (out []string) {
		err := filepath.WalkDir(h.cfg.recordDir(), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			info, err := d.Info()
			if err == nil && !info.ModTime().Equal(old) {
				out = append(out, filepath.Base(path))
				err = os.Chtimes(path, old, old)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if n := len(written()); n != 1001 {
		t.Fatalf("%d files, want one for each endpoint and the node's", n)
	}
	e, _ := h.known.withID(500)
	e.Labels = map[string]string{"app": "db"}
	h.known.add(e)
	h.saveEndpoint(500)
	if now := written(); !slices.Equal(now, []string{"5500"}) {
		t.Errorf("written for one endpoint: %v", now)
	}
	h.saveAll()
	if now := written(); !slices.Equal(now, []string{"node.json"}) {
		t.Errorf("written although nothing has changed: %v", now)
	}
	r, err := readRecord(h.cfg)
	if err != nil || len(r.Endpoints) != 1000 {
		t.Fatalf("%d endpoints read, %v", len(r.Endpoints), err)
	}
}

func TestRegister(t *testing.T) {
	r := record{Node: "n1", Prefixes: prefixes("10.244.1.0/24"), Endpoints: []model.Endpoint{endpointOf(7, "c1", "10.244.1.2")}}
	known := store.State{Nodes: []model.Node{{Name: "n1"}}}
	for name, c := range map[string]struct {
		record record
		store  memory
		asked  []netip.Prefix // by the flag
		want   []netip.Prefix
		joins  int
	}{
		"first start":                       {want: prefixes("10.244.9.0/24"), joins: 1},
		"the store knows the node":          {record: r, store: memory{state: known}, want: prefixes("10.244.9.0/24"), joins: 1},
		"the store was lost":                {record: r, want: prefixes("10.244.1.0/24"), joins: 1},
		"lost, and the prefix is another's": {record: r, store: memory{taken: r.Prefixes}, want: prefixes("10.244.9.0/24"), joins: 2},
		"lost, with a prefix by flag":       {record: r, asked: prefixes("10.244.4.0/24"), want: prefixes("10.244.4.0/24"), joins: 1},
		"lost, without endpoints":           {record: record{Node: "n1", Prefixes: r.Prefixes}, want: prefixes("10.244.9.0/24"), joins: 1},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := register(t.Context(), &c.store, c.record, model.Node{Name: "n1", Prefixes: c.asked}, quiet())
			if err != nil || !slices.Equal(n.Prefixes, c.want) || len(c.store.joins) != c.joins {
				t.Errorf("%v, %v after %d joins; want %v after %d", n.Prefixes, err, len(c.store.joins), c.want, c.joins)
			}
		})
	}
}

func TestAdopt(t *testing.T) {
	lives, ended := endpointOf(7, "lives", "10.244.1.2"), endpointOf(8, "ended", "10.244.1.3")
	outside, sameID := endpointOf(9, "outside", "10.244.5.2"), endpointOf(10, "same-id", "10.244.1.5")
	sameName := endpointOf(11, "new", "10.244.1.6")
	r := record{Node: "n1", Endpoints: []model.Endpoint{lives, ended, outside, sameID, sameName}}
	s := &memory{state: store.State{Endpoints: model.EndpointsOf(endpointOf(10, "x", "10.244.1.7"), endpointOf(12, "new", "10.244.1.8"),
		model.Endpoint{ID: 7, Name: "lives", Node: "n2"})}} // another node's
	alive := func(e model.Endpoint) error {
		if e.Name == ended.Name {
			return errors.New("gone")
		}
		return nil
	}
	got := adopt(t.Context(), s, r, s.state, alive, quiet())
	if len(got) != 1 || got[0].ID != lives.ID {
		t.Errorf("adopted %+v, want endpoint 7 only", got)
	}
	if again := adopt(t.Context(), s, r, s.state, alive, quiet()); len(again) != 0 {
		t.Errorf("adopted once more: %+v", again)
	}
}

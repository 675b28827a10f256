package store

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// old reads a value as the last build of the schema's first revision wrote it: testdata/schema1 has
// the bytes.
func old(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "schema1", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What a reader of revision 1 knows of nodes and endpoints.
type (
	oldNode struct {
		Name        string          `json:"name"`
		Underlay    netip.Addr      `json:"underlay"`
		Prefixes    []netip.Prefix  `json:"prefixes"`
		VTEPMAC     string          `json:"vtep_mac"`
		DirectPorts model.PortRange `json:"direct_ports"`

		AnswersProbes bool `json:"answers_probes,omitempty"`
	}
	oldEndpoint struct {
		ID          model.EndpointID     `json:"id"`
		Name        string               `json:"name"`
		Node        string               `json:"node"`
		Addrs       []netip.Addr         `json:"addrs"`
		Intercepted bool                 `json:"intercepted"`
		NetnsPath   string               `json:"netns_path"`
		Device      string               `json:"device,omitempty"`
		Adopted     *model.Adopted       `json:"carried,omitempty"`
		CNI         *model.CNIAttachment `json:"cni,omitempty"`
		Labels      map[string]string    `json:"labels,omitempty"`
		Limits      *model.Limits        `json:"limits,omitempty"`
		Created     time.Time            `json:"created"`
	}
)

func oldReader[T any](t *testing.T, value []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(value, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// TestSchemaUpgrade: values of revision 1 mean what they meant, and what this build writes of them
// means the same to readers of either revision.
func TestSchemaUpgrade(t *testing.T) {
	n, err := ParseNode("n1", old(t, "node"))
	if want := (model.TCPNode{DirectPorts: model.DefaultDirectPorts, AnswersProbes: true}); err != nil || n.Planes.TCP != want || n.ReadsSchema != 0 {
		t.Errorf("node: %+v, %v, want %+v of TCP and no schema", n, err, want)
	}
	n.ReadsSchema = Schema
	value, err := EncodeNode(n)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ParseNode("n1", value); err != nil || !reflect.DeepEqual(again, n) {
		t.Errorf("node %s: read as %+v, %v, want %+v", value, again, err, n)
	}
	if got, want := oldReader[oldNode](t, value), oldReader[oldNode](t, old(t, "node")); !reflect.DeepEqual(got, want) {
		t.Errorf("node: a reader of revision 1 sees %+v, want %+v", got, want)
	}
	for name, id := range map[string]model.EndpointID{"endpoint": 7, "carried": 8} {
		e, err := ParseEndpoint("n1", id, old(t, name))
		if err != nil || e.Planes.TCP.Intercepted != (id == 7) {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
		value, err := EncodeEndpoint(e)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseEndpoint("n1", id, value); err != nil || !reflect.DeepEqual(again, e) {
			t.Errorf("%s %s: read as %+v, %v, want %+v", name, value, again, err, e)
		}
		if got, want := oldReader[oldEndpoint](t, value), oldReader[oldEndpoint](t, old(t, name)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: a reader of revision 1 sees %+v, want %+v", name, got, want)
		}
	}
}

// TestSchemaPlanesHold: where there is "planes", it says what holds, also of a plane that it leaves
// out.
func TestSchemaPlanesHold(t *testing.T) {
	with := func(planes string) []byte {
		return []byte(strings.Replace(string(old(t, "endpoint")), "{", `{"planes":`+planes+`,`, 1))
	}
	for planes, want := range map[string]bool{
		`{"tcp":{"intercepted":true}}`:                  true,
		`{"tcp":{"intercepted":false}}`:                 false,
		`{"later":{"x":1}}`:                             false,
		`{"tcp":{"intercepted":true,"x":1},"later":{}}`: true,
	} {
		if e, err := ParseEndpoint("n1", 7, with(planes)); err != nil || e.Planes.TCP.Intercepted != want {
			t.Errorf("%s: %+v, %v, want intercepted %v", planes, e.Planes, err, want)
		}
	}
	if e, err := ParseEndpoint("n1", 7, with(`{"tcp":{"intercepted":1}}`)); err == nil {
		t.Errorf("read as %+v, want an error", e)
	}
}

// TestSchemaMixed: a state has nodes and endpoints of either revision beside each other.
func TestSchemaMixed(t *testing.T) {
	k := KeysOf(1)
	v := NewView(k, slog.New(slog.DiscardHandler), func() { t.Error("a value is invalid") })
	v.Set(k.Node("n1"), old(t, "node"), 1)
	v.Set(k.Endpoint("n1", 7), old(t, "endpoint"), 2)
	n2 := model.Node{Name: "n2", Underlay: netip.MustParseAddr("10.0.0.2"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.1.1.0/24")}, ReadsSchema: Schema,
		Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: model.DefaultDirectPorts}}}
	e2 := model.Endpoint{ID: 1, Name: "n2/c1", Node: "n2", Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.2")},
		Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: true}}}
	node, errN := EncodeNode(n2)
	endpoint, errE := EncodeEndpoint(e2)
	if err := errors.Join(errN, errE); err != nil {
		t.Fatal(err)
	}
	v.Set(k.Node("n2"), node, 3)
	v.Set(k.Endpoint("n2", 1), endpoint, 4)
	s := v.State(4)
	if len(s.Nodes) != 2 || !s.Nodes[0].Direct() || !s.Nodes[1].Direct() || s.Nodes[0].ReadsSchema != 0 || s.Nodes[1].ReadsSchema != Schema {
		t.Errorf("nodes %+v", s.Nodes)
	}
	for _, name := range []string{"n1", "n2"} {
		if es := s.Endpoints.Of(name); len(es) != 1 || !es[0].Planes.TCP.Intercepted {
			t.Errorf("endpoints of %s: %+v", name, es)
		}
	}
}

// TestSchemaLater: a network whose values need a later build is refused, with what to do.
func TestSchemaLater(t *testing.T) {
	if n, err := ParseNetwork(1, old(t, "network")); err != nil || n.Schema != 0 {
		t.Errorf("%+v, %v", n, err)
	}
	with := func(schema string) []byte {
		return []byte(strings.Replace(string(old(t, "network")), "{", `{"schema":`+schema+`,`, 1))
	}
	for _, known := range []string{"1", "2", "3", "4", "5"} {
		if _, err := ParseNetwork(1, with(known)); err != nil {
			t.Errorf("schema %s: %v", known, err)
		}
	}
	for _, unknown := range []string{"6", "-1"} {
		_, err := ParseNetwork(1, with(unknown))
		var schema *SchemaError
		if !errors.As(err, &schema) || !strings.Contains(err.Error(), "install here the build") {
			t.Errorf("schema %s: %v, want a *SchemaError that says what to do", unknown, err)
		}
	}
}

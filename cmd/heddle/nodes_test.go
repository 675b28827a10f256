package main

import (
	"bytes"
	"errors"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// inspectNodes are a network's nodes: one that lives, one whose agent is gone, one that is dead.
func inspectNodes() []api.Node {
	node := func(name string, host byte, state api.NodeState) api.Node {
		return api.Node{Presence: api.Presence{State: state, Since: inspectNow.Add(-time.Hour), Endpoints: int(host)}, Node: model.Node{Name: name,
			Underlay: netip.AddrFrom4([4]byte{192, 0, 2, host}), Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, host, 0}), 24)}}}
	}
	away := node("n2", 2, api.NodeAway)
	away.Seen = inspectNow.Add(-time.Minute)
	return []api.Node{node("n1", 1, api.NodeLive), away, node("n3", 3, api.NodeDead)}
}

func forgetInspected(name string) error {
	switch name {
	case "n3":
		return nil
	case "n1":
		return &api.Error{Code: api.CodeConflict, Message: "it is live"}
	}
	return api.ErrNotFound
}

func TestNodes(t *testing.T) {
	var b bytes.Buffer
	// Of what two agents say, the one that knows a node best counts.
	doubt := inspectNodes()
	doubt[0].State, doubt[1].State, doubt[1].Seen = api.NodeAway, api.NodeDead, time.Time{}
	if err := printNodes(&b, likeliest([][]api.Node{doubt, inspectNodes()}), inspectNow); err != nil {
		t.Fatal(err)
	}
	golden(t, "nodes.txt", b.String())

	socket := filepath.Join(t.TempDir(), "api.sock")
	startAgent(t, socket, "n1")
	if out, err := runInspect(t, newNodesCmd(), "forget", "n3", "--api", socket); err != nil || out != "node n3 is forgotten\n" {
		t.Errorf("forget n3: %q, %v", out, err)
	}
	if _, err := runInspect(t, newNodesCmd(), "forget", "n1", "--api", socket); !errors.Is(err, &api.Error{Code: api.CodeConflict}) {
		t.Errorf("forget a live node: %v", err)
	}
	if _, err := runInspect(t, newNodesCmd(), "forget", "n9", "--api", socket); !errors.Is(err, api.ErrNotFound) {
		t.Errorf("forget an unknown node: %v", err)
	}
	if _, err := runInspect(t, newNodesCmd(), "forget", "../x", "--api", socket); err == nil {
		t.Error("a name that is none is taken")
	}
}

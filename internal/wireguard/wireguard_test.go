package wireguard

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestKeysAreKept: the same keys after a restart, at every step of a change, and nobody else can
// read them.
func TestKeysAreKept(t *testing.T) {
	dir := t.TempDir()
	open := func() *Keys {
		t.Helper()
		k, err := OpenKeys(dir)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	first := open()
	if first.Public().IsZero() || !first.Next().IsZero() || open().Public() != first.Public() || public(first.Private()) != first.Public() {
		t.Fatalf("keys %v, %v", first.Public(), first.Next())
	}
	if err := first.MakeNext(); err != nil {
		t.Fatal(err)
	}
	next := first.Next()
	if err := first.MakeNext(); err != nil || first.Next() != next {
		t.Errorf("a second next key: %v, %v", first.Next(), err)
	}
	again := open()
	if again.Public() != first.Public() || again.Next() != next || next.IsZero() {
		t.Errorf("after a restart %v, %v, want %v, %v", again.Public(), again.Next(), first.Public(), next)
	}
	for _, name := range StateFiles {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v, want mode 0600", name, info.Mode(), err)
		}
	}
	if err := again.Switch(); err != nil {
		t.Fatal(err)
	}
	if last := open(); again.Public() != next || last.Public() != next || !last.Next().IsZero() {
		t.Errorf("after the switch %v, %v, want %v and none", last.Public(), last.Next(), next)
	}
	if err := again.Switch(); err == nil {
		t.Error("a switch without a next key")
	}
}

// TestSwitchKilled: an agent that is killed between the two steps of a switch has made it.
func TestSwitchKilled(t *testing.T) {
	dir := t.TempDir()
	k, err := OpenKeys(dir)
	if err == nil {
		err = k.MakeNext()
	}
	if err != nil {
		t.Fatal(err)
	}
	next := k.Next()
	if err := writeKey(filepath.Join(dir, keyFile), k.next); err != nil {
		t.Fatal(err)
	}
	if k, err = OpenKeys(dir); err != nil || k.Public() != next || !k.Next().IsZero() {
		t.Errorf("%v, %v, %v, want %v and no next one", k.Public(), k.Next(), err, next)
	}
	if _, err := os.Stat(filepath.Join(dir, nextFile)); !os.IsNotExist(err) {
		t.Errorf("the file of the next key: %v", err)
	}
}

// TestBadKeys: a key that does not fit is refused with what to do, and is not replaced.
func TestBadKeys(t *testing.T) {
	for what, c := range map[string]struct {
		raw  string
		mode os.FileMode
		want string
	}{
		"no key":    {"x\n", 0o600, "remove the file"},
		"short":     {"AAAA\n", 0o600, "remove the file"},
		"zero":      {strings.Repeat("A", 43) + "=\n", 0o600, "it is zero"},
		"for all":   {strings.Repeat("B", 42) + "A=\n", 0o644, "chmod 600"},
		"two lines": {strings.Repeat("B", 42) + "A=\n\n", 0o600, "remove the file"},
	} {
		for _, name := range StateFiles {
			dir := t.TempDir()
			if _, err := OpenKeys(dir); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, name)
			_ = os.Remove(path)
			if err := os.WriteFile(path, []byte(c.raw), c.mode); err != nil {
				t.Fatal(err)
			}
			if _, err := OpenKeys(dir); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s, %s: %v, want %q", what, name, err, c.want)
			}
			if raw, err := os.ReadFile(path); err != nil || !bytes.Equal(raw, []byte(c.raw)) {
				t.Errorf("%s, %s: the file was changed", what, name)
			}
		}
	}
}

func node(i byte) model.Node {
	return model.Node{Name: "n" + string('0'+rune(i)), Underlay: netip.AddrFrom4([4]byte{100, 72, 0, i}), WireGuard: model.WireGuardNode{
		Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, i}), 51872), Prefix: netip.MustParsePrefix("100.72.0.0/16"), Key: model.PublicKey{i},
	}}
}

// TestPeers: who is a peer by which key, who is left out and why; nobody takes a key from who uses
// it by naming it as his next.
func TestPeers(t *testing.T) {
	self := node(1)
	self.WireGuard.Next = model.PublicKey{11}
	edit := func(i byte, f func(*model.Node)) model.Node { n := node(i); f(&n); return n }
	plain := model.Node{Name: "n9", Underlay: netip.MustParseAddr("192.0.2.9")}
	peer := func(i byte) Peer {
		n := node(i)
		return Peer{Node: n.Name, Key: n.WireGuard.Key, Endpoint: n.WireGuard.Endpoint, Inner: n.Underlay}
	}
	accepted := func(i byte, key byte) Peer {
		return Peer{Node: node(i).Name, Key: model.PublicKey{key}, Endpoint: node(i).WireGuard.Endpoint}
	}
	next := func(key byte) func(*model.Node) {
		return func(n *model.Node) { n.WireGuard.Next = model.PublicKey{key} }
	}
	for what, c := range map[string]struct {
		self  model.Node
		nodes []model.Node
		peers []Peer
		unfit map[string]model.PlainReason
	}{
		"alone":         {self, []model.Node{self}, nil, nil},
		"two":           {self, []model.Node{self, node(2), node(3)}, []Peer{peer(2), peer(3)}, nil},
		"next":          {self, []model.Node{edit(2, next(12)), self}, []Peer{peer(2), accepted(2, 12)}, nil},
		"next is taken": {self, []model.Node{edit(2, next(3)), node(3)}, []Peer{peer(2), peer(3)}, nil},
		"next is mine":  {self, []model.Node{edit(2, next(1)), edit(3, next(11))}, []Peer{peer(2), peer(3)}, nil},
		"plain":         {self, []model.Node{plain, node(2)}, []Peer{peer(2)}, map[string]model.PlainReason{"n9": model.PeerPlain}},
		"other prefix": {self, []model.Node{edit(2, func(n *model.Node) { n.WireGuard.Prefix = netip.MustParsePrefix("100.72.0.0/17") })}, nil,
			map[string]model.PlainReason{"n2": model.OtherPrefix}},
		"copied": {self, []model.Node{edit(3, func(n *model.Node) { n.WireGuard.Key = model.PublicKey{2} }), node(2)}, []Peer{peer(2)},
			map[string]model.PlainReason{"n3": model.SameKey}},
		"my key": {self, []model.Node{edit(2, func(n *model.Node) { n.WireGuard.Key = model.PublicKey{1} }),
			edit(3, func(n *model.Node) { n.WireGuard.Key = model.PublicKey{11} })}, nil, map[string]model.PlainReason{"n2": model.SameKey, "n3": model.SameKey}},
		"my place": {self, []model.Node{edit(2, func(n *model.Node) { n.WireGuard.Endpoint = self.WireGuard.Endpoint })}, nil,
			map[string]model.PlainReason{"n2": model.SameEndpoint}},
		"I am plain": {plain, []model.Node{node(2), plain, {Name: "n8", Underlay: netip.MustParseAddr("192.0.2.8")}}, nil,
			map[string]model.PlainReason{"n2": model.SelfPlain}},
	} {
		peers, unfit := Peers(c.self, c.nodes)
		if !slices.Equal(peers, c.peers) || len(unfit)+len(c.unfit) > 0 && !reflect.DeepEqual(unfit, c.unfit) {
			t.Errorf("%s: %v, %v, want %v, %v", what, peers, unfit, c.peers, c.unfit)
		}
		for _, n := range Fit(c.nodes, unfit) {
			if unfit[n.Name] != "" {
				t.Errorf("%s: Fit leaves %s", what, n.Name)
			}
		}
	}
	nodes := []model.Node{self, node(2)}
	if fit := Fit(nodes, nil); &fit[0] != &nodes[0] {
		t.Error("Fit copies a list of which it takes nothing")
	}
}

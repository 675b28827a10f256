package verbs

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, t := range texts {
		all = append(all, netip.MustParseAddr(t))
	}
	return all
}

// device makes a folder of a card as the kernel has it.
func device(t *testing.T, lid string, gids ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	top := filepath.Join(dir, "mlx5_0", port)
	if err := os.MkdirAll(filepath.Join(top, "gids"), 0o755); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"lid": lid}
	for i, gid := range gids {
		files["gids/"+strconv.Itoa(i)] = gid + "\n"
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(top, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReadCard(t *testing.T) {
	const none = "0000:0000:0000:0000:0000:0000:0000:0000"
	dir := device(t, "0x1c\n", "fe80:0000:0000:0000:5054:00ff:fe00:0001", "fe80:0000:0000:0000:5054:00ff:fe00:0001", none,
		"0000:0000:0000:0000:0000:ffff:0a01:0001", "0000:0000:0000:0000:0000:ffff:0a01:0001", none)
	card, err := readCard(dir, "mlx5_0")
	want := &model.VerbsCard{LID: 0x1c, GIDs: addrs("::ffff:10.1.0.1", "fe80::5054:ff:fe00:1")}
	if err != nil || !reflect.DeepEqual(card, want) {
		t.Errorf("%+v, %v; want %+v", card, err, want)
	}
	if card, err := readCard(device(t, "0x0", none, none), "mlx5_0"); card != nil || err != nil {
		t.Errorf("without addresses: %v, %v", card, err)
	}
	var many []string
	for i := range 20 {
		many = append(many, "fe80::"+strconv.Itoa(i+1))
	}
	card, err = readCard(device(t, "0x0", append(many, "::ffff:10.0.0.1")...), "mlx5_0")
	if err != nil || len(card.GIDs) != model.MaxCardGIDs || card.GIDs[0] != netip.MustParseAddr("::ffff:10.0.0.1") {
		t.Errorf("of many: %v, %v", card, err)
	}
	for _, lid := range []string{"", "0x10000", "one"} {
		if card, err := readCard(device(t, lid, "fe80::1"), "mlx5_0"); err == nil {
			t.Errorf("lid %q: %+v", lid, card)
		}
	}
	if card, err := readCard(device(t, "0x0", "10.0.0"), "mlx5_0"); err == nil {
		t.Errorf("no address: %+v", card)
	}
}

// TestCardOf: the card is that of the node where the endpoint lives, whoever says what.
func TestCardOf(t *testing.T) {
	card := &model.VerbsCard{GIDs: addrs("::ffff:10.1.0.2")}
	m := members{
		nodes: []model.Node{{Name: "n1"}, {Name: "n2", Planes: model.NodePlanes{Verbs: model.VerbsNode{Card: card}}}},
		endpoints: model.EndpointsOf(
			model.Endpoint{ID: 1, Node: "n1", Addrs: addrs("10.244.0.3", "fd00::3")},
			model.Endpoint{ID: 1, Node: "n2", Addrs: addrs("10.244.1.3", "fd00::1:3")},
			model.Endpoint{ID: 2, Node: "gone", Addrs: addrs("10.244.2.3")}),
	}
	for addr, want := range map[string]*model.VerbsCard{
		"10.244.0.3": nil, "10.244.1.3": card, "::ffff:10.244.1.3": card, "fd00::1:3": card, "10.244.1.4": nil, "10.244.2.3": nil,
	} {
		if got := m.cardOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
}

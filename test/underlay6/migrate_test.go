package underlay6_test

import (
	"encoding/json"
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestMigrate: the address of a container that was stopped goes to the other node, and containers
// reach it there by direct connections, which are relayed to its plain server.
func TestMigrate(t *testing.T) {
	const name = "moves"
	spaces := map[string]string{}
	for _, node := range []string{"n1", "n2"} {
		spaces[node] = lab.Name + "-moves-" + node
		testutil.NoError(t, netns.Create(spaces[node]))
		t.Cleanup(func() { testutil.NoError(t, netns.Delete(spaces[node])) })
	}
	arrive := func(node string) (e model.Endpoint) {
		t.Helper()
		raw := lab.Heddle(t, "endpoints", "add", name, "--netns", netns.Path(spaces[node]), "--node", node, "--output", "json")
		if err := json.Unmarshal([]byte(raw), &e); err != nil {
			t.Fatalf("endpoints add: %v: %s", err, raw)
		}
		return e
	}
	at := "n1"
	first := arrive(at)
	t.Cleanup(func() {
		if out, err := exec.Command(lab.Bin, "endpoints", "delete", name, "--lab", lab.Name, "--node", at).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	lab.Heddle(t, "migrate", name, "--to", "n2", "--node", at)
	at = "n2"
	if e := arrive(at); e.Addr4() != first.Addr4() {
		t.Fatalf("its address is %s on n2, and was %s on n1", e.Addr4(), first.Addr4())
	}
	port := lab.FreePort()
	server, client := lab.RunEntered(t, spaces[at]), lab.StartPeer(t, "heddle", "n1/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	before := lab.Counters(t, "n1")["connect_direct"]
	client.Must(`s = connect(4, %q, %d)`, first.Addr4(), port)
	server.Must(`c, who = l.accept()`)
	client.Must(`send(s, 300000)`)
	server.Must(`receive(c, 300000)`)
	if n := lab.Counters(t, "n1")["connect_direct"] - before; n != 1 {
		t.Errorf("%d direct connections, want 1", n)
	}
}

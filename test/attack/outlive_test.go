package test

import (
	"errors"
	"fmt"
	"os"
	"testing"
)

// TestPolicyCutsWhatOutlives: a connection that another container keeps past the end of its endpoint, of which no rule speaks any more,
// does not live on under a policy that forbids it to everybody; nor does one that is closed lose what it has yet to send.
func TestPolicyCutsWhatOutlives(t *testing.T) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(labCommand("down"), labCommand("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	giver, keeper, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n1/c2"), startOutside(t)
	port := freePort()
	path := fmt.Sprintf("/tmp/%s-outlives-%d", labName, port)
	t.Cleanup(func() { _ = os.Remove(path) }) // only there if the test got so far
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	giver.must(`c = connect(4, %q, %d)`, outsideTarget(t), port)
	server.must(`a, who = l.accept()`)
	keeper.must(`u = taker(%q)`, path)
	keeper.begin(`kept = take(u)`)
	giver.must(`give(%q, c)`, path)
	keeper.reply("take")
	giver.must(`c.close()`)
	giver.must(`d = connect(4, %q, %d)`, outsideTarget(t), port)
	server.must(`b, who = l.accept()`)
	// More than the server takes before it reads.
	giver.must(`d.setblocking(False)`)
	giver.must(`sent = 0`)
	giver.do(`exec("try:\n while True: sent += d.send(bytes(65536))\nexcept BlockingIOError: pass", globals())`)
	sent := giver.must(`sent`)
	giver.must(`d.close()`)
	heddle(t, "endpoints", "delete", "--lab", labName, "--node", "n1", "n1/c1")
	keeper.expect(`"ok"`, `error_of(kept.send, b"x")`)
	applyPolicy(t, "outlives", nil, []map[string]any{denyRule("reject", port)})
	eventually(t, "the connection to end", func() (bool, string) {
		got := keeper.must(`error_of(kept.send, b"x")`)
		return got == `"ECONNABORTED"` || got == `"EPIPE"`, got
	})
	server.expect(sent, `sum(iter(lambda: len(b.recv(1 << 20)), 0))`)
}

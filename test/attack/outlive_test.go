package attack

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestPolicyCutsWhatOutlives: a connection that another container keeps past the end of its
// endpoint, of which no rule speaks any more, does not live on under a policy that forbids it to
// everybody; nor does one that is closed lose what it has yet to send.
func TestPolicyCutsWhatOutlives(t *testing.T) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	giver, keeper, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.StartOutside(t)
	port := lab.FreePort()
	path := fmt.Sprintf("/tmp/%s-outlives-%d", lab.Name, port)
	t.Cleanup(func() { _ = os.Remove(path) }) // only there if the test got so far
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	giver.Must(`c = connect(4, %q, %d)`, lab.OutsideTarget(t), port)
	server.Must(`a, who = l.accept()`)
	keeper.Must(`u = taker(%q)`, path)
	keeper.Begin(`kept = take(u)`)
	giver.Must(`give(%q, c)`, path)
	keeper.Reply("take")
	giver.Must(`c.close()`)
	giver.Must(`d = connect(4, %q, %d)`, lab.OutsideTarget(t), port)
	server.Must(`b, who = l.accept()`)
	// More than the server takes before it reads.
	giver.Must(`d.setblocking(False)`)
	giver.Must(`sent = 0`)
	giver.Do(`exec("try:\n while True: sent += d.send(bytes(65536))\nexcept BlockingIOError: pass", globals())`)
	sent := giver.Must(`sent`)
	giver.Must(`d.close()`)
	lab.Heddle(t, "endpoints", "delete", "--node", "n1", "n1/c1")
	keeper.Expect(`"ok"`, `error_of(kept.send, b"x")`)
	lab.ApplyPolicy(t, "outlives", nil, []map[string]any{lab.DenyRule("reject", port)})
	testutil.Eventually(t, "the connection to end", func() (bool, string) {
		got := keeper.Must(`error_of(kept.send, b"x")`)
		return got == `"ECONNABORTED"` || got == `"EPIPE"`, got
	})
	server.Expect(sent, `sum(iter(lambda: len(b.recv(1 << 20)), 0))`)
}

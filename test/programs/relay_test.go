package programs

import (
	"fmt"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestManyToPlainListener checks that a listener that is not intercepted takes many connections at
// once from one container, and more after they have ended. They arrive at many direct ports, so the
// sender's kernel gives some the same source port; behind the relay each must have its own. What
// the relay remembers of connections that ended must not touch those that come over the overlay.
func TestManyToPlainListener(t *testing.T) {
	const count = 4000
	e := ends{server: "n2/c2", client: "n1/c2", serverMode: "overlay", clientMode: "heddle", dir: lab.SharedDir(t)}
	e.addr = lab.Address(t, e.serverMode, e.server)
	copyPrograms(t, e.dir, "many_server.py", "many_client.py")
	server := servePython("many_server.py")(t, e)
	defer server.Stop()
	want := fmt.Sprintf("%d connections from %d ports\n", count, count)
	connect := func(mode string) {
		t.Helper()
		if got := lab.MustRun(t, mode, e.client, python3, e.dir+"/many_client.py", e.addr, fmt.Sprint(count)); got != want {
			t.Errorf("%s client printed %q, want %q", mode, got, want)
		}
	}
	before := countPair(t, e)
	connect("heddle")
	connect("heddle")
	counted := countPair(t, e).since(before)
	checkPaths(t, e, counted)
	// A SYN that is sent again after its relay was forgotten opens another.
	if got := counted.server["relay_opened"]; got < 2*count || got > 2*count+count/50 {
		t.Errorf("%d relays were opened for %d connections", got, 2*count)
	}
	connect("overlay")
}

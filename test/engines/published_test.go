package engines

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// fetchIn fetches a page in a host's network namespace.
func fetchIn(netns, host string, port int) (string, error) {
	const fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
	url := fmt.Sprintf("http://%s:%d/", host, port)
	out, err := exec.Command("ip", "netns", "exec", lab.Name+"-"+netns, lab.Python, "-c", fetch, url).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// reached checks that a published port of n1 answers clients outside, on another node and on the
// node.
func reached(t *testing.T, port int) {
	t.Helper()
	node := lab.Address(t, "host", "n1/c1")
	for from, host := range map[string]string{"outside": node, "n2": node, "n1": node, "n1 ": "127.0.0.1", "outside ": "[" + lab.Underlay6(t, "n1") + "]"} {
		if got, err := fetchIn(strings.TrimSpace(from), host, port); got != greeting {
			t.Errorf("port %d of %s, from %s: %v, %q", port, host, from, err, got)
		}
	}
}

// unpublished checks that nothing answers at a port of n1.
func unpublished(t *testing.T, port int) {
	t.Helper()
	for _, from := range []string{"outside", "n1"} {
		if got, err := fetchIn(from, lab.Address(t, "host", "n1/c1"), port); err == nil || !strings.Contains(got, "refused") {
			t.Errorf("port %d, which is not published, from %s: %v, %q", port, from, err, got)
		}
	}
}

// portsOn gives the published ports of a node.
func portsOn(t *testing.T, node string) (out []model.PublishedPort) {
	t.Helper()
	for _, e := range endpointsOn(t, node) {
		out = append(out, e.Ports...)
	}
	return out
}

// dockerPublishes runs containers with ports on n1, where a sibling "client" and a server "near"
// run.
func dockerPublishes(t *testing.T, n1 dockerEngine) {
	first, second, taken := lab.FreePort(), lab.FreePort(), lab.FreePort()
	for i, runtime := range []string{"heddle", "runc"} {
		port := []int{first, second}[i]
		n1.start(runtime, "web"+runtime, serveWeb, "-p", fmt.Sprintf("%d:80", port))
		reached(t, port)
		for _, client := range []string{"client", "web" + runtime} {
			if got := n1.must("exec", client, "wget", "-qO-", fmt.Sprintf("http://%s:%d/", lab.Address(t, "host", "n1/c1"), port)); got != greeting {
				t.Errorf("%s fetched %q by the node's address", client, got)
			}
		}
	}
	if list := lab.Heddle(t, "endpoints", "--node", "n1"); !strings.Contains(list, fmt.Sprintf("*:%d->80/tcp", first)) {
		t.Errorf("no port %d in\n%s", first, list)
	}
	lab.EndAgent(t, "n1", syscall.SIGKILL)
	reached(t, first)
	testutil.NoError(t, lab.Command("up"))
	reached(t, first)

	refused := func(text string, options ...string) {
		t.Helper()
		n1.mustRefuse(text, append(append([]string{"run", "--rm", "--runtime", "heddle", "--network", "net"}, options...), "small", "sleep", "1000")...)
	}
	lab.StartPeer(t, "host", "n1/c1").Must(`l = listen(4, "0.0.0.0", %d)`, taken)
	refused("leads to docker/", "-p", fmt.Sprintf("%d:81", first))
	refused("a process of the node has this port", "-p", fmt.Sprintf("%d:81", taken))
	refused("the node does not have this address", "-p", fmt.Sprintf("192.0.2.77:%d:81", taken))
	refused("want tcp or udp", "-p", fmt.Sprintf("%d:81/sctp", taken))
	if ports := portsOn(t, "n1"); len(ports) != 2 {
		t.Errorf("after refusals: %v", ports)
	}

	// Ports that the agent chooses: -P, one port of a range, and none given.
	n1.start("heddle", "chosen", serveWeb, "--expose", "80", "-P", "-p", fmt.Sprintf("127.0.0.1:%d-%d:81", taken, taken+1))
	var chosen, inRange int
	for _, p := range portsOn(t, "n1") {
		switch p.Port {
		case 80:
			chosen = max(chosen, int(p.HostPort)) // the others are below
		case 81:
			inRange = int(p.HostPort)
		}
	}
	if chosen < 49153 || inRange != taken+1 {
		t.Errorf("chosen: %d and %d", chosen, inRange)
	}
	reached(t, chosen)
	if got, _, err := n1.try("port", "chosen"); err != nil || got != "" {
		t.Errorf("docker port shows %q (%v): docs/howto/docker.md says that it shows nothing", got, err)
	}

	n1.must("kill", "webheddle")
	unpublished(t, first)
	n1.must("start", "webheddle")
	reached(t, first)
	n1.must("rm", "-f", "webheddle", "webrunc", "chosen")
	for _, port := range []int{first, second, chosen} {
		unpublished(t, port)
	}
	if out := lab.InNode(t, "n1", "nft", "list", "table", "inet", "heddle"); strings.Contains(out, "published") {
		t.Errorf("what is left of published ports:\n%s", out)
	}
}

package lifecycle

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// attachPlain gives n1 an endpoint of that name in a network namespace of its own, until the end of
// the test, and the name of the namespace.
func attachPlain(t testing.TB, name string) (namespace string) {
	t.Helper()
	namespace = lab.Name + "-" + name
	testutil.NoError(t, netns.Create(namespace))
	t.Cleanup(func() {
		out, err := exec.Command(lab.Bin, "endpoints", "delete", name, "--ignore-missing", "--lab", lab.Name, "--node", "n1").CombinedOutput()
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if err := netns.Delete(namespace); err != nil {
			t.Error(err)
		}
	})
	lab.Heddle(t, "endpoints", "add", name, "--netns", netns.Path(namespace), "--node", "n1")
	return namespace
}

type faultyEndpoint struct {
	ID     model.EndpointID
	Name   string
	Addrs  []netip.Addr
	Faults []api.Fault
}

// endpointsOf lists n1's endpoints by name.
func endpointsOf(t testing.TB) map[string]faultyEndpoint {
	t.Helper()
	var list []faultyEndpoint
	lab.Query(t, &list, "endpoints", "--node", "n1")
	out := map[string]faultyEndpoint{}
	for _, e := range list {
		out[e.Name] = e
	}
	return out
}

// faultsOf lists what is wrong on n1, by "reason endpoint".
func faultsOf(t testing.TB) map[string]string {
	t.Helper()
	var list []api.Status
	lab.Query(t, &list, "status", "--node", "n1")
	out := map[string]string{}
	for _, f := range list[0].Faults {
		out[string(f.Reason)+" "+f.Endpoint] = f.Error
	}
	return out
}

// TestFaultsAtStart: an agent that cannot take over an endpoint, or limits, starts all the same. It
// says so, keeps what was there, removes only the endpoint whose container is gone, and repairs the
// others when it can.
func TestFaultsAtStart(t *testing.T) {
	node := func(script string) {
		t.Helper()
		if out, err := lab.TryInNode(t, "n1", "sh", "-ec", script); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	attachPlain(t, "faulty")
	gone := attachPlain(t, "gone")
	lab.Limit(t, "n1/c1", "--egress", "100mbit", "--connection-egress", "50mbit")
	before, limits := endpointsOf(t)["faulty"], lab.LimitsOf(t)
	device := fmt.Sprintf("hd%x", before.ID)
	const foreign = `bpf da bytecode "1,6 0 0 4294967295"`

	lab.EndAgent(t, "n1", syscall.SIGTERM)
	t.Cleanup(func() { _, _ = lab.TryInNode(t, "n1", "ip", "link", "del", "heddle-test0") }) // the test may have done so
	node("tc filter del dev " + device + " egress prio 1; tc filter add dev " + device + " egress prio 1 protocol all " + foreign)
	node(`ip link add heddle-test0 type veth peer name heddle-test1; ip link set heddle-test0 up
		ip route add 198.51.100.0/24 dev heddle-test0; tc qdisc add dev heddle-test0 clsact
		tc filter add dev heddle-test0 egress prio 18532 protocol ip ` + foreign)
	testutil.NoError(t, netns.Delete(gone))
	testutil.NoError(t, lab.Command("up"))

	got, endpoints := faultsOf(t), endpointsOf(t)
	if len(got) != 2 || !strings.Contains(got["endpoint_not_restored faulty"], "priority 1 is taken") ||
		!strings.Contains(got["limits_not_restored "], "heddle-test0") {
		t.Errorf("faults %q", got)
	}
	if _, there := endpoints["gone"]; there {
		t.Error("the endpoint without a container is still there")
	}
	if e := endpoints["faulty"]; e.ID != before.ID || len(e.Faults) != 1 || e.Faults[0].Reason != api.FaultEndpoint {
		t.Errorf("%+v, was %+v", e, before)
	}
	if now := lab.LimitsOf(t); now != limits || !strings.Contains(lab.Shaping(t, "n1"), "heddle-sh0") {
		t.Errorf("limits now:\n%s\nbefore:\n%s", now, limits)
	}
	queued := func() uint64 {
		var list []model.LimitUse
		lab.Query(t, &list, "limit", "list", "--node", "n1")
		return list[0].Egress.Bytes
	}
	server, client := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	port, was := lab.FreePort(), queued()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	if queued() == was {
		t.Error("the earlier agent's limit is not in force")
	}
	out, err := exec.Command(lab.Bin, "limit", "set", "n1/c1", "--lab", lab.Name, "--egress", "50mbit").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "heddle-test0") {
		t.Errorf("limits changed while others are not restored: %v\n%s", err, out)
	}

	node("tc filter del dev " + device + " egress prio 1; ip link del heddle-test0")
	testutil.Eventually(t, "all to be repaired", func() (bool, string) {
		got := faultsOf(t)
		return len(got) == 0, fmt.Sprint(got)
	})
	if e := endpointsOf(t)["faulty"]; e.ID != before.ID || len(e.Faults) != 0 {
		t.Errorf("%+v, was %+v", e, before)
	}
	node("ping -c 1 -W 10 " + before.Addrs[0].String())
	lab.Heddle(t, "limit", "set", "n1/c1", "--egress", "50mbit")
}

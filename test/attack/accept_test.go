package attack

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"have the SYN forgotten", model.ProtectUnknownPeer, "n2", forgottenSYN},
		attack{"read a saved SYN", model.ProtectSocketOptions, "n2", savedSYN},
	)
}

// filter adds rules to a chain of a node's input or output hook; the chain goes with the test, or
// with the function it gives.
func filter(t *testing.T, node, hook string, rules ...string) (remove func()) {
	t.Helper()
	table := "attack_" + hook
	nft := func(script string) error {
		cmd := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-"+node, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(script)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w\n%s", err, out)
		}
		return nil
	}
	testutil.NoError(t, nft(fmt.Sprintf("table inet %s { chain c { type filter hook %s priority 0; %s; }; }", table, hook, strings.Join(rules, "; "))))
	present := true
	remove = func() {
		if !present {
			return
		}
		present = false
		if err := nft("delete table inet " + table); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(remove)
	return remove
}

// forget deletes what a node remembers of direct connections that are not yet accepted, and gives
// how many they were.
func forget(t *testing.T, node string) (n int) {
	t.Helper()
	flows, err := ebpf.LoadPinnedMap("/run/heddle/lab/"+lab.Name+"/"+node+"/bpf/heddle/flow_by_wire", nil)
	testutil.NoError(t, err)
	defer flows.Close()
	var keys [][]byte
	var key, value []byte
	all := flows.Iterate()
	for all.Next(&key, &value) {
		keys = append(keys, append([]byte(nil), key...))
	}
	testutil.NoError(t, all.Err())
	for _, k := range keys {
		if err := flows.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
	}
	return len(keys)
}

// forgottenSYN accepts a direct connection whose SYN nobody remembers: the server must not take it
// for one of nobody's.
func forgottenSYN(t *testing.T) string {
	server, client := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	port, before := lab.FreePort(), lab.Counters(t, "n2")["cut_unknown_peer"]
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = tcp(4)`)
	client.Must(`s.setblocking(False)`)
	forget(t, "n2")
	direct := fmt.Sprintf("%d-%d", model.DefaultDirectPorts.First, model.DefaultDirectPorts.Last)
	answers := filter(t, "n1", "input", "tcp sport "+direct+" tcp flags & (syn|ack) == syn|ack drop")
	client.Expect(`115`, `s.connect_ex((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port)
	testutil.Eventually(t, "n2 to remember the SYN", func() (bool, string) { return forget(t, "n2") > 0, "" })
	// The SYN is sent again before the SYN-ACK is, and would be remembered.
	requests := filter(t, "n1", "output", "tcp dport "+direct+" tcp flags & (syn|ack) == syn drop")
	forget(t, "n2")
	answers()
	server.Must(`l.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	server.Must(`c, who = l.accept()`)
	requests()
	client.Must(`s.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	client.Do(`s.sendall(b"hello")`)
	server.Must(`c.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	got := server.Do(`c.recv(100).decode()`)
	if cut := lab.Counters(t, "n2")["cut_unknown_peer"] - before; got != `"hello"` && cut != 1 {
		t.Errorf("cut_unknown_peer rose by %d, want 1", cut)
	}
	if got != `"hello"` {
		client.Expect(`"ECONNRESET"`, `error_of(s.recv, 1)`)
		// Nor is the name of the node shown.
		server.Expect(fmt.Sprintf(`"%s"`, "0.0.0.0"), `who[0]`)
	}
	return gained(t, "the server read", got, `{"error": "ETIMEDOUT"}`, `"hello"`)
}

// savedSYN asks for the SYN of an accepted direct connection, which came from the underlay, and
// looks at its memory whatever the call said.
func savedSYN(t *testing.T) string {
	server, client := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.Must(`l.setsockopt(socket.IPPROTO_TCP, 27, 2)`)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`c, who = l.accept()`)
	server.Must(`import ctypes`)
	server.Must(`room, length = ctypes.create_string_buffer(200), ctypes.c_uint32(200)`)
	server.Must(`said = ctypes.CDLL(None).getsockopt(c.fileno(), 6, 28, room, ctypes.byref(length))`)
	memory := server.Must(`room.raw.hex()`)
	underlay := netip4(t, lab.Address(t, "host", "n1/c1"))
	var raw string
	testutil.NoError(t, json.Unmarshal([]byte(memory), &raw))
	return gained(t, "the program's memory has the node's address", fmt.Sprint(strings.Contains(raw, underlay)), "false", "true")
}

// TestRestartPastUnboundListener: a container that listens without an address, at a port of the
// direct range, does not keep the agent from starting again.
func TestRestartPastUnboundListener(t *testing.T) {
	setting := func(value string) string {
		t.Helper()
		path := "/proc/sys/net/ipv4/ip_local_port_range"
		script := "cat " + path
		if value != "" {
			script += "; echo " + value + " >" + path
		}
		out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	p := lab.StartPeer(t, "heddle", "n1/c1")
	before := setting(fmt.Sprintf("%d %d", model.DefaultDirectPorts.First, model.DefaultDirectPorts.Last))
	t.Cleanup(func() { setting(before) })
	p.Must(`l = [tcp(4), tcp(6)]`)
	p.Must(`[s.listen(1) for s in l]`)
	p.Expect("[true, true]", `[%d <= s.getsockname()[1] <= %d for s in l]`, model.DefaultDirectPorts.First, model.DefaultDirectPorts.Last)
	setting(before)
	lab.EndAgent(t, "n1", syscall.SIGTERM)
	testutil.NoError(t, lab.Command("up"))
	p.Must(`tcp(4)`)
}

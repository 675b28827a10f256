package lifecycle

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestSecondNodeRefused: settings that fit a network of one node but not beside this one.
func TestSecondNodeRefused(t *testing.T) {
	a, b := lab.BareNodes(t)
	join := filepath.Join(a.Dir, "state", "join.pem")
	a.Start(t, a.Args("--pool", "10.9.0.0/24", "--prefix", "10.9.0.0/28"))
	for _, c := range []struct {
		name string
		args []string
		says []string
	}{
		{"overlapping prefix", []string{"--prefix", "10.9.0.8/29"}, []string{"10.9.0.8/29", "bad-a", "overlap"}},
		{"same prefix", []string{"--prefix", "10.9.0.0/28"}, []string{"10.9.0.0/28", "bad-a", "overlap"}},
		{"pool exhausted", nil, []string{"pool", "exhausted", "10.9.0.0/24"}},
		{"other pool", []string{"--pool", "10.10.0.0/16"}, []string{"pool", "10.9.0.0/24"}},
		{"other vni", []string{"--vni", "77"}, []string{"vni"}},
		{"unknown network", []string{"--network-id", "10", "--prefix", "10.9.0.16/28"}, []string{"10.9.0.16/28", "pool"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			said := b.Fails(t, nil, b.Args(append([]string{"--join-file", join}, c.args...)...))
			for _, want := range c.says {
				if !strings.Contains(said, want) {
					t.Errorf("it said: %s\nwithout %q", said, want)
				}
			}
			_, nodes := lab.AskAgent(t, a.Socket(), "GET", "/v1/nodes", "")
			if strings.Contains(nodes, b.Underlay) {
				t.Errorf("the refused node joined: %s", nodes)
			}
		})
	}
	t.Run("same underlay", func(t *testing.T) {
		lab.Shell(t, b.Name, "ip addr add "+a.Underlay+"/32 dev eth0")
		defer lab.Shell(t, b.Name, "ip addr del "+a.Underlay+"/32 dev eth0")
		// The store is asked by an address of its own.
		lab.Shell(t, a.Name, "ip addr add 192.0.2.3/24 dev eth0")
		said := b.Fails(t, nil, b.Args("--join-file", join, "--underlay", a.Underlay, "--prefix", "10.9.0.16/28"))
		// Whether the store or the network refuses it, it must say why.
		if !strings.Contains(said, "bad-a") && !strings.Contains(said, "store") {
			t.Errorf("it said: %s", said)
		}
	})
}

// TestAddressesExhausted fills a node's prefix; every refusal must leave nothing behind, and a
// deleted endpoint's address must be found.
func TestAddressesExhausted(t *testing.T) {
	a, _ := lab.BareNodes(t)
	a.Start(t, a.Args("--pool", "10.9.0.0/24", "--prefix", "10.9.0.0/29"))
	create := func(i int) (int, string) {
		name := fmt.Sprintf("%s-bad-e%d", lab.Name, i)
		testutil.NoError(t, netns.Create(name))
		t.Cleanup(func() {
			if err := netns.Delete(name); err != nil {
				t.Error(err)
			}
		})
		return lab.AskAgent(t, a.Socket(), "POST", "/v1/endpoints", fmt.Sprintf(`{"name":"e%d","netns_path":%q,"intercepted":true}`, i, netns.Path(name)))
	}
	made := 0
	var code int
	var body string
	for ; made < 8; made++ {
		if code, body = create(made); code/100 != 2 {
			break
		}
	}
	if made != 5 && made != 6 { // of 8: not the network, not the gateway, perhaps not the last
		t.Errorf("%d endpoints in a /29", made)
	}
	if code != http.StatusInsufficientStorage || !strings.Contains(body, "exhausted") || !strings.Contains(body, "10.9.0.0/29") {
		t.Errorf("%d %s, want 507 that names the prefix", code, body)
	}
	before := a.Leftovers(t)
	if code, body := create(made); code != http.StatusInsufficientStorage {
		t.Errorf("again: %d %s", code, body)
	}
	if after := strings.ReplaceAll(a.Leftovers(t), fmt.Sprintf("%s-bad-e%d\n", lab.Name, made+1), ""); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
	if code, body := lab.AskAgent(t, a.Socket(), "DELETE", "/v1/endpoints/e1", ""); code/100 != 2 {
		t.Fatalf("delete: %d %s", code, body)
	}
	if code, body := create(7); code/100 != 2 {
		t.Errorf("after a delete: %d %s", code, body)
	}
	if code, body := lab.AskAgent(t, a.Socket(), "DELETE", "/v1/endpoints/e2", ""); code/100 != 2 {
		t.Fatalf("delete: %d %s", code, body)
	}
	free := netns.Path(lab.Name + "-bad-e2") // its endpoint has been deleted
	for _, bad := range []struct{ body, field string }{
		{`{"name":"x","netns_path":"/run/netns/none"}`, "netns_path"},
		{`{"name":"x","netns_path":"/etc/passwd"}`, "netns_path"},
		{`{"name":"x","netns_path":"` + free + `","addr":"10.9.0.1"}`, "addr"},
		{`{"name":"x","netns_path":"` + free + `","addr":"10.9.0.0"}`, "addr"},
		{`{"name":"x","netns_path":"` + free + `","addr":"10.8.0.1"}`, "addr"},
		{`{"name":"e0","netns_path":"` + free + `"}`, "name"},
		{`{"name":"x","netns_path":"/run/netns/` + a.Name + `"}`, "netns_path"},
	} {
		before := a.Leftovers(t)
		code, body := lab.AskAgent(t, a.Socket(), "POST", "/v1/endpoints", bad.body)
		checkRefusal(t, bad.body, code, body, bad.field)
		if after := a.Leftovers(t); after != before {
			t.Errorf("%s left behind:\n%s\nbefore:\n%s", bad.body, after, before)
		}
	}
}

// checkRefusal checks an answer that must be the caller's fault.
func checkRefusal(t testing.TB, what string, code int, body, field string) {
	t.Helper()
	var answer struct {
		Error struct{ Code, Field, Message string }
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Error.Code == "" || answer.Error.Message == "" {
		t.Errorf("%.80s: %d, no error: %s", what, code, body)
	}
	if code/100 != 4 && code != http.StatusInsufficientStorage || answer.Error.Field != field {
		t.Errorf("%.80s: %d, field %q, want 4xx and %q: %s", what, code, answer.Error.Field, field, body)
	}
}

// TestMalformedRequests: what an agent must not take, over its own socket.
func TestMalformedRequests(t *testing.T) {
	socket := "/run/heddle/lab/" + lab.Name + "/n1/api.sock"
	_, endpoints := lab.AskAgent(t, socket, "GET", "/v1/endpoints", "")
	for _, c := range []struct{ method, path, body, field string }{
		{"GET", "/", "", ""},
		{"GET", "/v2/status", "", ""},
		{"PUT", "/v1/endpoints", "{}", ""},
		{"DELETE", "/v1/status", "", ""},
		{"BREW", "/v1/status", "", ""},
		{"GET", "/v1/status?x=1", "", "query"},
		{"GET", "/v1/connections?endpoint=n1%2Fc1&endpoint=n1%2Fc2", "", "endpoint"},
		{"GET", "/v1/connections?endpoint=%00", "", "endpoint"},
		{"GET", "/v1/connections?endpoint=none", "", ""},
		{"GET", "/v1/connections?listeners=maybe", "", "listeners"},
		{"GET", "/v1/connections?fliter=x", "", "fliter"},
		{"DELETE", "/v1/endpoints/none", "", ""},
		{"DELETE", "/v1/endpoints/" + strings.Repeat("x", 300), "", "name"},
		{"POST", "/v1/endpoints", "", ""},
		{"POST", "/v1/endpoints", "[]", ""},
		{"POST", "/v1/endpoints", `{"name":`, ""},
		{"POST", "/v1/endpoints", "\xff\xfe", ""},
		{"POST", "/v1/endpoints", `{} {}`, ""},
		{"POST", "/v1/endpoints", `{}`, "name"},
		{"POST", "/v1/endpoints", `{"name":7}`, "name"},
		{"POST", "/v1/endpoints", `{"name":"../x","netns_path":"/run/netns/x"}`, "name"},
		{"POST", "/v1/endpoints", `{"name":"x","netns_path":"relative"}`, "netns_path"},
		{"POST", "/v1/endpoints", `{"name":"x","netns_path":"/run/netns/x","colour":"red"}`, "colour"},
		{"POST", "/v1/endpoints", `{"name":"x","netns_path":"/run/netns/x","addr":"10.0.0.300"}`, "addr"},
		{"POST", "/v1/endpoints", `{"name":"x","netns_path":"/run/netns/x","addr":"fe80::1%eth0"}`, "addr"},
		{"POST", "/v1/endpoints", `{"name":"x","netns_path":"/run/netns/x","labels":{"":"x"}}`, "labels"},
		// Larger ones than these are answered while the client still writes, and it may not see the
		// answer: internal/api tests them.
		{"POST", "/v1/endpoints", `{"name":"` + strings.Repeat("x", 20000) + `"}`, "name"},
		{"POST", "/v1/endpoints", strings.Repeat("[", 20000), ""},
	} {
		t.Run(fmt.Sprintf("%s %.60q %.40q", c.method, c.path, c.body), func(t *testing.T) {
			code, body := lab.AskAgent(t, socket, c.method, c.path, c.body)
			checkRefusal(t, c.method+" "+c.path, code, body, c.field)
		})
	}
	t.Run("no HTTP", func(t *testing.T) {
		conn, err := net.Dial("unix", socket)
		testutil.NoError(t, err)
		defer conn.Close()
		if _, err := conn.Write([]byte("\x00\xffGET\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(conn)
		if !bytes.HasPrefix(raw, []byte("HTTP/1.1 4")) && err == nil {
			t.Errorf("answer %.100q", raw)
		}
	})
	if _, after := lab.AskAgent(t, socket, "GET", "/v1/endpoints", ""); after != endpoints {
		t.Errorf("endpoints %s, were %s", after, endpoints)
	}
}

// TestSecondAgent: an agent that is started again beside itself must not take anything from the
// first.
func TestSecondAgent(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		t.Run(node, func(t *testing.T) {
			raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", lab.AgentPID(t, node)))
			testutil.NoError(t, err)
			argv := strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
			ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
			defer cancel()
			cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			pid := lab.AgentPID(t, node)
			testutil.NoError(t, netns.Start(netns.Path(lab.Name+"-"+node), cmd))
			if err := cmd.Wait(); err == nil || ctx.Err() != nil {
				t.Errorf("it ended with %v:\n%s", err, &out)
			}
			if !strings.Contains(out.String(), "in use") && !strings.Contains(out.String(), "answers") {
				t.Errorf("it said: %s", &out)
			}
			if got := lab.AgentPID(t, node); got != pid {
				t.Errorf("agent %d, was %d", got, pid)
			}
			// The first one still answers containers, new ones included.
			peer, other := lab.StartPeer(t, "heddle", node+"/c1"), lab.StartPeer(t, "heddle", node+"/c2")
			port := lab.FreePort()
			other.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			peer.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", node+"/c2"), port)
			lab.AwaitConnection(t, node+"/c1", peer.PortOf("s"), uint16(port), 0, 0)
		})
	}
}

// TestCommandLine: arguments the command line must refuse, by name.
func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		says []string
	}{
		{[]string{"lab", "exec", "--lab", lab.Name, "n9/c1", "--", "true"}, []string{"n9/c1", "n1/c1"}},
		{[]string{"lab", "exec", "--lab", lab.Name, "c1", "--", "true"}, []string{"c1", "n1/c1"}},
		{[]string{"lab", "exec", "--lab", lab.Name, "--mode", "magic", "n1/c1", "--", "true"}, []string{"--mode", "magic", "overlay"}},
		{[]string{"lab", "exec", "--lab", lab.Name, "n1/c1"}, []string{"command"}},
		{[]string{"lab", "exec", "--lab", lab.Name}, []string{"container"}},
		{[]string{"lab", "exec", "--lab", lab.Name, "n1/c1", "--", "no-such-program"}, []string{"no-such-program"}},
		{[]string{"lab", "exec", "--lab", lab.Name + "-none", "n1/c1", "--", "true"}, []string{lab.Name + "-none", "lab up"}},
		{[]string{"lab", "ip", "--lab", lab.Name, "n1/c9"}, []string{"n1/c9", "n1/c1"}},
		{[]string{"lab", "ip", "--lab", lab.Name, "--mode", "x", "n1/c1"}, []string{"--mode"}},
		{[]string{"lab", "ip", "--lab", lab.Name}, []string{"arg"}},
		{[]string{"lab", "up", "--lab", "Bad Name"}, []string{"Bad Name", "a-z"}},
		{[]string{"lab", "up", "--lab", lab.Name, "--nodes", "0"}, []string{"--nodes", "1"}},
		{[]string{"lab", "up", "--lab", lab.Name, "--nodes", "1000"}, []string{"--nodes", "64"}},
		{[]string{"lab", "up", "--lab", lab.Name, "--nodes", "3"}, []string{lab.Name, "2 nodes", "lab down"}},
		{[]string{"status", "--lab", lab.Name, "--node", "n9"}, []string{"--node n9"}},
		{[]string{"status", "--api", "/run/none.sock"}, []string{"/run/none.sock"}},
		{[]string{"status", "--output", "xml"}, []string{"output", "json"}},
		{[]string{"connections", "--lab", lab.Name, "--endpoint", "none"}, []string{"none"}},
		{[]string{"endpoints", "add", "--lab", lab.Name, "--node", "n1", "x", "--netns", "/none"}, []string{"netns_path", "/none"}},
		{[]string{"endpoints", "delete", "--lab", lab.Name, "--node", "n1", "none"}, []string{"not found"}},
		{[]string{"endpoints", "delete", "--lab", lab.Name, "none"}, []string{"--node"}},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), lab.Bin, c.args...).CombinedOutput()
			if err == nil {
				t.Fatalf("it succeeded: %s", out)
			}
			for _, want := range c.says {
				if !strings.Contains(string(out), want) {
					t.Errorf("it said: %s\nwithout %q", out, want)
				}
			}
		})
	}
}

package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// serviceServer answers every connection, of either family, with its name, until it is ended.
const serviceServer = `
import socket, sys
l = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True, backlog=100)
print("up", flush=True)
while True:
    c, who = l.accept()
    c.sendall(sys.argv[2].encode())
    c.close()
`

// serviceClient connects COUNT times and prints, for each, what answered, or the errno's name, and
// what getpeername said. The last of its sockets is then connected to another address, where there
// is one.
const serviceClient = `
import errno, json, socket, sys
family, host, port, count = getattr(socket, sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
out = []
for i in range(count):
    s = socket.socket(family)
    try:
        s.connect((host, port))
        peer = s.getpeername()
        out.append([s.recv(100).decode(), "%s %d" % peer[:2]])
    except OSError as e:
        out.append([errno.errorcode.get(e.errno, str(e)), ""])
        if len(sys.argv) > 6:
            s.connect((sys.argv[5], int(sys.argv[6])))
            out.append([s.recv(100).decode(), "%s %d" % s.getpeername()[:2]])
    s.close()
print(json.dumps(out))
`

type serviceAnswers [][2]string

// of counts the answers by who gave them, and checks the name that each connection had.
func (a serviceAnswers) of(t *testing.T, peer string) map[string]int {
	t.Helper()
	n := map[string]int{}
	for _, one := range a {
		n[one[0]]++
		if one[1] != peer && !strings.HasPrefix(one[0], "E") {
			t.Errorf("getpeername of a connection to %s is %q, want %q", one[0], one[1], peer)
		}
	}
	return n
}

func askService(t *testing.T, family, host string, port, count int, more ...string) (a serviceAnswers) {
	t.Helper()
	argv := append([]string{"python3", "-c", serviceClient, family, host, strconv.Itoa(port), strconv.Itoa(count)}, more...)
	testutil.NoError(t, json.Unmarshal([]byte(lab.MustRun(t, "heddle", "n1/c1", argv...)), &a))
	return a
}

// TestServices has a container connect to services whose backends are in other containers and its
// own.
func TestServices(t *testing.T) {
	port, closed := lab.FreePort(), lab.FreePort()
	backend := map[string]netip.AddrPort{}
	for _, c := range []string{"n1/c1", "n1/c2", "n2/c1", "n2/c2"} {
		lab.Start(t, "heddle", c, "python3", "-c", serviceServer, strconv.Itoa(port), c).WaitFor("up")
		backend[c] = netip.AddrPortFrom(netip.MustParseAddr(lab.Address(t, "overlay", c)), uint16(port))
	}
	var in6 netip.AddrPort
	remote := api.Dial(lab.APISocket("n2"))
	defer remote.Close()
	list, err := remote.Endpoints(t.Context())
	testutil.NoError(t, err)
	for _, e := range list {
		if e.Name == "n2/c1" && len(e.Addrs) > 1 {
			in6 = netip.AddrPortFrom(e.Addrs[1], uint16(port))
		}
	}
	client := api.Dial(lab.APISocket("n1"))
	defer client.Close()
	vip, vip6 := model.ServiceAddr{AddrPort: netip.MustParseAddrPort("10.96.0.10:80")}, model.ServiceAddr{AddrPort: netip.MustParseAddrPort("[fd00:96::10]:80")}
	edit := func(e api.ServiceEdit) {
		t.Helper()
		testutil.NoError(t, client.EditServices(t.Context(), e))
	}
	set := func(affinity uint32, containers ...string) {
		t.Helper()
		s := model.Service{Addr: vip, Affinity: affinity}
		for _, c := range containers {
			s.Backends = append(s.Backends, backend[c])
		}
		edit(api.ServiceEdit{Put: []model.Service{s}})
	}
	defer edit(api.ServiceEdit{Delete: []model.ServiceAddr{vip, vip6}})
	const name, mapped = "10.96.0.10 80", "::ffff:10.96.0.10 80"

	set(0, "n1/c1", "n1/c2", "n2/c1", "n2/c2")
	before := lab.Counters(t, "n1")
	n := askService(t, "AF_INET", "10.96.0.10", 80, 60).of(t, name)
	if len(n) != 4 || n["n1/c1"]+n["n1/c2"]+n["n2/c1"]+n["n2/c2"] != 60 {
		t.Errorf("60 connects met %v, want all four", n)
	}
	after := lab.Counters(t, "n1")
	if direct := after["connect_direct"] - before["connect_direct"]; direct < uint64(n["n2/c1"]+n["n2/c2"]) {
		t.Errorf("%d direct connects, but %v", direct, n)
	}
	if n := askService(t, "AF_INET6", "::ffff:10.96.0.10", 80, 20).of(t, mapped); len(n) < 2 || n["n1/c1"]+n["n1/c2"]+n["n2/c1"]+n["n2/c2"] != 20 {
		t.Errorf("v4-mapped: %v", n)
	}
	if in6.IsValid() {
		edit(api.ServiceEdit{Put: []model.Service{{Addr: vip6, Backends: []netip.AddrPort{in6}}}})
		if n := askService(t, "AF_INET6", "fd00:96::10", 80, 3).of(t, "fd00:96::10 80"); n["n2/c1"] != 3 {
			t.Errorf("IPv6: %v", n)
		}
	}

	// With affinity: one backend, whatever becomes of the others; another when it goes.
	set(600, "n1/c2", "n2/c1", "n2/c2")
	n = askService(t, "AF_INET", "10.96.0.10", 80, 20).of(t, name)
	kept := slices.Collect(maps.Keys(n))
	if len(kept) != 1 {
		t.Fatalf("with affinity: %v", n)
	}
	set(600, "n1/c1", kept[0])
	if n := askService(t, "AF_INET", "10.96.0.10", 80, 10).of(t, name); n[kept[0]] != 10 {
		t.Errorf("other backends changed, and %s became %v", kept[0], n)
	}
	set(600, "n1/c1")
	if n := askService(t, "AF_INET", "10.96.0.10", 80, 5).of(t, name); n["n1/c1"] != 5 {
		t.Errorf("the backend is gone: %v", n)
	}

	// Without backends; a socket that met that is as good as new.
	set(0)
	refused := lab.Counters(t, "n1")["refuse_no_backend"]
	a := askService(t, "AF_INET", "10.96.0.10", 80, 2, backend["n2/c1"].Addr().String(), strconv.Itoa(port))
	peer := fmt.Sprint(backend["n2/c1"].Addr(), " ", port)
	if want := (serviceAnswers{{"ECONNREFUSED", ""}, {"n2/c1", peer}, {"ECONNREFUSED", ""}, {"n2/c1", peer}}); !slices.Equal(a, want) {
		t.Errorf("no backend: %v, want %v", a, want)
	}
	if got := lab.Counters(t, "n1")["refuse_no_backend"] - refused; got != 2 {
		t.Errorf("refuse_no_backend rose by %d, want 2", got)
	}
	// A port of the address that is no service's is none, and so is the backend's port where
	// nothing listens.
	edit(api.ServiceEdit{Put: []model.Service{{Addr: vip, Backends: []netip.AddrPort{netip.AddrPortFrom(backend["n2/c1"].Addr(), uint16(closed))}}}})
	if n := askService(t, "AF_INET", "10.96.0.10", 80, 2).of(t, name); n["ECONNREFUSED"] != 2 {
		t.Errorf("nothing listens at the backend: %v", n)
	}

	// Policy is decided for the backend, not for what the program asked for.
	set(0, "n2/c1", "n2/c2")
	lab.ApplyPolicy(t, "services", nil, []map[string]any{{"action": "deny", "peers": []map[string]any{{"prefix": "10.96.0.0/16"}, {"prefix": backend["n2/c1"].Addr().String() + "/32"}}}})
	if n := askService(t, "AF_INET", "10.96.0.10", 80, 40).of(t, name); n["n2/c1"] != 0 || n["ECONNREFUSED"] == 0 || n["n2/c2"] == 0 {
		t.Errorf("with a policy against n2/c1: %v", n)
	}
}

package sockets

import (
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// tool is a program that operators look at connections with.
type tool struct {
	name string
	argv []string
	// row gives what must be the same in both modes of a line about one socket.
	row func(fields []string) []string
}

var tools = []tool{
	// Of a listener, ss has the second number and IPV6_V6ONLY from netlink only.
	{"ss", []string{"ss", "-tanpHO"}, func(f []string) []string {
		if f[0] == "LISTEN" {
			f[2], f[3], f[4] = "-", strings.ReplaceAll(f[3], "[::]", "*"), strings.ReplaceAll(f[4], "[::]", "*")
		}
		return f
	}},
	{"netstat", []string{"netstat", "-tanep"}, nil},
	{"lsof", []string{"lsof", "-nP", "-iTCP"}, nil},
	{"lsof by port", []string{"lsof", "-nP", "-iTCP:SERVED"}, nil},
	{"fuser", []string{"sh", "-c", "fuser -v SERVED/tcp 2>&1"}, nil},
	{"busybox", []string{"busybox", "netstat", "-tan"}, nil},
}

// TestToolsSeeConnections: ss, netstat, lsof and fuser show an intercepted container's connections,
// with the same addresses, states, queues, users and processes as a plain container's.
func TestToolsSeeConnections(t *testing.T) {
	for _, program := range []string{"ss", "netstat", "lsof", "fuser", "busybox"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("%v: run `make test-packages`", err)
		}
	}
	ports := make([]int, 8)
	for i := range ports {
		ports[i] = lab.FreePort()
	}
	seen := map[string]map[string]string{}
	for _, mode := range lab.Modes {
		t.Run(mode, func(t *testing.T) { seen[mode] = seenByTools(t, mode, ports) })
	}
	want, got := seen["overlay"], seen["heddle"]
	for _, tool := range tools {
		if got[tool.name] != want[tool.name] || want[tool.name] == "\n" {
			t.Errorf("%s: got\n%s\nwant\n%s", tool.name, got[tool.name], want[tool.name])
		}
	}
}

// seenByTools makes connections of every kind in n2/c1, and gives what each tool shows there of
// sockets with these ports.
func seenByTools(t *testing.T, mode string, ports []int) map[string]string {
	server, other, near := lab.StartPeer(t, mode, "n2/c1"), lab.StartPeer(t, mode, "n1/c1"), lab.StartPeer(t, mode, "n2/c2")
	own, own6 := lab.Address(t, mode, "n2/c1"), lab.Overlay6(t, "n2/c1")
	user := lab.Start(t, mode, "n2/c1", lab.AsNobody(lab.Python, "-c", fmt.Sprintf(
		`import socket; l = socket.socket(); l.bind(("127.0.0.2", %d)); l.listen(3); print("ready", flush=True); input()`, ports[7]))...)
	user.WaitFor("ready")
	server.Must(`any4, any6 = listen(4, "0.0.0.0", %d), listen(6, "::", %d)`, ports[0], ports[1])
	server.Must(`lo4, lo6 = listen(4, "127.0.0.1", %d), listen(6, "::1", %d)`, ports[2], ports[3])
	server.Must(`own4, only6 = listen(4, %q, %d), listen(6, "::", %d, 1)`, own, ports[4], ports[5])
	server.Must(`held = []`)
	reach := func(p *lab.Peer, family int, addr string, port int, listener string) {
		t.Helper()
		p.Must(`s = connect(%d, %q, %d)`, family, addr, port)
		p.Must(`held = [s] + globals().get("held", [])`)
		server.Must(`held.append(%s.accept()[0])`, listener)
	}
	reach(other, 4, own, ports[0], "any4") // has not been read, below
	other.Must(`s.send(b"seven b") and None`)
	server.Expect(`7`, `len(held[-1].recv(7, socket.MSG_PEEK | socket.MSG_WAITALL))`)
	reach(other, 4, own, ports[1], "any6") // ended by its peer
	other.Must(`s.shutdown(socket.SHUT_WR)`)
	server.Expect(`0`, `len(held[-1].recv(1))`)
	reach(other, 6, own6, ports[1], "any6")
	reach(other, 6, own6, ports[5], "only6")
	reach(near, 4, own, ports[4], "own4")
	reach(near, 6, own6, ports[1], "any6")
	reach(server, 4, "127.0.0.1", ports[2], "lo4")
	reach(server, 6, "::1", ports[3], "lo6")
	reach(server, 4, "127.0.0.1", ports[0], "any4")
	reach(server, 6, "::ffff:127.0.0.1", ports[1], "any6")
	other.Must(`back = listen(4, "0.0.0.0", %d)`, ports[6])
	server.Must(`out = connect(4, %q, %d)`, lab.Address(t, mode, "n1/c1"), ports[6])
	other.Must(`accepted, who = back.accept()`)
	server.Must(`waits = connect(4, "127.0.0.1", %d)`, ports[2]) // for accept(): no process has it

	seen := map[string]string{}
	for _, tool := range tools {
		seen[tool.name] = sockets(t, mode, tool, ports)
	}
	return seen
}

var (
	processID = regexp.MustCompile(`pid=\d+|\b\d+/python3|^python3 +\d+|\b\d+ F\.\.\.\.`)
	device    = regexp.MustCompile(`\b\d{4,}\b`) // inodes, and ports that the kernel chose
	spaces    = regexp.MustCompile(`[ \t]+`)
)

// sockets gives the lines of a tool's output that are about sockets with ports, in order, without
// what differs from run to run.
func sockets(t *testing.T, mode string, tool tool, ports []int) string {
	t.Helper()
	argv := slices.Clone(tool.argv)
	for i := range argv {
		argv[i] = strings.ReplaceAll(argv[i], "SERVED", strconv.Itoa(ports[1]))
	}
	var rows []string
	for line := range strings.Lines(lab.MustRun(t, mode, "n2/c1", argv...)) {
		ours := false
		for i, port := range ports {
			name := fmt.Sprintf("${1}P%d", i)
			with := regexp.MustCompile(fmt.Sprintf(`(^|:)%d\b`, port))
			ours = ours || with.MatchString(line)
			line = with.ReplaceAllString(line, name)
		}
		if !ours {
			continue
		}
		line = lab.Mask(line, processID)
		fields := strings.Fields(spaces.ReplaceAllString(device.ReplaceAllString(line, "N"), " "))
		if tool.row != nil {
			fields = tool.row(fields)
		}
		rows = append(rows, strings.Join(fields, " "))
	}
	slices.Sort(rows)
	return strings.Join(rows, "\n") + "\n"
}

// TestProcNetIsWhole: more sockets than one read() has room for are listed once each, and what
// /proc/net has besides is the container's own.
func TestProcNetIsWhole(t *testing.T) {
	const many = 1500
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(`held = [listen(4, "127.0.0.1", 0) for _ in range(%d)]`, many)
	p.Must(`mine = {str(os.fstat(s.fileno()).st_ino) for s in held}`)
	p.Expect(fmt.Sprint(many), `len(mine & {l.split()[9] for l in open("/proc/net/tcp")})`)
	// While the agent makes sockets ahead, to replace these, a walk may come by one twice, as one
	// of the kernel's own file.
	want := fmt.Sprintf("[%d, %d]", many, many)
	testutil.Eventually(t, "each socket to be listed, once", func() (bool, string) {
		p.Must(`lines = [l.split() for l in open("/proc/net/tcp")]`)
		got := p.Must(`[len(mine & {l[9] for l in lines}), sum(l[9] in mine for l in lines)]`)
		return got == want, got
	})
	p.Expect(`"ESPIPE"`, `error_of(os.lseek, os.open("/proc/net/tcp", 0), 0, 0)`)
	p.Must(`held = None`)
	p.Expect("true", `open("/proc/net/dev").read().splitlines()[2:] != [] and set(os.listdir("/proc/net")) >= set(os.listdir("/proc/self/net"))`)
	for _, file := range []string{"route", "if_inet6", "unix", "fib_trie"} {
		p.Expect("true", `open("/proc/net/%s").read() == open("/proc/self/net/%s").read()`, file, file)
	}
	// What is the container's cannot be changed, and leads nowhere else.
	p.Expect(`["EROFS", "EROFS", "EROFS"]`, `[error_of(os.chmod, "/proc/net/tcp", 0), error_of(os.unlink, "/proc/net/dev"), error_of(os.mkdir, "/dev/heddle-proc/x")]`)
}

// TestProcNetOfUsers: what a container with a user namespace of its own reads has that one's users.
func TestProcNetOfUsers(t *testing.T) {
	const script = `
import os, socket
def shown(s):
    lines = [l.split() for name in ("tcp", "tcp6") for l in open("/proc/net/" + name)]
    return [l[1:5] + [l[7]] for l in lines if l[9] == str(os.fstat(s.fileno()).st_ino)]
def listening(port):
    s = socket.socket()
    s.bind(("127.0.0.1", port))
    s.listen()
    print(shown(s), flush=True)
listening(7001)
os.setuid(1234)
listening(7002)
`
	out := map[string]string{}
	for _, mode := range lab.Modes {
		out[mode] = runInUserNamespace(t, mode, "n1/users"+mode, lab.Python, "-c", script)
	}
	if out["heddle"] != out["overlay"] || !strings.Contains(out["overlay"], "1234") {
		t.Errorf("got:\n%s\nwant:\n%s", out["heddle"], out["overlay"])
	}
}

// TestProcNetLeftAlone: a container that may mount /proc in namespaces of its own still may.
func TestProcNetLeftAlone(t *testing.T) {
	unmasked := func(spec *specs.Spec) { spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = nil, nil }
	for _, mode := range lab.Modes {
		out := lab.RunContainer(t, mode, "n1/unmasked"+mode, unmasked, "sh", "-c", "unshare -Urpf --mount-proc readlink /proc/net")
		if out != "self/net\n" {
			t.Errorf("%s: /proc/net of a /proc mounted in the container: %s", mode, out)
		}
	}
}

// TestProcNetNamesOnlyTheOverlay: whenever a program looks, also while its connections are made and
// accepted, it reads the addresses that getsockname() and getpeername() would tell.
func TestProcNetNamesOnlyTheOverlay(t *testing.T) {
	server, client, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	own := lab.Address(t, "heddle", "n2/c1")
	var watchers []*peerWatch
	for _, container := range []string{"n2/c1", "n1/c1"} {
		watchers = append(watchers, watchNames(t, container))
	}
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.Must(`serve = threading.Thread(target=lambda: [l.accept()[0].close() for _ in range(1000)])`)
	server.Must(`serve.start()`)
	client.Must(`[connect(4, %q, %d).close() for _ in range(1000)] and None`, own, port)
	server.Must(`serve.join()`)
	for _, w := range watchers {
		w.mustNameOverlay(t, netip.MustParseAddr(own))
	}
}

// peerWatch reads /proc/net/tcp all the time.
type peerWatch struct {
	*lab.Peer
}

func watchNames(t *testing.T, container string) *peerWatch {
	w := &peerWatch{lab.StartPeer(t, "heddle", container)}
	w.Must(`found, over = set(), []`)
	w.Must(`watch = threading.Thread(target=lambda: [found.update(listed()) for _ in iter(lambda: bool(over), True)])`)
	w.Must(`watch.start()`)
	return w
}

// mustNameOverlay ends it: connections were seen, and no other addresses than those of the overlay.
// There may be some left of others.
func (w *peerWatch) mustNameOverlay(t *testing.T, own netip.Addr) {
	t.Helper()
	pool, err := own.Prefix(16)
	testutil.NoError(t, err)
	w.Must(`over.append(1)`)
	w.Must(`watch.join()`)
	w.Must(`import ipaddress`)
	w.Expect("true", `len(found) > 10`)
	w.Expect("[]", `sorted({a for line in found for a, _ in line if a != "0.0.0.0" and ipaddress.ip_address(a) not in ipaddress.ip_network(%q)})`, pool)
}

package attack

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// attackByRing runs testdata/attack/ring.c and gives the answer to one of its calls. It skips the
// test if the kernel's io_uring lacks the operation that the call takes ("" is one that all have),
// by the word of a socket that Heddle has no part in.
func attackByRing(t *testing.T, call, operation string) string {
	t.Helper()
	program := lab.CompileC(t, "testdata/ring.c")
	if has := answerOf(t, lab.MustRun(t, "overlay", "n1/c1", program)+": ok\n", operation); has == "Invalid argument" {
		t.Skipf("the kernel's io_uring has no %s: bind is of Linux 6.11, setsockopt of 6.7", operation)
	} else if has != "ok" {
		t.Fatalf("%s by io_uring, without Heddle: %s", operation, has)
	}
	node, port := lab.StartPeer(t, "host", "n1/c1"), lab.FreePort()
	node.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	return answerOf(t, lab.MustRun(t, "heddle", "n1/c1", program, lab.Address(t, "host", "n1/c1"), fmt.Sprint(port)), call)
}

// answerOf finds the answer to one call in what a program printed.
func answerOf(t *testing.T, out, call string) string {
	t.Helper()
	for line := range strings.Lines(out) {
		if answer, ok := strings.CutPrefix(line, call+": "); ok {
			return strings.TrimSpace(answer)
		}
	}
	t.Fatalf("no %q in\n%s", call, out)
	return ""
}

func init() {
	for _, c := range []struct {
		call, operation string
		protection      model.Protection
		refused         string
	}{
		// TCP_REPAIR takes CAP_NET_ADMIN, too, which the lab's containers do not have: it is no
		// attack without.
		{"bind an address of the node", "bind", model.ProtectBind, "Cannot assign requested address"},
		{"connect to the node's wildcard", "", model.ProtectWildcard, "Connection refused"},
		{"IP_OPTIONS", "setsockopt", model.ProtectSocketOptions, "Operation not permitted"},
	} {
		try := func(t *testing.T) string {
			return gained(t, c.call, attackByRing(t, c.call, c.operation), c.refused, "ok")
		}
		attacks = append(attacks, attack{c.call + ", by io_uring", c.protection, "n1", try})
	}
}

// TestPassedToAnotherContainer hands sockets of one container to a process of another: there they
// are still the first one's.
func TestPassedToAnotherContainer(t *testing.T) {
	giver, thief := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	server, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	path := fmt.Sprintf("/tmp/%s-passed-%d", lab.Name, port)
	t.Cleanup(func() { _ = exec.Command("rm", "-f", path).Run() })
	thief.Must(`u = taker(%q)`, path)
	for _, name := range []string{"bound", "connected", "repair"} {
		thief.Begin(name + ` = take(u)`)
		giver.Must(`give(%q, tcp())`, path)
		thief.Reply(name)
	}
	// Of the thief's own address it knows nothing, and what it binds is the giver's.
	thief.Expect(`"EADDRNOTAVAIL"`, `error_of(bound.bind, (%q, 0))`, lab.Address(t, "heddle", "n1/c2"))
	thief.Must(`bound.bind(("0.0.0.0", %d))`, port)
	thief.Must(`bound.listen(1)`)
	giver.Expect(`"EADDRINUSE"`, `error_of(tcp().bind, ("0.0.0.0", %d))`, port)
	thief.Expect(`"ok"`, `error_of(tcp().bind, ("0.0.0.0", %d))`, port)
	// The peer sees the giver.
	thief.Must(`connected.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Expect(fmt.Sprintf("%q", lab.Address(t, "heddle", "n1/c1")), `l.accept()[1][0]`)
	// Rights are those over the giver's container, and a thief has none over it.
	thief.Expect(`"EPERM"`, `error_of(repair.setsockopt, 6, 19, 1)`)
	thief.Expect(`"EACCES"`, `forked(as_user, 65534, error_of, repair.bind, ("0.0.0.0", 80))`)
	passToUnguarded(t, giver, path)
}

// passToUnguarded passes a socket to a container of a runtime that is not Heddle's: status tells of
// it, as long as it has the socket, and not of those whose ioctls are trapped.
func passToUnguarded(t *testing.T, giver *lab.Peer, path string) {
	plain := lab.StartPeer(t, "overlay", "n1/c2")
	if n := len(unguarded(t)); n != 0 {
		t.Errorf("%d processes are told of before", n)
	}
	plain.Must(`os.unlink(%q)`, path)
	plain.Must(`u = taker(%q)`, path)
	plain.Begin(`taken = take(u)`)
	giver.Must(`give(%q, tcp())`, path)
	plain.Reply("take")
	if told := unguarded(t); len(told) != 1 || told[0].Sockets != 1 {
		t.Errorf("told of %+v, want one process with one socket", told)
	}
	plain.Must(`taken.close()`)
	testutil.Eventually(t, "nothing to be told of", func() (bool, string) { told := unguarded(t); return len(told) == 0, fmt.Sprint(told) })
}

// unguarded is what n1's status tells of processes that hold sockets of the node and whose ioctls
// nobody traps.
func unguarded(t *testing.T) []model.SocketOwner {
	t.Helper()
	var status []api.Status
	lab.Query(t, &status, "status", "--node", "n1")
	return status[0].Interception.Unguarded
}

// TestNothingOnTheUnderlay: whatever a container listens on, no listener of it is at an address of
// the underlay, or at all addresses of the node, where something outside could reach it without
// steering.
func TestNothingOnTheUnderlay(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(`held = [listen(4, a, 0) for a in ("0.0.0.0", "127.0.0.1", "127.1.2.3", %q)]`, lab.Address(t, "heddle", "n1/c1"))
	p.Must(`held += [listen(6, a, 0, v) for a, v in (("::", 0), ("::", 1), ("::1", 0), ("::ffff:0.0.0.0", 0), (%q, 0))]`, lab.Overlay6(t, "n1/c1"))
	p.Must(`held += [tcp(4), tcp(6)]`)
	p.Must(`[s.listen(1) for s in held[-2:]]`)
	n := 0
	out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "ss", "-tlneH").CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	underlay := lab.Address(t, "host", "n1/c1")
	for line := range strings.Lines(string(out)) {
		if !strings.Contains(line, "fwmark:0x4864") {
			continue
		}
		n++
		local := strings.Fields(line)[3]
		all := strings.HasPrefix(local, "0.0.0.0:") || strings.HasPrefix(local, "*:") || strings.HasPrefix(local, "[::]:")
		if all || strings.Contains(local, underlay) {
			t.Errorf("a container's listener at %s", local)
		}
	}
	if n < 11 {
		t.Errorf("%d listeners of containers, want 11 at least:\n%s", n, out)
	}
}

// oddDifferences are answers that are not a plain container's: rows of docs/differences.md. All are
// refusals.
var oddDifferences = map[string]bool{
	"connect AF_INET 127.255.255.255 ECONNREFUSED":       true,
	"connect AF_INET6 fe80::1 ENETUNREACH":               true,
	"bind AF_INET family6 0 EAFNOSUPPORT":                true,
	"bind AF_INET 255.255.255.255 EADDRNOTAVAIL":         true,
	"bind AF_INET 224.0.0.1 EADDRNOTAVAIL":               true,
	"bind AF_INET6 ff02::1 EADDRNOTAVAIL":                true,
	"bind AF_INET6 fe80::1 EADDRNOTAVAIL":                true,
	"bind AF_INET6 ::ffff:255.255.255.255 EADDRNOTAVAIL": true,
	"bind AF_INET6 ::ffff:224.0.0.1 EADDRNOTAVAIL":       true,
}

// TestOddAddresses calls connect() and bind() with addresses that are short, long, of the wrong
// family or nobody's, and expects the answers of a plain container.
func TestOddAddresses(t *testing.T) {
	const script = `
import ctypes, errno, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def sin(a, p=9, family=2): return struct.pack("<H", family) + struct.pack("!H", p) + socket.inet_aton(a) + bytes(8)
def sin6(a, p=9, family=10, scope=0): return struct.pack("<H", family) + struct.pack("!HI", p, 0) + socket.inet_pton(socket.AF_INET6, a) + struct.pack("<I", scope)
lo, lo6, mapped = sin("127.0.0.1"), sin6("::1"), sin6("::ffff:127.0.0.1")
odd = [("empty", b"")] + [(f"{len(b)} of {n}", b) for n, w in (("sockaddr_in", lo), ("sockaddr_in6", lo6), ("mapped", mapped)) for b in (w[:1], w[:2], w[:8], w[:15], w[:16], w[:24], w[:27], w, w + bytes(8), w + bytes(100), w + bytes(200))]
odd += [(f"family {f}", sin("127.0.0.1", 9, f)) for f in (0, 1, 3, 10, 16, 17, 65535)] + [(f"family6 {f}", sin6("::1", 9, f)) for f in (0, 1, 2, 16, 65535)]
odd += [(a, sin(a)) for a in ("0.0.0.0", "255.255.255.255", "224.0.0.1", "127.255.255.255")]
odd += [(a, sin6(a)) for a in ("::", "ff02::1", "::ffff:255.255.255.255", "::ffff:224.0.0.1", "::ffff:0.0.0.0", "fe80::1", "::127.0.0.1")]
for call in ("connect", "bind"):
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, raw in odd:
            s = socket.socket(family, socket.SOCK_STREAM)
            r = getattr(libc, call)(s.fileno(), raw, len(raw))
            print(call, family.name, name, "ok" if r == 0 else errno.errorcode.get(ctypes.get_errno()))
            s.close()
`
	want, got := lab.MustRun(t, "overlay", "n1/c1", lab.Python, "-c", script), lab.MustRun(t, "heddle", "n1/c1", lab.Python, "-c", script)
	wants, gots := strings.Split(want, "\n"), strings.Split(got, "\n")
	if len(wants) != len(gots) || len(wants) < 150 {
		t.Fatalf("%d and %d lines", len(wants), len(gots))
	}
	for i := range wants {
		if wants[i] != gots[i] && !oddDifferences[gots[i]] {
			t.Errorf("got  %s\nwant %s", gots[i], wants[i])
		}
	}
}

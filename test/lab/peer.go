package lab

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// BoundToNothing is Python that binds a socket to no address of the container, by AF_UNSPEC.
const BoundToNothing = `
import ctypes
def unbound_address(port=0):
    s = tcp(4)
    if ctypes.CDLL(None, use_errno=True).bind(s.fileno(), struct.pack("=HH12x", socket.AF_UNSPEC, socket.htons(port)), 16):
        raise OSError(ctypes.get_errno(), "bind")
    return s
`

// LeaveNetns is Python that moves the calling thread to a network namespace of its own, by way of a
// user namespace, for which it needs no capability.
const LeaveNetns = `import ctypes; CLONE_NEWUSER, CLONE_NEWNET, CLONE_FILES = 0x10000000, 0x40000000, 0x400; libc = ctypes.CDLL(None, use_errno=True)`

//go:embed testdata/peer.py
var peerScript string

// Python is the distribution's, whatever else is in PATH.
const Python = "/usr/bin/python3"

// Peer is a Python program in a container that carries out one line at a time: so a test can
// interleave what several programs do, and look at the nodes in between.
type Peer struct {
	T       testing.TB
	Name    string
	stdin   io.WriteCloser
	Replies chan string
}

// StartPeer starts a peer in a container until the end of the test.
func StartPeer(t testing.TB, mode, container string) *Peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := labExec(ctx, mode, container, []string{Python, "-c", peerScript})
	return runPeer(t, container+" ("+mode+")", cmd, cancel)
}

// StartOutside starts a peer on the host outside the overlay.
func StartOutside(t testing.TB) *Peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(t, "outside", exec.CommandContext(ctx, "ip", "netns", "exec", Name+"-outside", Python, "-c", peerScript), cancel)
}

func runPeer(t testing.TB, name string, cmd *exec.Cmd, cancel context.CancelFunc) *Peer {
	t.Helper()
	p := &Peer{T: t, Name: name, Replies: make(chan string, 1)}
	stdout, err := cmd.StdoutPipe()
	testutil.NoError(t, err)
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatalf("peer %s: %v", name, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		lines := bufio.NewScanner(stdout)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			p.Replies <- lines.Text()
		}
		close(p.Replies)
		_ = cmd.Wait() // ended by the test, mostly
	}()
	t.Cleanup(func() {
		_ = p.stdin.Close()
		cancel()
		for range p.Replies { // let the reader come to its end
		}
		<-ended
		if stderr.Len() > 0 && t.Failed() {
			t.Logf("peer %s: %s", name, stderr.String())
		}
	})
	p.Reply("start")
	return p
}

// In is the peer for the subtest t.
func (p *Peer) In(t testing.TB) *Peer {
	q := *p
	q.T = t
	return &q
}

// Addr is the address of a container in a mode.
func (p *Peer) Addr(mode, container string) netip.Addr {
	p.T.Helper()
	return netip.MustParseAddr(Address(p.T, mode, container))
}

// Begin has the peer carry out line; reply waits for its answer.
func (p *Peer) Begin(line string) {
	p.T.Helper()
	raw, err := json.Marshal(line)
	testutil.NoError(p.T, err)
	if _, err := p.stdin.Write(append(raw, '\n')); err != nil {
		p.T.Fatalf("peer %s: %s: %v", p.Name, line, err)
	}
}

// Reply waits for the answer to line, which Begin has begun.
func (p *Peer) Reply(line string) string {
	p.T.Helper()
	select {
	case r, ok := <-p.Replies:
		if !ok {
			p.T.Fatalf("peer %s ended at: %s", p.Name, line)
		}
		if strings.HasPrefix(r, `{"mistake"`) {
			p.T.Fatalf("peer %s: %s: %s", p.Name, line, r)
		}
		return r
	case <-time.After(testutil.WaitTimeout):
		p.T.Fatalf("peer %s did not answer within %s: %s", p.Name, testutil.WaitTimeout, line)
	}
	return ""
}

// Do has the peer carry out a line of Python and gives its answer as JSON.
func (p *Peer) Do(format string, args ...any) string {
	p.T.Helper()
	line := fmt.Sprintf(format, args...)
	p.Begin(line)
	return p.Reply(line)
}

// Must is do for lines whose failure ends the test.
func (p *Peer) Must(format string, args ...any) string {
	p.T.Helper()
	r := p.Do(format, args...)
	if strings.HasPrefix(r, `{"error"`) {
		p.T.Fatalf("peer %s: %s: %s", p.Name, fmt.Sprintf(format, args...), r)
	}
	return r
}

// Expect is do with a known answer.
func (p *Peer) Expect(want, format string, args ...any) {
	p.T.Helper()
	if got := p.Do(format, args...); got != want {
		p.T.Errorf("peer %s: %s: %s, want %s", p.Name, fmt.Sprintf(format, args...), got, want)
	}
}

// PortOf gives the port of socket variable s.
func (p *Peer) PortOf(s string) uint16 {
	p.T.Helper()
	var port uint16
	raw := p.Must("%s.getsockname()[1]", s)
	if err := json.Unmarshal([]byte(raw), &port); err != nil {
		p.T.Fatalf("port of %s: %v", s, err)
	}
	return port
}

// ephemeralPort matches ports that the kernel chose, in what a peer answered: an address is
// followed by its port.
var ephemeralPort = regexp.MustCompile(`(", )(3276[89]|327[7-9]\d|32[89]\d\d|3[3-9]\d{3}|[45]\d{4}|6[0-5]\d{3})\b`)

// Normalise names the ephemeral ports of a trace E1, E2 ... in the order they appear: which they
// are is chance, which of them are equal is not.
func Normalise(trace []string) string {
	seen := map[string]string{}
	return ephemeralPort.ReplaceAllStringFunc(strings.Join(trace, "\n"), func(m string) string {
		if seen[m] == "" {
			seen[m] = fmt.Sprintf(`", E%d`, len(seen)+1)
		}
		return seen[m]
	})
}

// RunEntered starts a peer in a network namespace that it enters from outside, without
// interception.
func RunEntered(t testing.TB, netns string) *Peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(t, netns, exec.CommandContext(ctx, "nsenter", "--net=/run/netns/"+netns, Python, "-c", peerScript), cancel)
}

// ConnectPod opens connections between an intercepted process and one that is not, and gives what
// checks that they live and that new ones are made: from client by its sockets inside.
func ConnectPod(t *testing.T, client, plain *Peer) (check func()) {
	t.Helper()
	port, plainPort := FreePort(), FreePort()
	client.Must(`podl = listen(6, "::", %d)`, port)
	plain.Must(`podl = listen(6, "::", %d)`, plainPort)
	client.Must(`podc = [connect(6, "::1", %d)]`, plainPort)
	plain.Must(`podc = [connect(4, "127.0.0.1", %d)]`, port)
	for _, p := range []*Peer{client, plain} {
		p.Must(`podc.append(podl.accept()[0])`)
	}
	return func() {
		t.Helper()
		client.Must(`inside.pop().connect(("127.0.0.1", %d))`, plainPort)
		plain.Must(`connect(6, "::1", %d)`, port)
		for _, p := range []*Peer{client, plain} {
			p.Must(`podl.accept()[0]`)
			p.Must(`[c.sendall(b"alive") for c in podc] and None`)
		}
		for _, p := range []*Peer{client, plain} {
			p.Expect(`[5, 5]`, `[len(c.recv(100)) for c in podc]`)
		}
	}
}

// HasCongestion checks the congestion control that the kernel of n1 has for the connection from
// (side "sport") or to ("dport") a port.
func (p *Peer) HasCongestion(t *testing.T, side string, port uint16, want string) {
	t.Helper()
	out := InNode(t, "n1", "ss", "-tinH", "state", "established", side, "=", strconv.Itoa(int(port)))
	ends := 0
	for _, line := range strings.Split(out, "\n") {
		for _, word := range strings.Fields(line) {
			if word == "bbr" || word == "reno" || word == "cubic" {
				if ends++; word != want {
					t.Errorf("%s: %s, want %s", p.Name, word, want)
				}
			}
		}
	}
	if ends == 0 {
		t.Errorf("%s: no connection of port %d:\n%s", p.Name, port, out)
	}
}

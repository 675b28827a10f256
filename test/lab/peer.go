package test

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
	"strings"
	"testing"
	"time"
)

//go:embed testdata/peer.py
var peerScript string

// python is the distribution's, whatever else is in PATH.
const python = "/usr/bin/python3"

// peer is a Python program in a container that carries out one line at a time: so a test can interleave
// what several programs do, and look at the nodes in between.
type peer struct {
	t       testing.TB
	name    string
	stdin   io.WriteCloser
	replies chan string
}

// startPeer starts a peer in a container until the end of the test.
func startPeer(t testing.TB, mode, container string) *peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := labExec(ctx, mode, container, []string{python, "-c", peerScript})
	return runPeer(t, container+" ("+mode+")", cmd, cancel)
}

// startOutside starts a peer on the host outside the overlay.
func startOutside(t testing.TB) *peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(t, "outside", exec.CommandContext(ctx, "ip", "netns", "exec", labName+"-outside", python, "-c", peerScript), cancel)
}

func runPeer(t testing.TB, name string, cmd *exec.Cmd, cancel context.CancelFunc) *peer {
	t.Helper()
	p := &peer{t: t, name: name, replies: make(chan string, 1)}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
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
			p.replies <- lines.Text()
		}
		close(p.replies)
		_ = cmd.Wait() // ended by the test, mostly
	}()
	t.Cleanup(func() {
		_ = p.stdin.Close()
		cancel()
		for range p.replies { // let the reader come to its end
		}
		<-ended
		if stderr.Len() > 0 && t.Failed() {
			t.Logf("peer %s: %s", name, stderr.String())
		}
	})
	p.reply("start")
	return p
}

// in is the peer for the subtest t.
func (p *peer) in(t testing.TB) *peer {
	q := *p
	q.t = t
	return &q
}

// addr is the address of a container in a mode.
func (p *peer) addr(mode, container string) netip.Addr {
	p.t.Helper()
	return netip.MustParseAddr(address(p.t, mode, container))
}

// begin has the peer carry out line; reply waits for its answer.
func (p *peer) begin(line string) {
	p.t.Helper()
	raw, err := json.Marshal(line)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.stdin.Write(append(raw, '\n')); err != nil {
		p.t.Fatalf("peer %s: %s: %v", p.name, line, err)
	}
}

func (p *peer) reply(line string) string {
	p.t.Helper()
	select {
	case r, ok := <-p.replies:
		if !ok {
			p.t.Fatalf("peer %s ended at: %s", p.name, line)
		}
		if strings.HasPrefix(r, `{"mistake"`) {
			p.t.Fatalf("peer %s: %s: %s", p.name, line, r)
		}
		return r
	case <-time.After(patience):
		p.t.Fatalf("peer %s did not answer within %s: %s", p.name, patience, line)
	}
	return ""
}

// do has the peer carry out a line of Python and gives its answer as JSON.
func (p *peer) do(format string, args ...any) string {
	p.t.Helper()
	line := fmt.Sprintf(format, args...)
	p.begin(line)
	return p.reply(line)
}

// must is do for lines whose failure ends the test.
func (p *peer) must(format string, args ...any) string {
	p.t.Helper()
	r := p.do(format, args...)
	if strings.HasPrefix(r, `{"error"`) {
		p.t.Fatalf("peer %s: %s: %s", p.name, fmt.Sprintf(format, args...), r)
	}
	return r
}

// expect is do with a known answer.
func (p *peer) expect(want, format string, args ...any) {
	p.t.Helper()
	if got := p.do(format, args...); got != want {
		p.t.Errorf("peer %s: %s: %s, want %s", p.name, fmt.Sprintf(format, args...), got, want)
	}
}

// portOf gives the port of socket variable s.
func (p *peer) portOf(s string) uint16 {
	p.t.Helper()
	var port uint16
	raw := p.must("%s.getsockname()[1]", s)
	if err := json.Unmarshal([]byte(raw), &port); err != nil {
		p.t.Fatalf("port of %s: %v", s, err)
	}
	return port
}

// ephemeralPort matches ports that the kernel chose, in what a peer answered: an address is followed
// by its port.
var ephemeralPort = regexp.MustCompile(`(", )(3276[89]|327[7-9]\d|32[89]\d\d|3[3-9]\d{3}|[45]\d{4}|60\d{3})\b`)

// normalise names the ephemeral ports of a trace E1, E2 ... in the order they appear: which they are is
// chance, which of them are equal is not.
func normalise(trace []string) string {
	seen := map[string]string{}
	return ephemeralPort.ReplaceAllStringFunc(strings.Join(trace, "\n"), func(m string) string {
		if seen[m] == "" {
			seen[m] = fmt.Sprintf(`", E%d`, len(seen)+1)
		}
		return seen[m]
	})
}

// runEntered starts a peer in a network namespace that it enters from outside, without interception.
func runEntered(t testing.TB, netns string) *peer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	return runPeer(t, netns, exec.CommandContext(ctx, "nsenter", "--net=/run/netns/"+netns, python, "-c", peerScript), cancel)
}

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
)

// openTerminal gives both ends of a pseudo-terminal: the one that a person looks at, and the
// program's.
func openTerminal(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = person.Close() })
	if err := unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(person.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	return person, program
}

// TestTopOnATerminal: on a terminal what is shown is shown anew, in the same place, until it is
// interrupted, which is no error.
func TestTopOnATerminal(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	startAgent(t, socket, "n1")
	person, program := openTerminal(t)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	cmd := newTopCmd()
	cmd.SetOut(program)
	cmd.SetArgs([]string{"--api", socket, "--interval", "100ms"})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	const home = "\x1b[H"
	seen, buf := "", make([]byte, 4096)
	for strings.Count(seen, home) < 3 {
		n, err := person.Read(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, seen)
		}
		seen += string(buf[:n])
	}
	screens := strings.Split(seen, home)
	for _, screen := range screens[1:3] { // those that are whole
		if !strings.Contains(screen, "n1/c1") || !strings.HasSuffix(screen, "\x1b[J") || strings.Count(screen, "\n") != strings.Count(screen, "\x1b[K") {
			t.Errorf("no whole screen: %q", screen)
		}
	}
	interrupt()
	if err := <-done; err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

// TestTopInterruptedMeanwhile: it is no error either if the agent has yet to answer.
func TestTopInterruptedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	startAgent(t, filepath.Join(dir, "n1.sock"), "n1")
	l, err := net.Listen("unix", filepath.Join(dir, "slow.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	agent := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "n1"})
	agent.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, "n1.sock"))
	}}
	var asked atomic.Int32
	slow := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/status" && asked.Add(1) == 2 {
			interrupt()
			<-r.Context().Done()
			return
		}
		agent.ServeHTTP(w, r)
	})}
	go func() { _ = slow.Serve(l) }()
	defer func() { _ = slow.Close() }()
	f := topFlags{agentFlags{output: tableOutput}, minTopInterval, 5}
	err = f.run(ctx, agents{clients: []*api.Client{api.Dial(filepath.Join(dir, "slow.sock"))}}, io.Discard)
	if err != nil || asked.Load() != 2 {
		t.Errorf("asked %d times, error %v", asked.Load(), err)
	}
}

// TestTopWithoutOneNode: what others say is shown beside the error of a node that does not answer,
// which is asked once: each question waits for it.
func TestTopWithoutOneNode(t *testing.T) {
	dir := t.TempDir()
	startAgent(t, filepath.Join(dir, "n1.sock"), "n1")
	var asked atomic.Int32
	l, err := net.Listen("unix", filepath.Join(dir, "n2.sock"))
	if err != nil {
		t.Fatal(err)
	}
	silent := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		http.Error(w, "no answer", http.StatusServiceUnavailable)
	})}
	go func() { _ = silent.Serve(l) }()
	defer func() { _ = silent.Close() }()
	f := topFlags{agentFlags{output: tableOutput}, minTopInterval, 5}
	var out strings.Builder
	err = f.run(t.Context(), agents{clients: []*api.Client{api.Dial(filepath.Join(dir, "n1.sock")), api.Dial(filepath.Join(dir, "n2.sock"))}, several: true}, &out)
	if err == nil || !strings.Contains(err.Error(), "n2.sock") || !strings.Contains(out.String(), "n1/c1") || asked.Load() != 1 {
		t.Errorf("asked %d times, error %v, shown %q", asked.Load(), err, out.String())
	}
}

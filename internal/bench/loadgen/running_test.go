package loadgen

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

// waitTimeout bounds every wait for a command.
const waitTimeout = time.Minute

// running is a command of the peer that runs in this process, with pipes as another program would
// have them. They end with it, so whoever reads what it says, or tells it something, notices.
type running struct {
	t       *testing.T
	in      *io.PipeWriter
	printed *io.PipeReader
	out     *bufio.Reader
	ended   chan struct{} // closed when it has, after err was set
	err     error
}

// startMain starts a command, and ends it with the test by the end of its input.
func startMain(t *testing.T, args ...string) *running {
	t.Helper()
	input, in := io.Pipe()
	printed, out := io.Pipe()
	r := &running{t: t, in: in, printed: printed, out: bufio.NewReader(printed), ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = Main(t.Context(), args, Streams{In: input, Out: out, Err: io.Discard})
		_ = input.CloseWithError(fmt.Errorf("%s has ended: %w", args[0], io.ErrClosedPipe))
		_ = out.Close()
	}()
	t.Cleanup(func() {
		_ = in.Close()
		_ = printed.Close()
		<-r.ended // by then, if not by the end of its input, its context has ended
	})
	return r
}

// line reads what the command says next. It must not end before.
func (r *running) line() string {
	r.t.Helper()
	watchdog := time.AfterFunc(waitTimeout, func() { _ = r.printed.CloseWithError(fmt.Errorf("nothing within %s", waitTimeout)) })
	defer watchdog.Stop()
	line, err := r.out.ReadString('\n')
	if err != nil {
		_ = r.printed.Close()
		select {
		case <-r.ended:
			err = fmt.Errorf("%w: it ended with %v", err, r.err)
		case <-time.After(time.Second):
		}
		r.t.Fatalf("printed %q: %v", line, err)
	}
	return strings.TrimSuffix(line, "\n")
}

// awaitReady reads the line that says that the command is ready, which must be the first.
func (r *running) awaitReady() {
	r.t.Helper()
	if line := r.line(); line != Ready {
		r.t.Fatalf("printed %q, want %q", line, Ready)
	}
}

// read reads a line of JSON.
func (r *running) read(result any) {
	r.t.Helper()
	line := r.line()
	if err := json.Unmarshal([]byte(line), result); err != nil {
		r.t.Fatalf("printed %q: %v", line, err)
	}
}

// tell writes to the command's input.
func (r *running) tell(text string) {
	r.t.Helper()
	if _, err := io.WriteString(r.in, text); err != nil {
		r.t.Fatal(err)
	}
}

// end waits for the command's end, gives what else it printed, and fails the test if it ended with
// an error.
func (r *running) end() string {
	r.t.Helper()
	watchdog := time.AfterFunc(waitTimeout, func() { _ = r.printed.CloseWithError(fmt.Errorf("no end within %s", waitTimeout)) })
	defer watchdog.Stop()
	rest, err := io.ReadAll(r.out)
	if err != nil {
		r.t.Fatal(err)
	}
	<-r.ended // its output has
	if r.err != nil {
		r.t.Errorf("it ended with %v", r.err)
	}
	return string(rest)
}

// stop ends the command's input, and waits for its end.
func (r *running) stop() string {
	r.t.Helper()
	_ = r.in.Close()
	return r.end()
}

// TestWaitNoticesTheEnd: who waits for what a command says, or tells it something, notices that it
// has ended.
func TestWaitNoticesTheEnd(t *testing.T) {
	r := startMain(t, "guard", "--", "sh", "-c", "echo said; exit 3")
	if line := r.line(); line != "said" {
		t.Errorf("printed %q", line)
	}
	if _, err := r.out.ReadString('\n'); err != io.EOF {
		t.Errorf("reading: %v", err)
	}
	<-r.ended
	if _, err := io.WriteString(r.in, "go\n"); err == nil {
		t.Error("writing succeeds")
	}
	if r.err == nil || !strings.Contains(r.err.Error(), "exit status 3") {
		t.Errorf("ended with %v", r.err)
	}
}

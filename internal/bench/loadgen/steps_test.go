package loadgen

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSteps takes some connections through their life: each step when it is told to, and none
// before.
func TestSteps(t *testing.T) {
	address := freePort(t, "tcp", "127.0.0.1:0")
	startEcho(t, address)
	client := startMain(t, "steps", "-to", address, "-connections", "5", "-trips", "20")
	client.awaitReady()
	for i, want := range []int{5, 5, 5, 5, 20, 2, 5} {
		client.tell("go\n")
		var s Step
		if client.read(&s); s.Name != Steps[i] || s.Operations != want || s.ElapsedS <= 0 {
			t.Errorf("step %s printed %+v, want %d operations", Steps[i], s, want)
		}
	}
	client.end()
}

func TestStepsEndWithInput(t *testing.T) {
	err := Main(t.Context(), []string{"steps", "-to", "127.0.0.1:1"}, Streams{In: strings.NewReader(""), Out: io.Discard, Err: t.Output()})
	if err == nil || !strings.Contains(err.Error(), "input ended") {
		t.Errorf("got %v", err)
	}
	err = Main(t.Context(), []string{"steps", "-to", "127.0.0.1:1", "-lifetime", "1ms"}, Streams{In: strings.NewReader("go\ngo\n"), Out: io.Discard, Err: t.Output()})
	if err == nil || !errors.Is(err, unix.ECONNREFUSED) && !strings.Contains(err.Error(), "deadline") {
		t.Errorf("nobody listens: %v", err)
	}
}

func TestSyscalls(t *testing.T) {
	var out strings.Builder
	if err := Main(t.Context(), []string{"syscalls", "-duration", "20ms"}, Streams{In: strings.NewReader(""), Out: &out, Err: t.Output()}); err != nil {
		t.Fatal(err)
	}
	rest, ready := strings.CutPrefix(out.String(), Ready+"\n")
	var r Syscalls
	if err := json.Unmarshal([]byte(rest), &r); err != nil || !ready {
		t.Fatalf("%q: %v", &out, err)
	}
	for _, name := range SyscallNames {
		if r.Ns[name] <= 0 {
			t.Errorf("%s: %g ns", name, r.Ns[name])
		}
	}
}

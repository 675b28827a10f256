package differ_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/differ"
	"heddle.dev/heddle/internal/differ/generate"
)

// localLab has workers on this machine: both modes are the same stack, and all addresses 127.0.0.1.
func localLab(t *testing.T) differ.Lab {
	t.Helper()
	dir := t.TempDir()
	executor := filepath.Join(dir, "executor")
	build := exec.Command("go", "build", "-o", executor, "./executor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the executor: %v\n%s", err, out)
	}
	hub, err := differ.Listen(filepath.Join(dir, "hub"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(hub.Close)
	for _, mode := range []string{"overlay", "heddle"} {
		serve := exec.Command(executor, "serve", filepath.Join(dir, "hub"), differ.Pool("n1/c1", mode), "2")
		var stderr strings.Builder
		serve.Stderr = &stderr
		stdin, err := serve.StdinPipe()
		if err == nil {
			err = serve.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = stdin.Close()
			if err := serve.Wait(); err != nil || stderr.Len() > 0 && t.Failed() {
				t.Logf("executor: %v\n%s", err, stderr.String())
			}
		})
	}
	return differ.Lab{Hub: hub, Addrs: map[string]differ.Addrs{"n1/c1": {V4: "127.0.0.1", V6: "::1"}},
		Spare: differ.Addrs{V4: "127.0.0.9"}, Gateway: differ.Addrs{V4: "127.0.0.8"}}
}

// talk is a program in which something of everything happens.
func talk(t *testing.T) differ.Program {
	t.Helper()
	list, err := differ.Load("../../test/sockets/testdata/differ/conversation.json")
	if err != nil {
		t.Fatal(err)
	}
	p := list[0]
	p.A, p.B = "n1/c1", "n1/c1"
	return p
}

// TestTrace checks what the executor says of a program whose trace is known.
func TestTrace(t *testing.T) {
	lab := localLab(t)
	p := talk(t)
	for range 3 { // nothing may be left of the program before
		got, err := lab.Run(p, "overlay", differ.Slow)
		if err != nil {
			t.Fatal(err)
		}
		text := differ.Diff(p, got, got)
		for _, want := range []string{
			"accept4(f0, 0x0, addrlen 128) = blocks\n",
			"connect(f0, 4[b]:P1) = 0\n        then   4 b: f1 = accept4(f0, 0x0, addrlen 128) = 21 <a E1> len 16\n",
			"b: fork() = 0 has f0 f1\n",
			"b+: read(f1, n 100) = 50 50x'g'",
			"b+: exit() = 0\n        now  a f0: IN|OUT|RDHUP 10 to read CLOSE_WAIT\n",
			"a: getsockname(f0, addrlen 128) = 0 <a E1> len 16",
		} {
			if !strings.Contains(text, want) {
				t.Fatalf("the trace has no %q:\n%s", want, text)
			}
		}
	}
}

// TestWrongErrnoIsFound has an executor lie in one mode, and expects the tester to find it and to
// shrink the program to the call that matters.
func TestWrongErrnoIsFound(t *testing.T) {
	lab := localLab(t)
	lying := func(p differ.Program, mode string, pace differ.Pace) (differ.Trace, error) {
		trace, err := lab.Run(p, mode, pace)
		for i, e := range trace.Entries {
			if mode == "heddle" && e.Step < len(p.Steps) && p.Steps[e.Step].Op == "getpeername" && strings.HasPrefix(e.Result, "ENOTCONN") {
				trace.Entries[i].Result = strings.Replace(e.Result, "ENOTCONN", "EPERM", 1)
			}
		}
		return trace, err
	}
	p := talk(t)
	p.Steps = append(p.Steps, differ.Step{At: "b", Op: "getpeername", Args: []int{128}})
	found, err := differ.Check(lying, p, 2)
	if err != nil || found == nil {
		t.Fatalf("not found: %v", err)
	}
	small := differ.Shrink(lying, *found, func(differ.Program) bool { return true }, time.Minute)
	if want := "getpeername: EPERM, not ENOTCONN"; small.Kind() != want {
		t.Errorf("kind %q, want %q", small.Kind(), want)
	}
	if n := len(small.Program.Steps); n != 2 || small.Program.Steps[0].Op != "socket" {
		t.Errorf("shrunk to %d steps, want socket and getpeername:\n%s", n, small)
	}
	if !strings.Contains(small.String(), "-   1 b: getpeername(f0, addrlen 128) = ENOTCONN\n+   1 b: getpeername(f0, addrlen 128) = EPERM\n") {
		t.Errorf("the finding does not show the difference:\n%s", small)
	}
}

// TestSameStackIsEqual runs generated programs where both modes are one stack: what differs would
// be the tester's own doing.
func TestSameStackIsEqual(t *testing.T) {
	lab := localLab(t)
	for seed, ran := uint64(1), 0; ran < 100; seed++ {
		p := generate.Intercepted.Program(seed)
		if p.A != p.B {
			continue
		}
		ran++
		f, err := differ.Check(lab.Run, p, 3)
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, p)
		}
		if f != nil {
			t.Error(f)
		}
	}
}

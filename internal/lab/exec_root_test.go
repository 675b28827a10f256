package lab

import (
	"bufio"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// testExecOfParent: `lab exec` ends with its command, whoever else holds the command's streams.
func (c *cli) testExecOfParent(t *testing.T) {
	for _, m := range Modes {
		cmd := c.command("exec", "--mode", string(m), "n1/c1", "--", "sh", "-c", "sleep 1000 & echo $!; wait")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		child, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 128+int(syscall.SIGTERM) {
				t.Errorf("mode %s: after SIGTERM: %v, want exit status 143", m, err)
			}
		case <-time.After(30 * time.Second):
			t.Errorf("mode %s: still there 30 s after SIGTERM ended its command", m)
		}
		// What the command left behind is there still, and none of `lab exec`'s business.
		c.must(t, "exec", "--mode", string(m), "n1/c1", "--", "kill", strings.TrimSpace(child))
		if t.Failed() {
			<-ended
			return
		}
	}
}

// testKilledFromWithin: a container whose processes were all killed from within is not called up,
// and `up` starts it again.
func (c *cli) testKilledFromWithin(t *testing.T) {
	down := func() string {
		out, err := exec.Command(c.heddle, "lab", "list", "--output", "json").Output()
		var all struct {
			Labs []struct {
				Name string
				Down []string
			}
		}
		if err != nil || json.Unmarshal(out, &all) != nil {
			t.Fatalf("lab list: %v\n%s", err, out)
		}
		for _, l := range all.Labs {
			if l.Name == c.lab.name {
				return strings.Join(l.Down, "; ")
			}
		}
		t.Fatalf("lab list does not have %s:\n%s", c.lab.name, out)
		return ""
	}
	if got := down(); got != "" {
		t.Fatalf("down before anything was killed: %s", got)
	}
	c.must(t, "exec", "n2/c1", "--", "python3", "-c", "import os; os.kill(-1, 9)")
	const want = "n2/c1 (overlay, host)"
	// A killed process is there for a moment.
	for deadline := time.Now().Add(processesDie); down() != want; {
		if time.Now().After(deadline) {
			t.Fatalf("down: %q, want %q", down(), want)
		}
	}
	if out, err := c.run("exec", "--mode", "overlay", "n2/c1", "--", "true"); err == nil || !strings.Contains(out, "lab up") {
		t.Errorf("exec in a container that is down: %v, %q", err, out)
	}
	c.must(t, "exec", "n2/c1", "--", "true")
	if out := c.must(t, "up"); !strings.Contains(out, want+" is down") {
		t.Errorf("up does not say what was down: %s", out)
	}
	if got := down(); got != "" {
		t.Errorf("down after up: %s", got)
	}
	for _, m := range Modes {
		c.must(t, "exec", "--mode", string(m), "n2/c1", "--", "true")
	}
}

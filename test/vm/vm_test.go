// Package vm_test tries TCP of a virtual machine that has no network device (rust/heddle-machine):
// an emulated one, in a container of a lab, whose stack is the node's kernel and then smoltcp.
// `make test-vm`; HEDDLE_KERNEL is the file of a kernel's Debian package, without which the test is
// skipped.
package vm_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
	"heddle.dev/heddle/test/machine"
)

// timeout bounds what a machine may take for a script that takes half a minute.
const timeout = 10 * time.Minute

func TestMain(m *testing.M) {
	lab.Flags = []string{"--stacks"} // smoltcp needs containers that are started so
	os.Exit(lab.Main(m, "vm"))
}

// script is what the machine runs. What it waits for are connections that the test closes: `hold`.
const script = `cd %[1]s/clib/testdata
export PATH=%[2]s:$PATH
ls /sys/class/net
guest() {
	heddle-machine guest &
	daemon=$!
	until [ -S /run/heddle-machine.sock ]; do sleep 0.1; done
}
try() { LD_PRELOAD=%[2]s/libheddle-machine.so python3 machine.py "$@"; }
program() { try "$@" || exit 1; }
guest
program send %[3]s %[4]d
program calls %[3]s %[4]d 1
program echo 8000 &
program hold %[3]s %[5]d
echo "machine: by smoltcp"
program send %[3]s %[4]d
program hold %[3]s %[5]d
echo "machine: service killed"
program send %[3]s %[4]d
program hold %[3]s %[5]d
kill -9 $daemon
guest
until try send %[3]s %[4]d 2>/dev/null; do sleep 0.1; done
echo "machine: guest killed"
program hold %[3]s %[5]d
exit 9
`

// console collects what the machine prints.
type console struct {
	t   *testing.T
	mu  sync.Mutex
	all strings.Builder
	// ended gets how the machine ended.
	ended chan error
}

func (c *console) line(line string) {
	c.t.Logf("machine: %s", line)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all.WriteString(line + "\n")
}

func (c *console) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all.String()
}

// waitFor waits until the machine has printed text so often. A machine is slow.
func (c *console) waitFor(text string, times int) {
	c.t.Helper()
	deadline := time.Now().Add(timeout)
	for strings.Count(c.text(), text) < times {
		if time.Now().After(deadline) {
			c.t.Fatalf("the machine does not say %q %d times", text, times)
		}
		select {
		case <-c.t.Context().Done():
			c.t.FailNow()
		case err := <-c.ended:
			c.t.Fatalf("the machine ended before it said %q %d times: %v", text, times, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// started gives the process of a name whose arguments have a word, or whose parent is another one.
func started(t *testing.T, name string, is func(words []string, parent int) bool) (pid int) {
	t.Helper()
	testutil.Eventually(t, name+" to run", func() (bool, string) {
		all, _ := filepath.Glob("/proc/[0-9]*")
		for _, dir := range all {
			line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
			words := strings.Split(string(line), "\x00")
			stat, err2 := os.ReadFile(filepath.Join(dir, "stat"))
			if err != nil || err2 != nil || filepath.Base(words[0]) != name {
				continue
			}
			fields := strings.Fields(string(stat)[strings.LastIndexByte(string(stat), ')')+1:])
			parent, _ := strconv.Atoi(fields[1])
			if is(words, parent) {
				pid, _ = strconv.Atoi(filepath.Base(dir))
				return true, ""
			}
		}
		return false, ""
	})
	return pid
}

// profile has smoltcp run the TCP of the machine's container.
const profile = `apiVersion: heddle.dev/v1
kind: StackProfile
name: machine
selector: {labels: {stack: machine}}
stack: smoltcp
fallback: refuse
`

// TestMachine: programs of a machine connect, listen and have their bytes, by the kernel's TCP and by
// smoltcp; a service that is killed, a guest and a machine that are killed have connections end.
func TestMachine(t *testing.T) {
	kernel := os.Getenv("HEDDLE_KERNEL")
	if kernel == "" {
		t.Skip("HEDDLE_KERNEL does not name a kernel's package: make test-vm does")
	}
	root, err := filepath.Abs("../..")
	testutil.NoError(t, err)
	bin := filepath.Dir(lab.Bin)
	built, err := machine.Image{Kernel: kernel, Root: "/"}.Build(t.TempDir())
	testutil.NoError(t, err)

	program := filepath.Join(root, "clib/testdata/machine.py")
	peer, own := lab.OverlayOf("n2/c1")(t), lab.OverlayOf("n1/c1")(t)
	port, gate := lab.FreePort(), lab.FreePort()
	lab.Start(t, "heddle", "n2/c1", "python3", program, "echo", fmt.Sprint(port)).WaitFor("listening at")
	server := lab.StartPeer(t, "heddle", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d); l.settimeout(25)`, gate)

	console := &console{t: t, ended: make(chan error, 1)}
	tag := fmt.Sprintf("heddle.test=%d", os.Getpid())
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	go func() {
		_, err := built.Run(ctx, fmt.Sprintf(script, root, bin, peer, port, gate), machine.Options{
			Through: []string{lab.Bin, "lab", "exec", "--lab", lab.Name, "--mode", "heddle", "n1/c1", "--", filepath.Join(bin, "heddle-machine"), "run", "--memory", "16", "--"},
			Memory:  "/dev/fd/3", MemoryMegabytes: 16, Arguments: tag, Console: machine.Lines(console.line), Megabytes: 2048,
		})
		console.ended <- err
	}()
	fetch := func() {
		t.Helper()
		if out := lab.MustRun(t, "heddle", "n2/c1", "python3", program, "send", own, "8000"); !strings.Contains(out, "equal 1048576") {
			t.Errorf("%s", out)
		}
	}

	console.waitFor("calls are as they should be", 1)
	if s := console.text(); strings.Count(s, "equal 1048576") != 1 || !strings.HasPrefix(s, "lo\nheddle-machine: there is a service") {
		t.Errorf("the machine has a network device, or not its bytes:\n%s", s)
	}
	console.waitFor("listening at", 1)
	server.Must(`c, _ = l.accept()`)
	fetch()

	// By another stack, which the machine does not notice.
	file := filepath.Join(t.TempDir(), "machine.yaml")
	lab.WriteFile(t, file, []byte(profile))
	lab.Heddle(t, "endpoints", "label", "--node", "n1", "n1/c1", "stack=machine")
	lab.Heddle(t, "stack", "apply", file)
	t.Cleanup(func() { _ = lab.Command("stack", "delete", "machine") })
	server.Must(`c.close()`)
	console.waitFor("machine: by smoltcp", 1)
	server.Must(`c, _ = l.accept()`)
	console.waitFor("connected from", 2) // the peer knows that first

	var parent int
	qemu := started(t, "qemu-system-x86_64", func(words []string, p int) bool {
		parent = p
		return strings.Contains(strings.Join(words, " "), tag)
	})
	service := started(t, "heddle-machine", func(words []string, p int) bool { return p == parent && words[1] == "serve" })
	testutil.NoError(t, syscall.Kill(service, syscall.SIGKILL))
	console.waitFor("read ends with ECONNRESET", 1)
	server.Must(`c.close()`)
	console.waitFor("machine: service killed", 1)
	fetch()
	server.Must(`c, _ = l.accept()`)
	server.Must(`c.close()`)
	console.waitFor("machine: guest killed", 1)
	server.Must(`c, _ = l.accept()`)
	testutil.NoError(t, syscall.Kill(qemu, syscall.SIGKILL))
	if said := server.Do(`c.settimeout(25) or c.recv(1)`); !strings.Contains(said, "ECONNRESET") {
		t.Errorf("the peer of a machine that was killed reads %q, and not ECONNRESET", said)
	}
	if err := <-console.ended; err == nil {
		t.Error("the machine ended by itself")
	}
}

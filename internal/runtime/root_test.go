package runtime

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// The tests here run containers. Root file system: overlayfs over the machine's own. First process:
// this test binary, which makes sockets of every kind and prints what it got. With Heddle's edit,
// TCP sockets must come to the listener, which answers them with EXDEV: an errno socket() never
// gives.

const (
	envProbe   = "HEDDLE_TEST_PROBE"
	envWrapper = "HEDDLE_TEST_WRAPPER"
	answer     = unix.EXDEV
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(envProbe) != "":
		printSockets()
		return
	case os.Getenv(envWrapper) != "":
		fmt.Fprintln(os.Stderr, Exec(os.Args[1:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func printSockets() {
	for _, d := range []int{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK, unix.AF_PACKET, unix.AF_ALG, unix.AF_VSOCK, 99} {
		for _, ty := range []int{unix.SOCK_STREAM, unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, unix.SOCK_DGRAM, unix.SOCK_RAW, unix.SOCK_SEQPACKET} {
			result := "ok"
			if fd, err := unix.Socket(d, ty, 0); err != nil {
				result = unix.ErrnoName(err.(unix.Errno))
			} else {
				unix.Close(fd)
			}
			fmt.Printf("socket(%d,%#x) %s\n", d, ty, result)
		}
	}
}

// supervisor takes the listeners runc hands over and answers every trapped call with EXDEV. Each
// connection and each listener has a goroutine; they end with the container.
func supervisor(t *testing.T) (path string, metadata chan string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	metadata = make(chan string, 16)
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			data, oob := make([]byte, 1<<16), make([]byte, 1<<10)
			n, on, _, _, err := c.ReadMsgUnix(data, oob)
			c.Close()
			if err != nil {
				metadata <- "error: " + err.Error()
				continue
			}
			var state struct{ Metadata string }
			msgs, _ := unix.ParseSocketControlMessage(oob[:on])
			if json.Unmarshal(data[:n], &state) != nil || len(msgs) != 1 {
				metadata <- "error: " + string(data[:n])
				continue
			}
			fds, _ := unix.ParseUnixRights(&msgs[0])
			metadata <- state.Metadata
			go answerAll(fds[0])
		}
	}()
	return path, metadata
}

// demandMetadata compares what the runtime sent with a listener, which it must have sent by now.
func demandMetadata(t *testing.T, metadata <-chan string, want string) {
	t.Helper()
	select {
	case got := <-metadata:
		if got != want {
			t.Errorf("metadata %q, want the endpoint's name, %q", got, want)
		}
	case <-time.After(30 * time.Second):
		t.Error("no listener came from the runtime")
	}
}

func answerAll(fd int) {
	defer unix.Close(fd)
	for {
		var notif [80]byte // struct seccomp_notif: the id comes first
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 0xc0502100, uintptr(unsafe.Pointer(&notif))); e == unix.EINTR {
			continue
		} else if e == unix.ENOENT && !ended(fd) {
			continue // a signal took the caller out of the call
		} else if e != 0 {
			return
		}
		reply := struct {
			id    uint64
			val   int64
			error int32
			flags uint32
		}{id: *(*uint64)(unsafe.Pointer(&notif)), error: -int32(answer)}
		unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 0xc0182101, uintptr(unsafe.Pointer(&reply)))
	}
}

// ended reports whether every task of the listener fd is gone.
func ended(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLHUP != 0
}

// container is a bundle whose first process prints its sockets.
type container struct{ id, bundle, runcRoot string }

func newContainer(t *testing.T, annotations string, profile string) *container {
	t.Helper()
	testutil.NeedRoot(t, "runs containers")
	if _, err := FindRuntime(""); err != nil {
		t.Skip(err)
	}
	// Not t.TempDir(): its name is the test's, and a comma or colon in it is overlayfs syntax.
	dir, err := os.MkdirTemp("", "heddle-runtime-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	rootfs, scratch := filepath.Join(dir, "rootfs"), filepath.Join(dir, "scratch")
	for _, d := range []string{rootfs, scratch} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount := func(source, target, fstype, data string) {
		if err := unix.Mount(source, target, fstype, 0, data); err != nil {
			t.Fatalf("mount %s: %v", target, err)
		}
		t.Cleanup(func() { unix.Unmount(target, unix.MNT_DETACH) })
	}
	mount("tmpfs", scratch, "tmpfs", "")
	for _, d := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(scratch, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount("overlay", rootfs, "overlay", "lowerdir=/,upperdir="+scratch+"/upper,workdir="+scratch+"/work")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	caps := `["CAP_NET_RAW","CAP_NET_ADMIN"]`
	config := fmt.Sprintf(`{"ociVersion":"1.0.2","root":{"path":%q},"hostname":"probe",
		"process":{"cwd":"/","args":["/probe/%s"],"env":["%s=1","GOMAXPROCS=1","GORACE=%s"],"noNewPrivileges":true,
			"capabilities":{"bounding":%s,"effective":%s,"permitted":%s}},
		"mounts":[{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/dev","type":"tmpfs","source":"tmpfs"},
			{"destination":"/probe","type":"bind","source":%q,"options":["bind","ro"]}],
		"annotations":{%s},
		"linux":{"namespaces":[{"type":"pid"},{"type":"network"},{"type":"ipc"},{"type":"uts"},{"type":"mount"}]%s}}`,
		rootfs, filepath.Base(exe), envProbe, os.Getenv("GORACE"), caps, caps, caps, filepath.Dir(exe), annotations, profile)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &container{id: filepath.Base(dir), bundle: dir, runcRoot: filepath.Join(scratch, "runc")}
	t.Cleanup(func() { c.runc("", "delete", "--force", c.id) })
	return c
}

// runc runs the real runtime, through the wrapper if socket is given, and gives its output.
func (c *container) runc(socket string, args ...string) (string, error) {
	program, _ := FindRuntime("")
	if socket != "" {
		program, _ = os.Executable()
	}
	cmd := exec.Command(program, append([]string{"--root", c.runcRoot}, args...)...)
	if socket != "" {
		cmd.Env = append(os.Environ(), envWrapper+"=1", EnvSocket+"="+socket)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func (c *container) run(t *testing.T, socket string) map[string]string {
	t.Helper()
	out, err := c.runc(socket, "run", "--bundle", c.bundle, c.id)
	if err != nil {
		t.Fatalf("runc run: %v\n%s", err, out)
	}
	return parseProbe(t, out)
}

func parseProbe(t *testing.T, out string) map[string]string {
	t.Helper()
	results := map[string]string{}
	for line := range strings.Lines(out) {
		if call, result, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			results[call] = result
		}
	}
	if len(results) != 40 {
		t.Fatalf("probe printed %d results:\n%s", len(results), out)
	}
	return results
}

func isTCPCall(call string) bool {
	var d, ty int
	fmt.Sscanf(call, "socket(%d,%v)", &d, &ty)
	return isTCP([6]uint64{uint64(d), uint64(ty)})
}

// TestContainer runs every kind of profile twice, without and with Heddle, and compares what
// sockets the container gets.
func TestContainer(t *testing.T) {
	profiles := map[string]string{"none": ""}
	files, _ := filepath.Glob("testdata/docker*.json")
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		profiles[filepath.Base(f)] = `,"seccomp":` + string(text)
	}
	for _, c := range mergeCases {
		// A profile that allows little else than sockets runs no program.
		profiles[c.name] = `,"seccomp":` + strings.Replace(c.profile, errDef, errDef+everythingButSockets(t)+",", 1)
	}
	delete(profiles, "errno: nothing") // bad JSON after the above: a comma too many
	for _, kills := range []string{"kill default", "allow: IP forbidden"} {
		delete(profiles, kills) // the probe, as they should
	}
	// libseccomp refuses a rule without conditions beside one of another action, Heddle or not
	// (EEXIST).
	delete(profiles, "errno: IPv4 forbidden by a rule")
	for name, profile := range profiles {
		t.Run(name, func(t *testing.T) {
			before := newContainer(t, "", profile).run(t, "")
			socket, metadata := supervisor(t)
			after := newContainer(t, `"io.heddle.endpoint":"n1/c1"`, profile).run(t, socket)
			trapped := 0
			for call, was := range before {
				want := was
				if isTCPCall(call) && was == "ok" {
					want = "EXDEV"
					trapped++
				}
				if after[call] != want {
					t.Errorf("%s: %s without Heddle, %s with, want %s", call, was, after[call], want)
				}
			}
			if trapped > 0 {
				demandMetadata(t, metadata, "n1/c1")
			}
		})
	}
}

// everythingButSockets are the rules of Docker's profile without those for socket().
func everythingButSockets(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("testdata/docker29.json")
	if err != nil {
		t.Fatal(err)
	}
	var rules []string
	for _, e := range parseProfile(t, string(text))["syscalls"].([]any) {
		names, err := readStrings(e.(object), "rule", "names")
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(names, "socket") {
			continue
		}
		rule, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		rules = append(rules, string(rule))
	}
	return strings.Join(rules, ",")
}

// TestExecIsTrappedToo: a process that joins a running container gets the same listener.
func TestExecIsTrappedToo(t *testing.T) {
	c := newContainer(t, `"io.heddle.endpoint":"n1/c1"`, "")
	config, err := os.ReadFile(filepath.Join(c.bundle, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	exe, _ := os.Executable()
	probe := "/probe/" + filepath.Base(exe)
	config = bytes.Replace(config, []byte(`["`+probe+`"]`), []byte(`["sleep","infinity"]`), 1)
	config = bytes.Replace(config, []byte(`"env":[`), []byte(`"env":["PATH=/usr/bin:/bin",`), 1)
	if err := os.WriteFile(filepath.Join(c.bundle, "config.json"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	socket, metadata := supervisor(t)
	// Detached, the container keeps the output: /dev/null, or the test would wait for its end.
	wrapper := exec.Command(exe, "--root", c.runcRoot, "run", "--detach", "--bundle", c.bundle, c.id)
	wrapper.Env = append(os.Environ(), envWrapper+"=1", EnvSocket+"="+socket)
	if err := wrapper.Run(); err != nil {
		t.Fatalf("run --detach: %v", err)
	}
	out, err := c.runc(socket, "exec", c.id, probe)
	if err != nil {
		t.Fatalf("exec: %v\n%s", err, out)
	}
	for call, result := range parseProbe(t, out) {
		if (result == "EXDEV") != isTCPCall(call) {
			t.Errorf("%s: %s", call, result)
		}
	}
	for range 2 {
		demandMetadata(t, metadata, "n1/c1")
	}
}

// TestWrapperRefusesSecondListener: the error reaches the caller, and nothing is started.
func TestWrapperRefusesSecondListener(t *testing.T) {
	c := newContainer(t, `"io.heddle.endpoint":"n1/c1"`, `,"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/other"}`)
	out, err := c.runc("/run/none.sock", "create", "--bundle", c.bundle, c.id)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(out, "listenerPath") || !strings.Contains(out, c.bundle) {
		t.Errorf("create: %v\n%s", err, out)
	}
	if _, err := c.runc("", "state", c.id); err == nil {
		t.Error("the container exists")
	}
}

// TestUnreadableUpperHalf pins a fact the rules rest on: seccomp compares 64 bits, the kernel uses
// 32, so an odd caller gets past the trap, to a socket of its own namespace. The overlay carries
// it.
func TestUnreadableUpperHalf(t *testing.T) {
	after, _ := edited(t, allowDef+`]}`, traps)
	if got := newEvaluator(t, after, "socket").action([6]uint64{math.MaxUint32<<32 | 2, 1}); got != actAllow {
		t.Errorf("socket(0xffffffff00000002, 1): %s", got)
	}
}

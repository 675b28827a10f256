package engines

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// The container engines' tests run the engines themselves, one for each node of the lab, in the
// node's network namespace. All their state is in enginesRoot. A run that was killed leaves it and
// its processes behind; the next one of the lab's name takes them away.

// enginesRoot is a short path: it holds Unix sockets.
func enginesRoot() string { return filepath.Join(os.TempDir(), "heddle-"+lab.Name+"-engines") }

// engineDirs gives the engine of each node a directory. They are taken away at the end of the test,
// with every process and mount that belongs to them.
func engineDirs(t *testing.T, nodes ...string) map[string]string {
	t.Helper()
	if err := removeEngines(enginesRoot()); err != nil {
		t.Fatalf("what an earlier run left: %v", err)
	}
	t.Cleanup(func() {
		if err := removeEngines(enginesRoot()); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	dirs := make(map[string]string)
	for _, node := range nodes {
		dirs[node] = filepath.Join(enginesRoot(), node)
		testutil.NoError(t, os.MkdirAll(dirs[node], 0o755))
	}
	return dirs
}

// removeEngines ends the processes of engines with state below dir, containers included, and
// removes the state.
func removeEngines(dir string) error {
	deadline := time.Now().Add(testutil.WaitTimeout)
	for {
		pids, err := processesOf(dir)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v of %s do not end", pids, dir)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
		}
		time.Sleep(10 * time.Millisecond)
	}
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	// Docker's drivers, and what CNI's library keeps of attachments.
	for _, pattern := range []string{dockerPlugins + "/" + lab.Name + "-*.sock", "/var/lib/cni/results/" + engineNetwork() + "-*"} {
		left, err := filepath.Glob(pattern)
		for _, path := range left {
			err = errors.Join(err, os.Remove(path))
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(removeEngineNetns(), os.RemoveAll(dir), removeCgroups(engineCgroup()))
}

// dockerPlugins is where Docker looks for drivers.
const dockerPlugins = "/run/docker/plugins"

// removeEngineNetns removes the network namespaces of containers whose engine was killed: those of
// the lab's endpoints on the engines' network.
func removeEngineNetns() error {
	records, err := filepath.Glob(agentFile("*", "node.json"))
	if err != nil {
		return err
	}
	for _, path := range records {
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var record struct{ Endpoints []model.Endpoint }
		if err := json.Unmarshal(raw, &record); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, e := range record.Endpoints {
			name := filepath.Base(e.NetnsPath)
			if !strings.HasPrefix(e.Name, engineNetwork()) || filepath.Dir(e.NetnsPath) != netns.Dir || !netns.Exists(name) {
				continue
			}
			if err := netns.Delete(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// engineCgroup is the name of the cgroup, in each hierarchy, above those of the engines'
// containers.
func engineCgroup() string { return "heddle-" + lab.Name + "-engines" }

// removeCgroups removes the cgroup called name from every hierarchy, with all below it. Nothing
// runs there any more.
func removeCgroups(name string) error {
	tops, err := filepath.Glob("/sys/fs/cgroup/*/" + name)
	if err != nil {
		return err
	}
	tops = append(tops, filepath.Join("/sys/fs/cgroup", name))
	for _, top := range tops {
		var dirs []string
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil // it may be going away
		})
		if err != nil {
			return err
		}
		for _, d := range slices.Backward(dirs) {
			// A process that was killed is in its cgroup until it is reaped: what cannot be removed
			// yet is the next run's.
			_ = os.Remove(d)
		}
	}
	return nil
}

// processesOf finds the processes that name dir in their command line, and those of containers
// whose root file system is below it.
func processesOf(dir string) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		proc := filepath.Join("/proc", e.Name())
		if stat, err := os.ReadFile(filepath.Join(proc, "stat")); err != nil || bytes.Contains(stat, []byte(") Z ")) {
			continue
		}
		args, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		if bytes.Contains(args, []byte(dir+"/")) || rootIsBelow(proc, dir) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// rootIsBelow reports whether the root of a process's mount namespace is a file system whose parts
// are below dir.
func rootIsBelow(proc, dir string) bool {
	table, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == "/" {
			return strings.Contains(line, dir+"/")
		}
	}
	return false
}

// mountsBelow lists the mount points at dir and below it, in the order they were made.
func mountsBelow(dir string) (points []string, err error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 4 && (f[4] == dir || strings.HasPrefix(f[4], dir+"/")) {
			points = append(points, f[4])
		}
	}
	return points, nil
}

// nodeCommand gives a command that runs in a node's network namespace.
func nodeCommand(ctx context.Context, node string, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + netns.Path(lab.Name+"-"+node)}, argv...)...)
	cmd.Env = append(os.Environ(), "HEDDLE_SECCOMP_SOCKET="+agentFile(node, "seccomp.sock"))
	return cmd
}

// agentFile is a file that a node's agent has.
func agentFile(node, name string) string {
	return filepath.Join("/run/heddle/lab", lab.Name, node, name)
}

// startDaemon runs a program on a node until the test ends: then it is asked to end, and killed if
// it does not. ended is closed when it has, log is where it writes to.
func startDaemon(t *testing.T, what, node, dir string, argv ...string) (ended <-chan struct{}, log string) {
	t.Helper()
	file, err := os.CreateTemp(dir, "*.log")
	testutil.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cmd := nodeCommand(ctx, node, argv...)
	cmd.Stdout, cmd.Stderr = file, file
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	over := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ends is the test's to judge, from what it did
		close(over)
	}()
	t.Cleanup(func() {
		cancel()
		<-over
		if t.Failed() {
			raw, _ := os.ReadFile(file.Name())
			t.Logf("%s:\n%s", what, raw[max(0, len(raw)-8000):])
		}
		file.Close()
	})
	return over, file.Name()
}

// endpointsOn lists a node's endpoints.
func endpointsOn(t *testing.T, node string) []model.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
	defer cancel()
	client := api.Dial(lab.APISocket(node))
	defer client.Close()
	list, err := client.Endpoints(ctx)
	testutil.NoError(t, err)
	return list
}

// engineCLI is a way to call an engine's command line.
type engineCLI struct {
	t       *testing.T
	node    string
	command []string // in front of the arguments
}

// try runs the engine's command line to its end and gives what it printed on standard output, and
// on standard error.
func (e engineCLI) try(args ...string) (stdout, stderr string, err error) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
	defer cancel()
	cmd := nodeCommand(ctx, e.node, slices.Concat(e.command, args)...)
	// Files, not pipes: containers that are left running keep them open.
	files := [2]*os.File{}
	for i := range files {
		if files[i], err = os.CreateTemp(e.t.TempDir(), ""); err != nil {
			e.t.Fatal(err)
		}
		defer files[i].Close()
	}
	cmd.Stdout, cmd.Stderr = files[0], files[1]
	err = cmd.Run()
	var said [2]string
	for i, f := range files {
		raw, err := os.ReadFile(f.Name())
		testutil.NoError(e.t, err)
		said[i] = strings.TrimSpace(string(raw))
	}
	return said[0], said[1], err
}

// must is try for what must succeed.
func (e engineCLI) must(args ...string) string {
	e.t.Helper()
	stdout, stderr, err := e.try(args...)
	if err != nil {
		e.t.Fatalf("%s on %s: %v\n%s\n%s", strings.Join(args, " "), e.node, err, stdout, stderr)
	}
	return stdout
}

// mustRefuse is try for what must fail with text in the error.
func (e engineCLI) mustRefuse(text string, args ...string) {
	e.t.Helper()
	stdout, stderr, err := e.try(args...)
	if err == nil || !strings.Contains(stderr, text) {
		e.t.Errorf("%s on %s: %v; want an error with %q\n%s\n%s", strings.Join(args, " "), e.node, err, text, stdout, stderr)
	}
}

// greeting is what the containers' web servers say.
const greeting = "hello from a container"

// listsServer checks what netstat, which runs in the container of a web server, says of its
// sockets.
func listsServer(t *testing.T, said string) {
	t.Helper()
	if !strings.Contains(said, ":80 ") || !strings.Contains(said, "LISTEN") {
		t.Errorf("netstat in the server's container: %s", said)
	}
}

// smallRoot is a root file system as a tar archive: busybox, and a page for its web server.
func smallRoot(t *testing.T) []byte {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("no root file system for containers: busybox is not installed (`make test-packages` does)")
	}
	busybox, err := os.ReadFile(path)
	testutil.NoError(t, err)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	add := func(h tar.Header, content []byte) {
		h.Size = int64(len(content))
		testutil.NoError(t, w.WriteHeader(&h))
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin", "etc", "tmp", "www", "proc", "sys", "dev"} {
		add(tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, busybox)
	for _, tool := range []string{"sh", "wget", "httpd", "nc", "nslookup", "sleep", "printf", "hexdump", "ip", "cat"} {
		add(tar.Header{Name: "bin/" + tool, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
	}
	add(tar.Header{Name: "www/index.html", Typeflag: tar.TypeReg, Mode: 0o644}, []byte(greeting+"\n"))
	testutil.NoError(t, w.Close())
	return buf.Bytes()
}

// verbsRoot is smallRoot with Debian's ibv_rc_pingpong and what it is linked with, as the archive of
// an image.
func verbsRoot(t *testing.T) []byte {
	t.Helper()
	lab.NeedPrograms(t, "RDMA in containers", "ibv_rc_pingpong", "ldd")
	program, err := exec.LookPath("ibv_rc_pingpong")
	testutil.NoError(t, err)
	said, err := exec.Command("ldd", program).Output()
	testutil.NoError(t, err)
	root := t.TempDir()
	for _, word := range append(strings.Fields(string(said)), program) {
		if !filepath.IsAbs(word) {
			continue
		}
		content, err := os.ReadFile(word)
		testutil.NoError(t, err)
		at := filepath.Join(root, word)
		testutil.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
		testutil.NoError(t, os.WriteFile(at, content, 0o755))
	}
	cmd := exec.Command("tar", "-C", root, "-x")
	cmd.Stdin = bytes.NewReader(smallRoot(t))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("unpack: %v\n%s", err, out)
	}
	out, err := exec.Command("tar", "-C", root, "-c", ".").Output()
	testutil.NoError(t, err)
	return out
}

// pingpong has ibv_rc_pingpong run by serve and, to addr, by connect, as soon as that listens. The
// server has the GID of addr.
func pingpong(t *testing.T, addr string, serve, connect func(argv ...string) (stdout, stderr string, err error)) {
	t.Helper()
	argv := []string{"ibv_rc_pingpong", "-g", "0", "-n", "100"}
	served := make(chan error, 1)
	go func() {
		stdout, stderr, err := serve(argv...)
		if err != nil || !strings.Contains(stdout, "usec/iter") || !strings.Contains(stdout, "GID ::ffff:"+addr+"\n") {
			err = fmt.Errorf("the server: %v: %s%s", err, stdout, stderr)
		}
		served <- err
	}()
	testutil.Eventually(t, "ibv_rc_pingpong", func() (bool, string) {
		select {
		case err := <-served:
			t.Fatalf("ended early: %v", err)
		default:
		}
		stdout, stderr, err := connect(append(argv, addr)...)
		return err == nil && strings.Contains(stdout, "usec/iter"), stdout + stderr
	})
	testutil.NoError(t, <-served)
}

// serveWeb is the command of a container with a web server, stay that of one that does nothing.
var (
	serveWeb = []string{"httpd", "-f", "-p", "80", "-h", "/www"}
	stay     = []string{"sleep", "1000"}
)

// nodeState is what must be as before when an engine's containers are gone: the node's endpoints
// and devices.
func nodeState(t *testing.T, node string) string {
	t.Helper()
	out, err := exec.Command("ip", "-n", lab.Name+"-"+node, "-o", "link", "show").Output()
	testutil.NoError(t, err)
	var names []string
	for line := range strings.Lines(string(out)) {
		names = append(names, strings.Fields(line)[1])
	}
	routes, err := exec.Command("ip", "-n", lab.Name+"-"+node, "route", "show", "table", "all").Output()
	testutil.NoError(t, err)
	return fmt.Sprintf("%s\n%s\n%s", strings.Join(names, " "), routes, lab.Heddle(t, "endpoints", "--node", node))
}

// sameNode waits until a node is as it was: engines take networks away when the container has
// ended.
func sameNode(t *testing.T, node, before string) {
	t.Helper()
	testutil.Eventually(t, node+" to be as it was", func() (bool, string) {
		now := nodeState(t, node)
		return now == before, "before:\n" + before + "\nnow:\n" + now
	})
}

// direct runs connect and checks that the node counted connects that went direct, and no fallback.
func direct(t *testing.T, node string, atLeast uint64, connect func()) {
	t.Helper()
	lab.AwaitPath(t, node, model.PeerProven) // which an agent that has just started has yet to prove
	before := lab.Counters(t, node)
	connect()
	after := lab.Counters(t, node)
	if n := after["connect_direct"] - before["connect_direct"]; n < atLeast {
		t.Errorf("%s sent %d connects direct, want %d or more", node, n, atLeast)
	}
	for name, n := range after {
		if strings.HasPrefix(name, "fallback_") && n != before[name] {
			t.Errorf("%s: %s went from %d to %d", node, name, before[name], n)
		}
	}
}

package pages

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// host is one of the hosts that a page speaks of, made of this machine's files: host.sh.
type host struct {
	t     *testing.T
	name  string
	pid   int    // of its init, here
	share string // a directory of this machine's that it sees as /mnt/pages
}

// network is what the hosts of a test are connected by: a bridge in a namespace of its own, named
// by its process.
type network struct {
	pid    int
	hosts  map[string]*host
	opened map[string]*terminal // for the page at hand
}

func group(name string) string { return "heddle-" + labName + "-pages-" + name }

// inGroup starts a command in a control group of its own until the end of the test. Whatever came
// of it is then ended, as is what a run left that was killed.
func inGroup(t *testing.T, name string, argv ...string) (pid int, ended <-chan struct{}, log string) {
	t.Helper()
	dir := filepath.Join(cgroupRoot(t), group(name))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) }
	kill()
	log = filepath.Join(t.TempDir(), "log")
	file, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := exec.Command("sh", append([]string{"-c", `echo $$ >"$1/cgroup.procs" && shift && exec "$@"`, "sh", dir}, argv...)...)
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		_ = cmd.Wait() // it is killed
	}()
	t.Cleanup(func() {
		kill()
		<-over
		// Deepest first; the dead may be counted for a moment.
		remove := fmt.Sprintf("for i in $(seq 300); do find %s -depth -type d -exec rmdir {} + 2>/dev/null; [ -d %[1]s ] || exit 0; sleep 0.1; done; exit 1", dir)
		if out, err := exec.Command("sh", "-c", remove).CombinedOutput(); err != nil {
			t.Errorf("%s stays: %v\n%s", dir, err, out)
		}
	})
	return cmd.Process.Pid, over, log
}

// cgroupRoot gives the cgroup2 file system.
func cgroupRoot(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
			return dir
		}
	}
	t.Fatal("no cgroup2 file system")
	return ""
}

// connect makes the hosts, names and addresses as in a table "a=192.0.2.1 b=192.0.2.2", and a
// network between them.
func connect(t *testing.T, table string, systemd bool) *network {
	t.Helper()
	n := &network{hosts: map[string]*host{}, opened: map[string]*terminal{}}
	n.pid, _, _ = inGroup(t, "network", "unshare", "--net", "sleep", "infinity")
	testutil.Eventually(t, "the network's namespace", func() (bool, string) {
		own, err := os.Readlink("/proc/self/ns/net")
		its, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", n.pid))
		return own != its && its != "", fmt.Sprint(err, err2)
	})
	must(t, "nsenter", "-t", strconv.Itoa(n.pid), "-n", "sh", "-c", "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
	for field := range strings.FieldsSeq(table) {
		name, addr, _ := strings.Cut(field, "=")
		n.hosts[name] = boot(t, name, systemd)
		n.hosts[name].plug(n.pid, addr)
	}
	n.standIns(table)
	return n
}

func must(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

// boot makes a host.
func boot(t *testing.T, name string, systemd bool) *host {
	t.Helper()
	h := &host{t: t, name: name, share: t.TempDir()}
	repository, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(repository, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	init := "sh"
	if systemd {
		init = "systemd"
	}
	outer, ended, log := inGroup(t, name, "unshare", "--mount", "--pid", "--net", "--cgroup", "--ipc", "--uts", "--fork", "--kill-child",
		"./host.sh", t.TempDir(), name, repository, binaries, h.share, init)
	testutil.Eventually(t, "host "+name, func() (bool, string) {
		raw, _ := os.ReadFile(log)
		select {
		case <-ended:
			t.Fatalf("host %s ended:\n%s", name, raw)
		default:
		}
		if _, err := os.Stat(filepath.Join(h.share, "ready")); err != nil {
			return false, string(raw)
		}
		out, err := exec.Command("pgrep", "-P", strconv.Itoa(outer)).Output()
		h.pid, _ = strconv.Atoi(strings.TrimSpace(string(out)))
		return err == nil && h.pid > 1, string(raw)
	})
	return h
}

// plug gives the host a device on the network.
func (h *host) plug(network int, addr string) {
	h.t.Helper()
	must(h.t, "nsenter", "-t", strconv.Itoa(network), "-n", "sh", "-c",
		fmt.Sprintf("ip link add %[1]s type veth peer name eth0 netns %[2]d && ip link set %[1]s master br0 up", "to-"+h.name, h.pid))
	must(h.t, h.argv("sh", "-c", fmt.Sprintf("ip addr add %s/24 dev eth0 && ip link set eth0 up", addr))...)
}

//go:embed testdata/ssh.py
var sshStandIn string

//go:embed testdata/image.py
var imageScript string

//go:embed testdata/scp.sh
var scpStandIn string

// standIns gives each host an ssh and an scp for the others, whose real servers this machine need
// not have.
func (n *network) standIns(table string) {
	var names strings.Builder
	for field := range strings.FieldsSeq(table) {
		name, addr, _ := strings.Cut(field, "=")
		fmt.Fprintln(&names, addr, name)
	}
	for _, h := range n.hosts {
		h.write("/usr/local/bin/ssh", sshStandIn)
		h.write("/usr/local/bin/scp", scpStandIn)
		h.write("/usr/local/bin/docker-image", imageScript)
		h.write("/etc/hosts", "127.0.0.1 localhost\n"+names.String())
		n.background(h.t, h, "sshd", "exec ssh --serve")
	}
}

// argv gives the command line by which a command runs on the host.
func (h *host) argv(argv ...string) []string {
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:" + os.Getenv("PATH")
	repository, _ := filepath.Abs("../..")
	return append([]string{"nsenter", "-t", strconv.Itoa(h.pid), "-m", "-p", "-n", "-C", "-i", "-u", "--",
		"env", "-i", "-C", repository, "PATH=" + path, "HOME=/root", "LC_ALL=C.UTF-8", "TERM=dumb", "DEBIAN_FRONTEND=noninteractive"}, argv...)
}

// write puts a file there.
func (h *host) write(path, text string) {
	h.t.Helper()
	cmd := exec.Command("nsenter", h.argv("sh", "-c", `mkdir -p "$(dirname "$1")" && cat >"$1" && chmod 755 "$1"`, "sh", path)[1:]...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("write %s on %s: %v\n%s", path, h.name, err, out)
	}
}

// terminal is a shell on a host: what one block does to directory and variables the next one finds.
type terminal struct {
	host  *host
	log   string
	files *os.File // by which it is told what to do
	done  *bufio.Reader
	ended chan struct{}
}

// terminal gives the page's terminal "a" or "a/2".
func (n *network) terminal(t *testing.T, name string) *terminal {
	t.Helper()
	if term := n.opened[name]; term != nil {
		return term
	}
	h := n.host(t, name)
	term := &terminal{host: h, log: filepath.Join(h.t.TempDir(), "terminal"), ended: make(chan struct{})}
	log, err := os.OpenFile(term.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	toldR, toldW, err := os.Pipe()
	doneR, doneW, err2 := os.Pipe()
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	defer toldR.Close()
	defer doneW.Close()
	// A block that fails ends the shell.
	const loop = `set -o pipefail
while IFS= read -r file <&3; do set -e; . "$file" 3<&- 4>&-; set +e; echo done >&4; done`
	cmd := exec.Command("nsenter", h.argv("bash", "--norc", "-c", loop)[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{toldR, doneW}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(term.ended)
		_ = cmd.Wait() // how it ends is for type
	}()
	h.t.Cleanup(func() { toldW.Close(); doneR.Close() })
	term.files, term.done = toldW, bufio.NewReader(doneR)
	n.opened[name] = term
	return term
}

func (term *terminal) said() string {
	raw, _ := os.ReadFile(term.log)
	return string(raw)
}

// typed has the shell run a block to its end and gives what it printed.
func (term *terminal) typed(text string) (string, error) {
	h := term.host
	file, err := os.CreateTemp(h.share, "block")
	if err != nil {
		return "", err
	}
	if _, err := file.WriteString(text + "\n"); err != nil {
		return "", err
	}
	if err := file.Close(); err != nil {
		return "", err
	}
	before := len(term.said())
	done := make(chan error, 1)
	go func() {
		if _, err := fmt.Fprintln(term.files, "/mnt/pages/"+filepath.Base(file.Name())); err != nil {
			done <- err
			return
		}
		line, err := term.done.ReadString('\n')
		if err == nil && line != "done\n" {
			err = fmt.Errorf("the shell said %q", line)
		}
		done <- err
	}()
	select {
	case err = <-done:
		if err != nil {
			err = fmt.Errorf("a command failed, and the shell ended: %w", err)
		}
	case <-time.After(blockTimeout):
		err = fmt.Errorf("not done after %s", blockTimeout)
	}
	return term.said()[before:], err
}

// background starts a block beside the next ones.
func (n *network) background(t *testing.T, h *host, name, text string) *terminal {
	t.Helper()
	term := &terminal{host: h, log: filepath.Join(h.t.TempDir(), "terminal"), ended: make(chan struct{})}
	log, err := os.Create(term.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("nsenter", h.argv("bash", "--norc", "-c", text)[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(term.ended)
		_ = cmd.Wait() // it ends with the host at the latest
	}()
	n.opened[name] = term
	return term
}

// once runs a command and gives all it said.
func (h *host) once(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", h.argv("bash", "--norc", "-c", command)[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	err := cmd.Run()
	return out.String(), err
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

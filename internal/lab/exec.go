package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/runtime"
)

// Command is a command to run in a lab container.
type Command struct {
	Container string // "n1/c1"
	Mode      Mode
	Args      []string // the program and its arguments
	Env       []string // "NAME=VALUE", or "NAME" for the caller's value
	User      string   // "UID[:GID]"; "" for root
	Dir       string   // working directory; "" for the caller's, or / if the container has no such directory
}

// passedEnv is what a command gets of its caller's environment without asking.
var passedEnv = []string{"PATH", "HOME", "TERM", "LANG"}

// Exec runs the command in its container: its standard streams are the caller's own, signals sent
// to this process reach it, and status is what it ends with. Only the command itself is waited for,
// not what it leaves behind in the container. On a terminal this process becomes the runtime, which
// copies between that and one of the container's, and Exec returns only with an error. Either way,
// who kills this process by SIGKILL leaves the command behind.
func (l Lab) Exec(c Command) (status int, err error) {
	if os.Geteuid() != 0 {
		return 0, ErrNotRoot
	}
	s, err := l.Load()
	if err != nil {
		return 0, err
	}
	in, err := s.find(c.Container)
	if err != nil {
		return 0, err
	}
	if len(c.Args) == 0 {
		return 0, errors.New("no command: give one after --")
	}
	groups, err := findCgroups()
	if err != nil {
		return 0, err
	}
	if !l.runs(groups, in, c.Mode) {
		return 0, fmt.Errorf("container %s of lab %s does not run in mode %s: `heddle lab up%s` starts what is missing", c.Container, l.name, c.Mode, l.flag())
	}
	p := programs{}
	if c.Mode == ModeHeddle {
		p, err = findPrograms()
	} else {
		p.runc, err = runtime.FindRuntime(os.Getenv(runtime.EnvRuntime))
	}
	if err != nil {
		return 0, err
	}
	if c.Dir == "" {
		c.Dir = l.workingDir(in)
	}
	path, env := l.runtime(p, c.Mode)
	tty := onTerminal()
	args := append([]string{path, "--root", l.runcRoot()}, execArgs(c, l.runcID(in, c.Mode), os.LookupEnv, tty)...)
	if tty {
		return 0, fmt.Errorf("exec %s: %w", path, syscall.Exec(path, args, env))
	}
	dir, err := os.MkdirTemp(l.containerDir(in), "exec-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	return follow(&exec.Cmd{Path: path, Args: args, Env: env}, filepath.Join(dir, pidFile))
}

// pidFile is the name of the files in which the runtime says what process it has started.
const pidFile = "pid"

// follow has the runtime start a process, and waits for that as if it were this one. The runtime
// itself does not stay: it would copy the streams, and wait for whoever else holds them.
func follow(start *exec.Cmd, pidPath string) (status int, err error) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals)
	defer signal.Stop(signals)
	// The process is the runtime's child; with that gone, it is this one's.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("become the parent of the command: %w", err)
	}
	start.Args = slices.Insert(start.Args, slices.Index(start.Args, "exec")+1, "--detach", "--pid-file", pidPath)
	start.Stdin, start.Stdout, start.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := start.Run(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exitStatus(exit.ProcessState), nil // the runtime has said why
		}
		return 0, err
	}
	pid, err := readPid(pidPath)
	if err != nil {
		return 0, err
	}
	command, err := os.FindProcess(pid)
	if err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for s := range signals {
			// What this process hears of its own children and of Go's runtime is not meant for the
			// command.
			if s != unix.SIGCHLD && s != unix.SIGURG {
				_ = command.Signal(s) // it may have ended
			}
		}
	}()
	state, err := command.Wait()
	signal.Stop(signals)
	close(signals)
	<-ended
	if err != nil {
		return 0, fmt.Errorf("wait for the command: %w", err)
	}
	return exitStatus(state), nil
}

// exitStatus is what a shell says of how a process ended.
func exitStatus(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return s.ExitCode()
}

// execArgs gives runc's `exec` command line.
func execArgs(c Command, id string, lookup func(string) (string, bool), tty bool) []string {
	args := []string{"exec", "--cwd", c.Dir}
	if tty {
		args = append(args, "--tty")
	}
	if c.User != "" {
		args = append(args, "--user", c.User)
	}
	for _, e := range append(append([]string{}, passedEnv...), c.Env...) {
		if !strings.Contains(e, "=") {
			value, ok := lookup(e)
			if !ok {
				continue
			}
			e += "=" + value
		}
		args = append(args, "--env", e)
	}
	return append(append(args, id), c.Args...)
}

// workingDir gives the caller's working directory if the container has it, or "/".
func (l Lab) workingDir(c container) string {
	dir, err := os.Getwd()
	if err != nil {
		return "/"
	}
	shared := dir == "/tmp" || strings.HasPrefix(dir, "/tmp/")
	if info, err := os.Stat(filepath.Join(l.rootDirs(c).rootfs, dir)); shared || err == nil && info.IsDir() {
		return dir
	}
	return "/"
}

// onTerminal reports whether somebody types: only then the command gets a terminal, because one
// would mix its two outputs and change line ends.
func onTerminal() bool {
	for _, f := range []*os.File{os.Stdin, os.Stdout} {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
			return false
		}
	}
	return true
}

// Addr gives the address of family f at which a container's peers reach it in a mode.
func (l Lab) Addr(containerName string, m Mode, f Family) (netip.Addr, error) {
	s, err := l.Load()
	if err != nil {
		return netip.Addr{}, err
	}
	c, err := s.find(containerName)
	if err != nil {
		return netip.Addr{}, err
	}
	a, up := s.Overlay[c.String()]
	switch {
	case f != IPv4 && f != IPv6:
		return netip.Addr{}, fmt.Errorf("--family %d: want 4 or 6", f)
	case f == IPv6 && s.Prefix6 == NoPrefix6:
		return netip.Addr{}, fmt.Errorf("lab %s is IPv4-only: it was made with --prefix6 %s", l.name, NoPrefix6)
	case m == ModeHost && f == IPv4 && s.Underlay == UnderlayIPv6:
		return netip.Addr{}, fmt.Errorf("lab %s has no IPv4 underlay: it was made with --underlay %s; ask for --family 6", l.name, UnderlayIPv6)
	case m == ModeHost && f == IPv6:
		return s.underlay6(s.nodeHost(c.node)), nil
	case m == ModeHost:
		return s.nodeAddr(c.node), nil
	case !up || !s.Ready:
		return netip.Addr{}, fmt.Errorf("container %s of lab %s is not up yet: complete it with `heddle lab up%s`", c, l.name, l.flag())
	case f == IPv4:
		return a, nil
	}
	a, up = s.Overlay6[c.String()]
	if !up {
		return netip.Addr{}, fmt.Errorf("container %s of lab %s has no IPv6 address: `heddle status%s` says why", c, l.name, l.flag())
	}
	return a, nil
}

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
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

// Exec replaces the process by one that runs the command in its container: its standard streams are the
// caller's, signals sent to it reach the command, and its exit status is the command's. It returns only
// with an error. Two things follow from runc's: it copies the streams and so ends when the last process
// that holds them does; and killed by SIGKILL, it leaves the command behind.
func (l Lab) Exec(c Command) error {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	s, err := l.Load()
	if err != nil {
		return err
	}
	in, err := s.find(c.Container)
	if err != nil {
		return err
	}
	if len(c.Args) == 0 {
		return errors.New("no command: give one after --")
	}
	id := l.runcID(in, c.Mode)
	if _, err := os.Stat(filepath.Join(l.runcRoot(), id)); err != nil {
		return fmt.Errorf("container %s of lab %s is not up yet: complete it with `heddle lab up%s`", c.Container, l.name, l.flag())
	}
	p := programs{}
	if c.Mode == ModeHeddle {
		p, err = findPrograms()
	} else {
		p.runc, err = runtime.FindRuntime(os.Getenv(runtime.EnvRuntime))
	}
	if err != nil {
		return err
	}
	if c.Dir == "" {
		c.Dir = l.workingDir(in)
	}
	path, env := l.runtime(p, c.Mode)
	args := append([]string{path, "--root", l.runcRoot()}, execArgs(c, id, os.LookupEnv, onTerminal())...)
	return fmt.Errorf("exec %s: %w", path, syscall.Exec(path, args, env))
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

// onTerminal reports whether somebody types: only then the command gets a terminal, because one would
// mix its two outputs and change line ends.
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

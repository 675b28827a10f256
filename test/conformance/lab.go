package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The modes that are compared: how a program in a container reaches the network.
const (
	overlay = "overlay"
	heddle  = "heddle"
)

// container gives the container whose programs run in mode. Each mode has one of its own, so that
// what one run leaves behind (connections in TIME_WAIT, listeners of a program that was killed)
// does not meet the other.
func container(mode string) string {
	if mode == heddle {
		return "n1/c1"
	}
	return "n1/c2"
}

// lab is a lab that is up, and where its programs leave their output.
type lab struct {
	bin, name string
	scratch   string // in /tmp, which containers share with the machine
	keep      bool
	agent     agent
	runs      int // of modules: each keeps its output
}

// agent tells one run of a node's agent from another.
type agent struct {
	Pid     int
	Started time.Time
}

// bringUp brings the lab up, a lab of an earlier run that was killed taken down first, and gives
// its containers names that resolve.
func bringUp(ctx context.Context, bin, name, keep string) (*lab, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("needs root: it makes network namespaces, containers and BPF programs")
	}
	bin, err := absolute(filepath.Join(bin, "heddle"))
	if err != nil {
		return nil, err
	}
	l := &lab{bin: bin, name: name, keep: keep != "", scratch: keep}
	if l.keep {
		if l.scratch, err = absolute(keep); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(l.scratch, "/tmp/") {
			return nil, fmt.Errorf("keep output in %s: only /tmp is seen by containers", l.scratch)
		}
		if err := os.MkdirAll(l.scratch, 0o755); err != nil {
			return nil, fmt.Errorf("make %s: %w", l.scratch, err)
		}
	} else if l.scratch, err = os.MkdirTemp("/tmp", "heddle-conformance-"); err != nil {
		return nil, fmt.Errorf("make a folder for output: %w", err)
	}
	steps := func() error {
		if _, err := l.heddle(ctx, "lab", "down"); err != nil {
			return err
		}
		if _, err := l.heddle(ctx, "lab", "up", "--nodes", "1", "--containers", "2"); err != nil {
			return err
		}
		for _, mode := range []string{overlay, heddle} {
			if err := l.nameHosts(ctx, mode); err != nil {
				return err
			}
		}
		l.agent, _, err = l.runningAgent(ctx)
		return err
	}
	if err := steps(); err != nil {
		return nil, errors.Join(err, l.takeDown())
	}
	return l, nil
}

// hosts are the files by which a container resolves names, as container engines write them. The
// machine's own would send every lookup to its name server: out of the lab, and into a timeout.
const hosts = `printf '127.0.0.1 localhost\n::1 localhost ip6-localhost\n%s %s\n' "$1" "$(hostname)" >/etc/hosts
printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' >/etc/resolv.conf`

func (l *lab) nameHosts(ctx context.Context, mode string) error {
	addr, err := l.heddle(ctx, "lab", "ip", "--mode", mode, container(mode))
	if err != nil {
		return err
	}
	_, err = l.heddle(ctx, "lab", "exec", "--mode", mode, container(mode), "--", "sh", "-ec", hosts, "sh", strings.TrimSpace(addr))
	return err
}

// takeDown removes the lab and, unless it is to be kept, the programs' output.
func (l *lab) takeDown() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	_, err := l.heddle(ctx, "lab", "down")
	if !l.keep {
		err = errors.Join(err, os.RemoveAll(l.scratch))
	}
	return err
}

// heddle runs the command line for this lab and gives its standard output. args begins with the
// command's name, of one word or, for lab, of two.
func (l *lab) heddle(ctx context.Context, args ...string) (string, error) {
	words := 1
	if args[0] == "lab" {
		words = 2
	}
	full := append(append(append([]string{}, args[:words]...), "--lab", l.name), args[words:]...)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, l.bin, full...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w\n%s", err, exit.Stderr)
		}
		return "", fmt.Errorf("heddle %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// runningAgent asks the node's agent who it is, and how many sockets it has given out.
func (l *lab) runningAgent(ctx context.Context) (a agent, sockets int, err error) {
	raw, err := l.heddle(ctx, "status", "--output", "json")
	if err != nil {
		return agent{}, 0, err
	}
	var nodes []struct {
		agent
		Interception struct{ Answered int }
	}
	if err := json.Unmarshal([]byte(raw), &nodes); err != nil {
		return agent{}, 0, fmt.Errorf("heddle status: %w:\n%s", err, raw)
	}
	if len(nodes) != 1 || nodes[0].Pid == 0 {
		return agent{}, 0, fmt.Errorf("heddle status: want one node with an agent:\n%s", raw)
	}
	return nodes[0].agent, nodes[0].Interception.Answered, nil
}

// talkToSelf is a program that makes a connection to itself.
const talkToSelf = `import socket
with socket.create_server(("127.0.0.1", 0)) as s, socket.create_connection(s.getsockname(), 10) as c:
    s.accept()[0].sendall(b"x")
    assert c.recv(1) == b"x"`

// alive checks that the agent that answered at the start still does, and gives sockets that work.
func (l *lab) alive(ctx context.Context) error {
	now, _, err := l.runningAgent(ctx)
	if err != nil {
		return fmt.Errorf("the agent is gone: %w", err)
	}
	if now != l.agent {
		return fmt.Errorf("the agent was process %d, now it is %d", l.agent.Pid, now.Pid)
	}
	if _, err := l.heddle(ctx, "lab", "exec", "--mode", heddle, container(heddle), "--", python3, "-c", talkToSelf); err != nil {
		return fmt.Errorf("the agent lives, but its sockets do not work: %w", err)
	}
	return nil
}

// closed checks that no packet has come to the host outside the overlay, where the nodes' default
// routes lead: that no suite dialed anything but loopback and the lab's own addresses.
func (l *lab) closed(ctx context.Context) error {
	for file, count := range map[string]func(string) (int, error){"/proc/net/snmp": ipReceived, "/proc/net/snmp6": ip6Received} {
		out, err := exec.CommandContext(ctx, "nsenter", "--net=/run/netns/"+l.name+"-outside", "cat", file).Output()
		if err != nil {
			return fmt.Errorf("count packets that left the lab: %w", err)
		}
		received, err := count(string(out))
		if err != nil {
			return err
		}
		if received > 0 {
			return fmt.Errorf("%d packets left the lab (%s of its outside): leave out the cases that send them", received, file)
		}
	}
	return nil
}

// ipReceived reads how many IPv4 packets a network namespace received from its /proc/net/snmp.
func ipReceived(snmp string) (int, error) {
	var names []string
	for line := range strings.Lines(snmp) {
		values, ok := strings.CutPrefix(line, "Ip: ")
		if !ok {
			continue
		}
		if names == nil {
			names = strings.Fields(values)
			continue
		}
		if i := slices.Index(names, "InReceives"); i >= 0 && i < len(strings.Fields(values)) {
			return strconv.Atoi(strings.Fields(values)[i])
		}
	}
	return 0, errors.New("/proc/net/snmp does not count received IPv4 packets")
}

// ip6Received reads how many IPv6 packets a network namespace received from its /proc/net/snmp6.
// Multicast ones are not among them: the nodes announce their groups by themselves, and what
// containers send to any goes nowhere.
func ip6Received(snmp6 string) (int, error) {
	count := func(name string) (int, error) {
		for line := range strings.Lines(snmp6) {
			if fields := strings.Fields(line); len(fields) == 2 && fields[0] == name {
				return strconv.Atoi(fields[1])
			}
		}
		return 0, fmt.Errorf("/proc/net/snmp6 has no %s", name)
	}
	all, err := count("Ip6InReceives")
	if err != nil {
		return 0, err
	}
	multicast, err := count("Ip6InMcastPkts")
	return all - multicast, err
}

// ending is how a program ended.
type ending struct {
	code    int
	output  []byte // both streams, as they were written
	elapsed time.Duration
	overdue bool // it was killed at its limit
}

// killedAfter is how long after its limit a program that ignores the first signal is killed.
const killedAfter = 5 * time.Second

// exitOverdue are the exit codes of timeout(1) for a program that it ended: by TERM, by KILL.
const exitOverdue, exitKilled = 124, 137

// exec runs argv in the container of mode, in dir, for at most limit. The output goes to the file
// at path: a process that the program leaves behind would hold a pipe open. The limit is kept
// inside the container, where the program can be killed whatever state it is in.
func (l *lab) exec(parent context.Context, mode, dir, path string, limit time.Duration, argv []string) (ending, error) {
	inside := []string{"timeout", fmt.Sprintf("--kill-after=%ds", int(killedAfter.Seconds())), fmt.Sprintf("%ds", int(limit.Seconds())),
		"sh", "-c", `cd "$1" && out=$2 && shift 2 && exec "$@" >"$out" 2>&1 </dev/null`, "sh", dir, path}
	ctx, cancel := context.WithTimeout(parent, limit+4*killedAfter)
	defer cancel()
	cmd := exec.CommandContext(ctx, l.bin, append(append([]string{"lab", "exec", "--lab", l.name, "--mode", mode, container(mode), "--"}, inside...), argv...)...)
	cmd.Dir = "/"
	var stderr strings.Builder
	cmd.Stderr = &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // passed on; KILL would not be
	cmd.WaitDelay = killedAfter
	began := time.Now()
	err := cmd.Run()
	e := ending{elapsed: time.Since(began)}
	if parent.Err() != nil {
		return e, fmt.Errorf("interrupted: %w", parent.Err())
	}
	if ctx.Err() != nil {
		return e, fmt.Errorf("%s in %s (%s) could not be ended: %w", argv[0], container(mode), mode, ctx.Err())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return e, fmt.Errorf("run %s in %s (%s): %w", argv[0], container(mode), mode, err)
	}
	e.code = cmd.ProcessState.ExitCode()
	e.overdue = e.code == exitOverdue || e.code == exitKilled && e.elapsed >= limit
	if e.output, err = os.ReadFile(path); err != nil {
		return e, fmt.Errorf("run %s in %s (%s): %w\n%s", argv[0], container(mode), mode, err, stderr.String())
	}
	return e, nil
}

// machineRun runs a program on the machine itself, with env beside the environment.
func machineRun(ctx context.Context, env []string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute) // a first build, on a busy machine
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return nil
}

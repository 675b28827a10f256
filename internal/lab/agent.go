package lab

import (
	"context"
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

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/runtime"
)

// How long parts of the lab may take.
const (
	agentReady   = time.Minute     // on a busy machine; it is mostly ready within a second
	agentAnswers = 5 * time.Second // it may ask a store that is away before it answers
	agentStops   = 3 * time.Second
)

// programs are the paths of what the lab runs.
type programs struct {
	self, agent, wrapper, runc string
	agentArgs                  []string // added to the agent's command line
	nodeArgs                   map[string][]string
}

// findPrograms finds Heddle's own programs beside this one, or in PATH, and runc.
func findPrograms() (p programs, err error) {
	if p.self, err = os.Executable(); err != nil {
		return p, fmt.Errorf("find own program: %w", err)
	}
	if p.agent, err = findBeside(p.self, "heddled"); err != nil {
		return p, err
	}
	if p.wrapper, err = findBeside(p.self, "heddle-runtime"); err != nil {
		return p, err
	}
	p.runc, err = runtime.FindRuntime(os.Getenv(runtime.EnvRuntime))
	return p, err
}

func findBeside(self, name string) (string, error) {
	if path, err := exec.LookPath(filepath.Join(filepath.Dir(self), name)); err == nil {
		return path, nil
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("program %s: neither beside %s nor in PATH: build it with `make build`", name, self)
	}
	return path, nil
}

func (l Lab) seccompSocket(node string) string { return filepath.Join(l.nodeDir(node), "seccomp.sock") }

// pinDir is where an agent pins its BPF objects.
func (l Lab) pinDir(node string) string { return filepath.Join(l.nodeDir(node), "bpf", "heddle") }

// agentCgroup is the cgroup of a node's agent, in the unified hierarchy.
func (l Lab) agentCgroup(groups cgroups, node string) string {
	return filepath.Join(groups.v2, l.cgroup(), node)
}

// ensureAgent starts the agent of a node, unless it runs, and waits until it answers. fresh says
// that no process was left that keeps seccomp listeners: containers that an earlier agent
// intercepted are lost.
func (l Lab) ensureAgent(ctx context.Context, s State, p programs, groups cgroups, node string) (fresh bool, err error) {
	if l.agentAnswers(ctx, node) {
		return false, nil
	}
	group := l.agentCgroup(groups, node)
	agents, keepers, err := agentProcesses(group)
	if err != nil {
		return false, err
	}
	if err := stopProcesses(ctx, agents, group); err != nil {
		return false, fmt.Errorf("stop the agent that does not answer: %w", err)
	}
	pinDir := filepath.Join(l.nodeDir(node), "bpf")
	if err := os.MkdirAll(pinDir, 0o755); err != nil {
		return false, err
	}
	if mounted, err := isMount(pinDir, unix.BPF_FS_MAGIC); err != nil {
		return false, err
	} else if !mounted {
		if err := unix.Mount("bpf", pinDir, "bpf", 0, "mode=700"); err != nil {
			return false, fmt.Errorf("mount bpf at %s: %w", pinDir, err)
		}
	}
	return len(keepers) == 0, l.startAgent(ctx, s, p, node, group)
}

func (l Lab) agentAnswers(ctx context.Context, node string) bool {
	ctx, cancel := context.WithTimeout(ctx, patience.For(agentAnswers))
	defer cancel()
	client := api.Dial(l.apiSocket(node))
	defer client.Close()
	_, err := client.Status(ctx)
	return err == nil
}

// agentArgs is the agent's command line.
func (l Lab) agentArgs(s State, node, group string) []string {
	dir := l.nodeDir(node)
	args := []string{
		"--node", node, "--network-id", strconv.Itoa(int(s.networkID())), "--underlay", s.nodeAddr(node).String(),
		"--state-dir", dir, "--bpf-dir", l.pinDir(node), "--cgroup", group,
		"--api-socket", l.apiSocket(node), "--seccomp-socket", l.seccompSocket(node),
		"--docker-plugin", filepath.Join(dir, "docker.sock"),
	}
	if s.Prefix6 != "" {
		args = append(args, "--prefix6", s.Prefix6)
	}
	if s.StoreMembers > 0 {
		files := l.storeFiles()
		return append(args, "--store", strings.Join(s.memberURLs(), ","), "--store-ca", files.CA, "--store-cert", files.CertAndKey, "--store-key", files.CertAndKey)
	}
	if first := nodeName(1); node != first {
		return append(args, "--join-file", filepath.Join(l.nodeDir(first), "join.pem"))
	}
	// A lab does not outlive its machine, so the store need not wait for the disk.
	return append(args, "--store", "embedded", "--store-dir", filepath.Join(dir, "etcd"), "--store-no-sync")
}

// startAgent starts the agent in the node's namespace and cgroup and waits until it answers. The
// agent outlives this process.
func (l Lab) startAgent(ctx context.Context, s State, p programs, node, group string) error {
	logPath := filepath.Join(l.nodeDir(node), "heddled.log")
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	ended, err := l.startIn(node, group, logFile, slices.Concat([]string{p.agent}, l.agentArgs(s, node, group), p.agentArgs, p.nodeArgs[node]))
	if err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, patience.For(agentReady))
	defer cancel()
	client := api.Dial(l.apiSocket(node))
	defer client.Close()
	ready := make(chan error, 1)
	go func() { ready <- client.WaitReady(ctx) }()
	select {
	case err = <-ready:
	case err = <-ended:
		if err == nil {
			err = errors.New("it ended")
		}
	}
	if err != nil {
		return fmt.Errorf("agent of %s: %w%s", node, err, tail(logPath))
	}
	return nil
}

// startIn starts a program that outlives this process in a namespace of the lab and a cgroup. ended
// is sent how it ended.
func (l Lab) startIn(suffix, group string, log *os.File, argv []string) (ended <-chan error, err error) {
	// The shell waits until it is in the cgroup; if this process is killed before, it ends. So the
	// program is never found anywhere else.
	cmd := exec.Command("/bin/sh", append([]string{"-c", `read -r go && exec "$@" </dev/null`, "sh"}, argv...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	gate, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := netns.Start(l.netns(suffix), cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	err = joinCgroup(group, cmd.Process.Pid)
	if err == nil {
		_, err = gate.Write([]byte("go\n"))
	}
	if err = errors.Join(err, gate.Close()); err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	return done, nil
}

// notAgents are the base names of other programs in the agent's cgroup: those of planes, which live
// on, and the process that waits for locks of sockets, which may end later than its agent.
var notAgents = []string{"heddle-rdma", "heddle-stack", "heddle-netstack", "heddled-lockwait"}

// ownModule are the arguments of stack modules of the operator's own, whatever their names:
// stacks.OwnArguments, which this package may not import.
var ownModule = []string{"--agent", "/proc/self/fd/3/agent.sock"}

// agentProcesses gives the processes in an agent's cgroup: agents, and the fd keepers that keep
// seccomp listeners for them. notAgents are neither.
func agentProcesses(group string) (agents, keepers []int, err error) {
	pids, err := processes(group)
	if err != nil {
		return nil, nil, fmt.Errorf("look for agents: %w", err)
	}
	for _, pid := range pids {
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			continue // it has ended
		}
		if words := strings.Split(string(args), "\x00"); len(words) > 1 && words[1] == "park" {
			keepers = append(keepers, pid)
		} else if slices.Contains(notAgents, filepath.Base(words[0])) || len(words) > 2 && slices.Equal(words[1:3], ownModule) {
			continue
		} else if len(args) > 0 { // a zombie has none
			agents = append(agents, pid)
		}
	}
	return agents, keepers, nil
}

// stopProcesses asks processes of a cgroup to end, and kills what does not in time.
func stopProcesses(ctx context.Context, pids []int, group string) error {
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGTERM) // it may have ended
	}
	deadline := time.Now().Add(agentStops)
	for {
		now, err := processes(group)
		if err != nil {
			return err
		}
		left := intersect(now, pids)
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			for _, pid := range left {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
			if time.Now().After(deadline.Add(agentStops)) {
				return fmt.Errorf("processes %v do not die", left)
			}
		}
		time.Sleep(killPoll)
	}
}

func intersect(a, b []int) (out []int) {
	for _, x := range a {
		for _, y := range b {
			if x == y {
				out = append(out, x)
			}
		}
	}
	return out
}

package agentpod

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// joinPause is how often Run looks whether the join file has come: the kubelet brings Secrets
	// within a minute or two.
	joinPause = time.Second
	// AgentEnds bounds how long an agent that was asked to end may take: longer than it gives
	// itself (endTime of heddled), shorter than terminationGracePeriodSeconds of the pod.
	AgentEnds = 25 * time.Second
)

// Agent is the agent of one node as a pod.
type Agent struct {
	// Node is the Kubernetes node's name.
	Node string
	// StoreNode is the Kubernetes node whose agent serves the network's store; "" with an etcd of
	// your own.
	StoreNode string
	// JoinFile is where the Secret with the join file is mounted. The other nodes wait for it.
	JoinFile string
	// Program is heddled; Args are more arguments for it.
	Program string
	Args    []string
	// Cgroups is where the node's control groups are mounted, all versions.
	Cgroups string
	Log     *slog.Logger
}

// Run runs the agent until it ends, or, once ctx is done, asks it to end and waits. The agent is a
// child of this process and not in its control groups: the runtime kills all that is in those with
// the container, and what the agent starts, the fd keeper, must outlive that. This process stays in
// them: a control group without processes may be removed.
func (a Agent) Run(ctx context.Context) error {
	args := append([]string{"--node", NodeName(a.Node)}, a.Args...)
	if a.StoreNode != "" && a.StoreNode != a.Node {
		if err := a.awaitJoinFile(ctx); err != nil {
			return err
		}
		args = append(args, "--join-file", a.JoinFile)
	}
	cmd := exec.Command(a.Program, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// If this process is killed the agent must end, too: the next pod's would find its socket
	// taken. The signal comes when the thread ends that started it, so that stays.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := a.startOutside(cmd); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err == nil {
			return errors.New("the agent ended by itself")
		}
		return fmt.Errorf("the agent ended: %w", err)
	case <-ctx.Done():
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end agent: %w", err)
	}
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("the agent ended: %w", err)
		}
		return nil
	case <-time.After(AgentEnds):
		return errors.Join(fmt.Errorf("the agent did not end within %v", AgentEnds), cmd.Process.Kill())
	}
}

// awaitJoinFile waits until the join file is there.
func (a Agent) awaitJoinFile(ctx context.Context) error {
	tick := time.NewTicker(joinPause)
	defer tick.Stop()
	for said := false; ; {
		_, err := os.Stat(a.JoinFile)
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("join file: %w", err)
		}
		if !said {
			a.Log.Warn("waiting for the network's join file: make the Secret heddle-join of the one that the store's node has in its state directory",
				"file", a.JoinFile, "store_node", a.StoreNode)
			said = true
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("join file %s: %w", a.JoinFile, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// startOutside starts cmd at the top of every hierarchy of control groups: this process goes there,
// starts it, and comes back.
func (a Agent) startOutside(cmd *exec.Cmd) (err error) {
	if own, err := ownCgroupNamespace("/proc/self/ns/cgroup", "/proc/1/ns/cgroup"); err != nil {
		return err
	} else if own {
		return errors.New("the container has a control group namespace of its own, out of which the agent cannot be started: make it privileged")
	}
	table, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return fmt.Errorf("own control groups: %w", err)
	}
	here, err := hierarchies(string(table), a.Cgroups)
	if err != nil {
		return err
	}
	pid := strconv.Itoa(os.Getpid())
	defer func() {
		for _, h := range here {
			err = errors.Join(err, enter(filepath.Join(h.mount, h.path), pid))
		}
		if err != nil && cmd.Process != nil {
			err = errors.Join(err, cmd.Process.Kill())
		}
	}()
	for _, h := range here {
		if err := enter(h.mount, pid); err != nil {
			return err
		}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start agent: %w", err)
	}
	return nil
}

// ownCgroupNamespace reports whether the namespace at self is not the one at nodes, the node's
// first process's. Where that cannot be seen it is taken for the same.
func ownCgroupNamespace(self, nodes string) (bool, error) {
	here, err := os.Stat(self)
	if err != nil {
		return false, fmt.Errorf("own control group namespace: %w", err)
	}
	there, err := os.Stat(nodes)
	if err != nil {
		return false, nil
	}
	return !os.SameFile(here, there), nil
}

// hierarchy is one of control groups, and a process's place in it.
type hierarchy struct {
	mount, path string
}

// hierarchies reads /proc/self/cgroup and gives those in which the process is not at the top.
// mounts is where they are mounted: version 2 there itself, or with version 1 beside it, in
// directories.
func hierarchies(table, mounts string) ([]hierarchy, error) {
	var out []hierarchy
	for line := range strings.Lines(table) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 || !strings.HasPrefix(f[2], "/") {
			return nil, fmt.Errorf("own control groups: %q: want ID:CONTROLLERS:PATH", line)
		}
		if f[2] == "/" {
			continue
		}
		var places []string
		switch {
		case f[0] == "0":
			places = []string{mounts, filepath.Join(mounts, "unified")}
		default: // controllers, or name=NAME
			places = []string{filepath.Join(mounts, strings.TrimPrefix(f[1], "name="))}
		}
		mount, err := mountOf(places, f[2])
		if err != nil {
			return nil, err
		}
		if mount != "" {
			out = append(out, hierarchy{mount, f[2]})
		}
	}
	return out, nil
}

// mountOf gives the first of places that has the group called path, "" if none has: a hierarchy
// that is not mounted cannot be used to end processes either.
func mountOf(places []string, path string) (string, error) {
	for _, p := range places {
		_, err := os.Stat(filepath.Join(p, path, "cgroup.procs"))
		if err == nil {
			return p, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("control group %s: %w", path, err)
		}
	}
	return "", nil
}

// enter moves a process into the control group at dir.
func enter(dir, pid string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0); err != nil {
		return fmt.Errorf("enter control group %s: %w", dir, err)
	}
	return nil
}

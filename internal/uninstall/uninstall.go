// Package uninstall removes what agents leave in place when they stop, by design: connections live
// on without an agent, so only an operator can say that a node's network may go.
package uninstall

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/plane/queues"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/plane/tcp/procnet"
	"heddle.dev/heddle/internal/plane/verbs"
	"heddle.dev/heddle/internal/plane/verbs/folder"
	"heddle.dev/heddle/internal/wireguard"
)

// Node is what an agent was told about places: its --state-dir, --bpf-dir, --api-socket,
// --seccomp-socket and --cgroup. All are absolute paths.
type Node struct {
	StateDir, PinDir, APISocket, SeccompSocket string
	// Cgroups are those the agent may have been in; ones that are not there are no error.
	Cgroups []string
	// KeepFiles leaves the node's own files: identity, the store's data and the network's
	// authority.
	KeepFiles bool
	// Force removes although containers or the agent live: they lose the network and the guards
	// around them.
	Force bool
}

// processesEnd bounds how long an fd keeper, or a program of a plane, may take to end, and to leave
// its control group, which it does later than its memory and descriptors.
const processesEnd = 10 * time.Second

// stateFiles is all that agents make in their state directory. Nothing else is ever removed.
var stateFiles = slices.Concat([]string{"holder.sock", "holder.sock.lock", "instance", "etcd", "trust", "join.pem", "peer.pem"}, wireguard.StateFiles, verbs.StateFiles, module.StateFiles(), queues.StateFiles)

// socketFiles is what agents make beside their sockets' paths.
const (
	// What heddle-runtime keeps beside the seccomp socket: internal/runtime.
	rememberedFile = "runtime.json"
	deletedDir     = "deleted"   // beside the API's socket: what heddle-cni could not delete while no agent ran
	kubeSocket     = "kube.sock" // the same: heddle-kube's
	lockSuffix     = ".lock"
)

// Run removes Heddle from this node, and tells removed of each thing that went. It refuses, and
// changes nothing, while an agent or containers live. What is not there is no error, so that it can
// be repeated and works on a node that is half installed; an error at one thing does not keep the
// rest.
func (n Node) Run(removed func(what string)) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root: it removes network devices, BPF programs and control groups")
	}
	if err := n.check(); err != nil {
		return err
	}
	errs := []error{n.stopFDKeepers(removed), n.end("router of the verbs plane", verbs.Arguments(n.StateDir), removed)}
	for _, kind := range module.Kinds {
		errs = append(errs, n.end("stack module "+string(kind), module.Arguments(kind, n.StateDir), removed))
	}
	errs = append(errs, n.end("stack module of the operator's own", module.OwnArguments, removed))
	errs = append(errs, n.end("service of queues", queues.Program("", n.StateDir).Arguments(), removed))
	gone, err := netcfg.Teardown()
	for _, what := range gone {
		removed(what)
	}
	pinned, unpinErr := datapath.Unpin(n.PinDir)
	if pinned > 0 {
		removed(fmt.Sprintf("%d pins of BPF programs and maps in %s", pinned, n.PinDir))
	}
	errs = append(errs, err, unpinErr, removeEmpty(n.PinDir, removed), n.removeCgroups(removed))
	if !n.KeepFiles {
		errs = append(errs, n.removeFiles(removed))
	}
	return errors.Join(errs...)
}

// check refuses while something lives that would be hurt.
func (n Node) check() error {
	if n.Force {
		return nil
	}
	if conn, err := net.Dial("unix", n.APISocket); err == nil {
		return errors.Join(fmt.Errorf("an agent serves %s: stop it first (systemctl stop heddled), or give --force", n.APISocket), conn.Close())
	}
	kube := filepath.Join(filepath.Dir(n.APISocket), kubeSocket)
	if conn, err := net.Dial("unix", kube); err == nil {
		return errors.Join(fmt.Errorf("heddle-kube serves %s: stop it first (systemctl stop heddle-kube), or give --force", kube), conn.Close())
	}
	live, err := netcfg.Endpoints()
	if err != nil {
		return err
	}
	if len(live) > 0 {
		var names []string
		for _, l := range live {
			names = append(names, l.Name)
		}
		return fmt.Errorf("%d containers live that would lose their network (devices %s; `ip link show DEVICE` names each): "+
			"end them first, and delete their endpoints (heddle endpoints delete) while the agent runs, or give --force", len(live), some(names))
	}
	adopted, err := netcfg.AdoptedDevices()
	if err != nil {
		return err
	}
	if len(adopted) > 0 {
		return fmt.Errorf("%d containers live that another network carries (devices %s): their TCP would change its way, and their guards would go: "+
			"have the CNI runtime delete them while the agent runs (heddle endpoints names them), or give --force: they keep that network",
			len(adopted), some(adopted))
	}
	parked, err := n.fdKeeper().TakeAll()
	if err != nil {
		return nil // there is no fd keeper, or it will be ended
	}
	var names []string
	for _, p := range parked {
		_ = unix.Close(p.FD)
		_ = unix.Close(p.Page)
		if id, _, ok := strings.Cut(p.Key, "/"); ok { // the socket that listeners come by has no id
			names = append(names, id)
		}
	}
	if len(names) > 0 {
		slices.Sort(names)
		names = slices.Compact(names)
		return fmt.Errorf("%d containers run whose socket() calls are kept waiting (%s): end them first, or give --force: they then get ENOSYS",
			len(names), some(names))
	}
	return nil
}

// some lists the first names.
func some(names []string) string {
	const most = 10
	if len(names) > most {
		names = append(slices.Clone(names[:most]), "...")
	}
	return strings.Join(names, ", ")
}

func (n Node) keeperSocket() string { return filepath.Join(n.StateDir, "holder.sock") }

func (n Node) fdKeeper() *fdkeep.Client { return fdkeep.NewClient(n.keeperSocket()) }

// stopFDKeepers ends the fd keeper, also one whose socket was removed: that one would make it, and
// its directory, anew.
func (n Node) stopFDKeepers(removed func(string)) error {
	arguments := []string{"park", "--socket", n.keeperSocket()}
	pids, err := n.processes(arguments)
	if err != nil {
		return err
	}
	_ = n.fdKeeper().Stop() // one that does not answer is ended below
	return n.endAll("fd keeper", pids, arguments, removed)
}

// end ends the processes in the agent's cgroups that were started with these arguments.
func (n Node) end(what string, arguments []string, removed func(string)) error {
	pids, err := n.processes(arguments)
	if err != nil {
		return err
	}
	return n.endAll(what, pids, arguments, removed)
}

func (n Node) endAll(what string, pids []int, arguments []string, removed func(string)) error {
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGTERM) // it may have ended
	}
	for deadline := time.Now().Add(patience.For(processesEnd)); ; time.Sleep(10 * time.Millisecond) {
		left, err := n.processes(arguments)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s %v does not end: kill it", what, left)
		}
	}
	for _, pid := range pids {
		removed(fmt.Sprintf("%s, process %d", what, pid))
	}
	return nil
}

// processes gives those in the agent's cgroups whose first arguments are these.
func (n Node) processes(arguments []string) (pids []int, err error) {
	for _, dir := range n.Cgroups {
		raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look for processes of the agent's: %w", err)
		}
		for word := range strings.FieldsSeq(string(raw)) {
			pid, err := strconv.Atoi(word)
			if err != nil || pid < 2 {
				continue // of another process namespace
			}
			cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err != nil {
				continue // it has ended
			}
			words := strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
			if len(words) > len(arguments) && slices.Equal(words[1:1+len(arguments)], arguments) {
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
}

// removeCgroups removes those that no process is in.
func (n Node) removeCgroups(removed func(string)) error {
	var errs []error
	for _, dir := range n.Cgroups {
		err := unix.Rmdir(dir)
		for deadline := time.Now().Add(patience.For(processesEnd)); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); err = unix.Rmdir(dir) {
			time.Sleep(10 * time.Millisecond) // what has just ended may still be counted
		}
		switch {
		case err == nil:
			removed("control group " + dir)
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("remove control group %s: %w (`cat %[1]s/cgroup.procs` shows who is in it)", dir, err))
		}
	}
	return errors.Join(errs...)
}

// removeFiles removes sockets and state, and then the directories that are empty.
func (n Node) removeFiles(removed func(string)) error {
	run := filepath.Dir(n.APISocket)
	files := []string{
		n.APISocket, filepath.Join(run, endpointfile.Node), filepath.Join(run, endpointfile.Dir), filepath.Join(run, deletedDir), filepath.Join(run, kubeSocket), n.SeccompSocket, n.SeccompSocket + lockSuffix,
		filepath.Join(filepath.Dir(n.SeccompSocket), rememberedFile), filepath.Join(filepath.Dir(n.SeccompSocket), procnet.Dir),
		filepath.Join(filepath.Dir(n.SeccompSocket), folder.Dir),
	}
	for _, name := range stateFiles {
		files = append(files, filepath.Join(n.StateDir, name))
	}
	var errs []error
	for _, f := range files {
		if _, err := os.Lstat(f); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.RemoveAll(f); err != nil {
			errs = append(errs, err)
			continue
		}
		removed(f)
	}
	for _, dir := range []string{n.StateDir, run, filepath.Dir(n.SeccompSocket)} {
		errs = append(errs, removeEmpty(dir, removed))
	}
	return errors.Join(errs...)
}

// removeEmpty removes a directory. One that has others' files, a lab's among them, or is a mount
// point, stays.
func removeEmpty(dir string, removed func(string)) error {
	err := os.Remove(dir)
	switch {
	case err == nil:
		removed(dir)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
	default:
		return err
	}
	return nil
}

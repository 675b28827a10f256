package runtime

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/tcp/procnet"
)

// AnnotationProcNet says in a container's configuration why its /proc/net/tcp is the kernel's,
// which has none of its intercepted connections.
const AnnotationProcNet = "io.heddle.proc-net"

// Reasons for which a container's /proc/net stays the kernel's.
const (
	procUnpublished = "not_published" // the node's agent is of an earlier version, or was never started
	procNoDev       = "dev_no_tmpfs"  // there is no place in memory for what /proc/net leads to
	procNoProc      = "no_proc"       // the container has no /proc of its own
	procUnmasked    = "proc_unmasked" // it may mount /proc in namespaces of its own, which the kernel refuses where one is covered
	procLabelled    = "selinux_label" // SELinux would keep it from reading what /proc/net leads to
)

// coverCommand is the argument by which the real runtime calls this program back.
const coverCommand = "heddle-cover-proc-net"

// sockDiag has ss, and what else can, read /proc/net/tcp: the kernel's answer by netlink is about
// the container's own stack, and nothing else than the kernel can give it. A kernel without
// sock_diag says the same.
var sockDiag = trap{syscall: "socket", calls: []callSet{diagSocket()}, answer: object{"action": actErrno, "errnoRet": number(93)}} // EPROTONOSUPPORT

func diagSocket() callSet {
	const afNetlink, netlinkSockDiag = 16, 4
	b := anyCall()
	b[0] = point(afNetlink)
	b[2] = point(netlinkSockDiag)
	return b
}

// addProcNet has the container's /proc/net/tcp and /proc/net/tcp6 show its intercepted connections,
// by the mounts that procMounts gave. It edits the configuration of a bundle in place, or notes in
// it why it does not. record is empty if the configuration says that the container has an endpoint,
// or where to look for one when its network namespace is made.
func addProcNet(config object, bundle string, mounts []bind, why, record string) error {
	if why != "" {
		return annotate(config, AnnotationProcNet, why)
	}
	if _, err := (injection{binds: mounts}).add(config, target{}, nil); err != nil {
		return fmt.Errorf("/proc/net of the container: %w", err)
	}
	return addCoverHook(config, bundle, record)
}

// procMounts gives the mounts to add, by what the agent has put beside its socket, or why there are
// none.
func procMounts(config object, socket string) (mounts []bind, why string, err error) {
	if why, err = whyKernels(config); why != "" || err != nil {
		return nil, why, err
	}
	published, err := procnet.Mounts(filepath.Join(filepath.Dir(socket), procnet.Dir))
	if err != nil {
		return nil, "", err
	}
	if published == nil {
		return nil, procUnpublished, nil
	}
	for _, m := range published {
		mounts = append(mounts, bind{source: func(target) string { return m.Source }, at: m.Destination, noexec: true})
	}
	return mounts, "", nil
}

// whyKernels gives the reason why the /proc/net of a container like this is left alone, "" if it is
// not.
func whyKernels(config object) (why string, err error) {
	process, err := readObject(config, "process", "process")
	if err != nil {
		return "", err
	}
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return "", err
	}
	masked, err := readStrings(linux, "linux", "maskedPaths")
	if err != nil {
		return "", err
	}
	isProc := func(path string) bool { return filepath.Dir(path) == "/proc" }
	switch label, _ := process["selinuxLabel"].(string); {
	case label != "":
		return procLabelled, nil
	case !slices.ContainsFunc(masked, isProc):
		return procUnmasked, nil
	}
	for _, m := range []struct{ path, kind, missing string }{{"/dev", "tmpfs", procNoDev}, {"/proc", "proc", procNoProc}} {
		if kind, err := mountedAs(config, m.path); kind != m.kind || err != nil {
			return m.missing, err
		}
	}
	return "", nil
}

// addCoverHook has the real runtime call this program when the container's mounts are there, and
// before anything runs in it: runtimes refuse mounts in /proc themselves. It is called in the
// runtime's namespaces: where the container has a user namespace, its users may not be able to
// start this program.
func addCoverHook(config object, bundle, record string) error {
	path, err := rootPath(config, bundle)
	if err != nil {
		return err
	}
	return addHook(config, coverCommand, path, record)
}

// addHook has the real runtime call this program with args when the container's namespaces and
// mounts are there, after the hooks that there are.
func addHook(config object, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	hooks, err := readObject(config, "hooks", "hooks")
	if err != nil {
		return err
	}
	if hooks == nil {
		hooks = object{}
	}
	list, err := readList(hooks, "hooks", "createRuntime")
	if err != nil {
		return err
	}
	hooks["createRuntime"] = append(list, object{"path": self, "args": append([]any{filepath.Base(self)}, toAny(args)...)})
	config["hooks"] = hooks
	return nil
}

// rootPath gives the absolute path of the container's root file system.
func rootPath(config object, bundle string) (string, error) {
	root, err := readObject(config, "root", "root")
	if err != nil {
		return "", err
	}
	path, err := readString(root, "root", "path")
	if err != nil || filepath.IsAbs(path) {
		return path, err
	}
	if path, err = filepath.Abs(filepath.Join(bundle, path)); err != nil {
		return "", fmt.Errorf("find root.path: %w", err)
	}
	return path, nil
}

// cover is what the hook does. A container whose /proc/net cannot be covered starts all the same.
func cover(root, record string, state io.Reader) {
	var container struct {
		Pid int `json:"pid"`
	}
	err := json.NewDecoder(state).Decode(&container)
	ours := record == ""
	if err == nil && !ours {
		ours, err = hasEndpoint(container.Pid, record)
	}
	if err == nil && ours {
		err = procnet.Cover(container.Pid, root)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "heddle-runtime: /proc/net/tcp of the container shows its own stack only: %v\n", err)
	}
}

// hasEndpoint reports whether the network namespace of a process is an endpoint's: one of the
// agent's record, or, before the agent has written it down, one with a device of Heddle's.
func hasEndpoint(pid int, record string) (bool, error) {
	path := fmt.Sprintf("/proc/%d/ns/net", pid)
	if ours, err := recorded(filepath.Dir(record), path); ours || err != nil {
		return ours, err
	}
	ns, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer ns.Close()
	goruntime.LockOSThread() // for good: this program does little else
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return false, fmt.Errorf("enter the container's network namespace: %w", err)
	}
	devices, err := net.Interfaces()
	return slices.ContainsFunc(devices, func(d net.Interface) bool {
		return bytes.HasPrefix(d.HardwareAddr, []byte{0x02, 0x48, 0x43}) // docs/protocols/pins.md
	}), err
}

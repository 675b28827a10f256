package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/runtime"
)

// pausePath is where the heddle program appears in a container, to be its first process.
const pausePath = "/.heddle"

// defaultPath is PATH where the caller has none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// openFiles is the limit of open files in a container, for tests with many connections; less if the
// caller's own limit is less.
const openFiles = 20000

// capabilities are Docker's default set.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// rootDirs are where a container's root file system comes from. All but the mount points lie on one
// tmpfs, which goes with everything on it when it is unmounted.
type rootDirs struct{ scratch, upper, work, shm, rootfs string }

func (l Lab) rootDirs(c container) rootDirs {
	dir := l.containerDir(c)
	scratch := filepath.Join(dir, "scratch")
	return rootDirs{scratch, filepath.Join(scratch, "upper"), filepath.Join(scratch, "work"), filepath.Join(scratch, "shm"), filepath.Join(dir, "rootfs")}
}

// mountRoot makes the root file system of c unless it is there: the machine's own files, with
// changes kept in memory.
func (l Lab) mountRoot(c container) error {
	d := l.rootDirs(c)
	for _, dir := range []string{d.scratch, d.rootfs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if mounted, err := isMount(d.scratch, unix.TMPFS_MAGIC); err != nil {
		return err
	} else if !mounted {
		if err := unix.Mount("tmpfs", d.scratch, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("mount tmpfs at %s: %w", d.scratch, err)
		}
	}
	for _, dir := range []string{d.upper, d.work, d.shm} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(d.shm, os.ModeSticky|0o777); err != nil {
		return err
	}
	if mounted, err := isMount(d.rootfs, unix.OVERLAYFS_SUPER_MAGIC); mounted || err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", d.upper, d.work)
	if err := unix.Mount("overlay", d.rootfs, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount overlayfs at %s: %w", d.rootfs, err)
	}
	return nil
}

// isMount reports whether dir lies on a file system of the kind magic. For the lab's own
// directories that means: whether it is mounted there, because what lies above is of another kind.
func isMount(dir string, magic int64) (bool, error) {
	var own, above unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Statfs(dir, &fs), unix.Stat(dir, &own), unix.Stat(filepath.Dir(dir), &above)); err != nil {
		return false, fmt.Errorf("look at %s: %w", dir, err)
	}
	return int64(fs.Type) == magic && own.Dev != above.Dev, nil
}

// writeBundle writes the OCI configuration of c in mode m. pid is the first process of the
// container whose process, IPC and UTS namespace it joins, 0 to have its own.
func (l Lab) writeBundle(c container, m Mode, program string, pid int) (dir string, err error) {
	dir = filepath.Join(l.containerDir(c), string(m))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	spec := l.spec(c, m, program, pid)
	s, err := l.Load()
	if err != nil {
		return "", err
	}
	if s.SocketPool && m == ModeHeddle {
		spec.Annotations[model.AnnotationSocketPool] = "true"
	}
	if s.Guest && m == ModeHeddle {
		spec.Annotations[model.AnnotationGuest] = "true"
	}
	if s.Stacks && m == ModeHeddle {
		spec.Annotations[model.AnnotationStack] = "true"
	}
	if s.Verbs && m == ModeHeddle {
		spec.Annotations[model.AnnotationVerbs] = "true" // heddle-runtime has the agent give the endpoint verbs
		if s.VerbsSpinMicros > 0 {
			spec.Annotations[model.AnnotationVerbsSpin] = strconv.FormatUint(uint64(s.VerbsSpinMicros), 10)
		}
	}
	data, err := json.MarshalIndent(spec, "", "\t")
	if err != nil {
		return "", err
	}
	return dir, replaceFile(filepath.Join(dir, "config.json"), data)
}

// spec is the OCI configuration of c in mode m.
func (l Lab) spec(c container, m Mode, program string, pid int) *specs.Spec {
	d := l.rootDirs(c)
	netnsPath := l.netns(c.suffix())
	if m == ModeHost {
		netnsPath = l.netns(c.node)
	}
	s := &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: d.rootfs},
		Process: &specs.Process{
			Cwd:  "/",
			Args: []string{"sleep", "infinity"},
			Env:  []string{"PATH=" + defaultPath},
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			Rlimits: []specs.POSIXRlimit{fileLimit()},
		},
		Mounts: containerMounts(d),
		Linux: &specs.Linux{
			CgroupsPath: l.cgroup() + "/" + c.suffix() + "/" + string(m),
			Namespaces:  namespaces(netnsPath, pid),
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			MaskedPaths: []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
				"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
	if pid == 0 {
		// The first process of the process namespace has to reap what others leave.
		s.Hostname = l.name + "-" + c.suffix()
		s.Process.Args = []string{pausePath, "pause"}
		s.Process.Env = append(s.Process.Env, "GOMAXPROCS=1")
		s.Mounts = append(s.Mounts, specs.Mount{Destination: pausePath, Type: "bind", Source: program, Options: []string{"bind", "ro"}})
	}
	if m == ModeHeddle {
		s.Annotations = map[string]string{
			runtime.AnnotationEndpoint: c.String(),
			runtime.AnnotationSocket:   l.seccompSocket(c.node),
		}
	}
	return s
}

func containerMounts(d rootDirs) []specs.Mount {
	nosuid := []string{"nosuid", "noexec", "nodev"}
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: nosuid},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: append([]string{"ro"}, nosuid...)},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "bind", Source: d.shm, Options: []string{"bind", "rw", "nosuid", "nodev"}},
		// The machine's own: so that scripts and sockets can be handed over.
		{Destination: "/tmp", Type: "bind", Source: "/tmp", Options: []string{"rbind", "rw"}},
	}
}

func namespaces(netnsPath string, pid int) []specs.LinuxNamespace {
	out := []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace, Path: netnsPath}}
	for ns, file := range map[specs.LinuxNamespaceType]string{specs.PIDNamespace: "pid", specs.IPCNamespace: "ipc", specs.UTSNamespace: "uts"} {
		path := ""
		if pid != 0 {
			path = fmt.Sprintf("/proc/%d/ns/%s", pid, file)
		}
		out = append(out, specs.LinuxNamespace{Type: ns, Path: path})
	}
	return out
}

func fileLimit() specs.POSIXRlimit {
	limit := specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: openFiles, Hard: openFiles}
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err == nil && own.Max < openFiles {
		limit.Soft, limit.Hard = own.Max, own.Max
	}
	return limit
}

// containerState is what runc says of a container.
type containerState struct {
	ID     string `json:"id"`
	Pid    int    `json:"pid"`
	Status string `json:"status"`
}

// runc gives a command of the OCI runtime for this lab: the wrapper for mode heddle, runc itself
// for the others.
func (l Lab) runc(ctx context.Context, p programs, m Mode, args ...string) *exec.Cmd {
	path, env := l.runtime(p, m)
	cmd := exec.CommandContext(ctx, path, append([]string{"--root", l.runcRoot()}, args...)...)
	cmd.Env = env
	return cmd
}

// runtime gives the OCI runtime of mode m and the environment to run it with.
func (l Lab) runtime(p programs, m Mode) (path string, env []string) {
	if m != ModeHeddle {
		return p.runc, os.Environ()
	}
	// Set to nothing, the socket is the annotation's, whatever the caller's environment says.
	return p.wrapper, append(os.Environ(), runtime.EnvRuntime+"="+p.runc, runtime.EnvSocket+"=")
}

// runningContainers asks runc for the lab's containers that run, by id.
func (l Lab) runningContainers(ctx context.Context, p programs) (map[string]containerState, error) {
	out, err := l.runc(ctx, p, ModeHost, "list", "--format", "json").Output()
	if err != nil {
		return nil, fmt.Errorf("runc list: %w", withStderr(err))
	}
	var all []containerState
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("runc list: %w", err)
	}
	running := map[string]containerState{}
	for _, c := range all {
		if c.Status == "running" {
			running[c.ID] = c
		}
	}
	return running, nil
}

// start starts the runc container of c in mode m and gives its first process.
func (l Lab) start(ctx context.Context, p programs, c container, m Mode, initPid int) (pid int, err error) {
	bundle, err := l.writeBundle(c, m, p.self, initPid)
	if err != nil {
		return 0, err
	}
	id := l.runcID(c, m)
	// What a killed `up` or a machine's crash left of it.
	if err := os.RemoveAll(filepath.Join(l.runcRoot(), id)); err != nil {
		return 0, err
	}
	logFile, err := os.Create(filepath.Join(bundle, "log"))
	if err != nil {
		return 0, err
	}
	defer logFile.Close()
	pidPath := filepath.Join(bundle, pidFile)
	cmd := l.runc(ctx, p, m, "run", "--detach", "--bundle", bundle, "--pid-file", pidPath, id)
	cmd.Stdout, cmd.Stderr = logFile, logFile // a pipe would be the container's as well, and never end
	if err := runTied(cmd); err != nil {
		return 0, fmt.Errorf("%s run %s: %w%s", filepath.Base(cmd.Path), id, err, tail(logFile.Name()))
	}
	return readPid(pidPath)
}

// readPid reads what process the runtime has started.
func readPid(path string) (pid int, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Sscan(string(data), &pid); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return pid, nil
}

// runTied runs cmd and has the kernel kill it if this process is killed, so that an Up that is
// repeated does not meet the runtime of the one before, still at work. What it started lives in the
// lab's cgroups.
func runTied(cmd *exec.Cmd) error {
	// The signal is sent when the thread that started the command ends, which must not be earlier.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// tailLines is how much of a log an error quotes.
const tailLines = 5

// tail quotes the last lines of a log for an error.
func tail(path string) string {
	data, err := os.ReadFile(path)
	data = bytes.TrimSpace(data)
	if err != nil || len(data) == 0 {
		return "; its log is " + path
	}
	lines := bytes.Split(data, []byte("\n"))
	if len(lines) > tailLines {
		lines = lines[len(lines)-tailLines:]
	}
	return fmt.Sprintf("; end of %s:\n  %s", path, bytes.Join(lines, []byte("\n  ")))
}

// withStderr adds what a program complained of to its error.
func withStderr(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}
	return err
}

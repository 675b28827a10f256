package process_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// user is one that nobody is.
const user = 0x6f000001

// rootsFolder is one that is root's up to the root of the file system.
func rootsFolder(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of other users")
	}
	dir, err := os.MkdirTemp("/tmp", "confined")
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	testutil.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

// TestOnlyRoots: a program that others than root could have put there, or could change, is refused,
// with what is wrong and what to do.
func TestOnlyRoots(t *testing.T) {
	dir := rootsFolder(t)
	path := filepath.Join(dir, "program")
	good := func() {
		t.Helper()
		testutil.NoError(t, os.RemoveAll(path))
		testutil.NoError(t, os.WriteFile(path, []byte("x"), 0o755))
		testutil.NoError(t, os.Chown(dir, 0, 0))
		testutil.NoError(t, os.Chmod(dir, 0o755))
		testutil.NoError(t, process.OnlyRoots(path))
	}
	for what, attack := range map[string]func() error{
		"chown root":          func() error { return os.Chown(path, user, 0) },
		"chmod go-w":          func() error { return os.Chmod(path, 0o777) },
		"chmod 755":           func() error { return os.Chmod(path, 0o750) },
		"chown root " + dir:   func() error { return os.Chown(dir, user, 0) },
		"chmod go-w " + dir:   func() error { return os.Chmod(dir, 0o775) },
		"chmod o+x " + dir:    func() error { return os.Chmod(dir, 0o750) },
		"copy the program":    func() error { return os.Rename(path, path+"2") },
		"is no regular file":  func() error { return os.Remove(path) },
		"no regular file: co": func() error { return os.Remove(path) },
	} {
		good()
		testutil.NoError(t, attack())
		if what == "copy the program" {
			testutil.NoError(t, os.Symlink(path+"2", path))
		}
		if strings.Contains(what, "regular file") {
			testutil.NoError(t, os.Mkdir(path, 0o755))
		}
		if err := process.OnlyRoots(path); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("want %q: %v", what, err)
		}
	}
}

// link is a connection to a program.
type link struct{ conn *net.UnixConn }

func (l link) Process() int { pid, _ := process.Peer(l.conn); return pid }

// listenForAnybody has the node's sockets in dir that every user may connect or send to.
func listenForAnybody(t *testing.T, dir string) {
	t.Helper()
	open, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "open"), Net: "unix"})
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = open.Close() })
	datagrams, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "datagrams"), Net: "unixgram"})
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = datagrams.Close() })
	for _, name := range []string{"open", "datagrams"} {
		testutil.NoError(t, os.Chmod(filepath.Join(dir, name), 0o666))
	}
}

// TestMain is the program by which confined ones are started, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == process.Confine {
		fmt.Fprintln(os.Stderr, process.Become(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestConfined: a program that is confined has no privileges, calls that it does not need, or
// bounds that it can raise, and cannot have the agent talk to somebody else. Unconfined, the same
// program has them.
func TestConfined(t *testing.T) {
	dir := rootsFolder(t)
	const python = "/usr/bin/python3" // one that every user may execute
	if _, err := os.Stat(python); err != nil {
		t.Skip("needs python3: it is the program that looks what it may do")
	}
	path := filepath.Join(dir, "program")
	// It may make its socket, and says what else it may do.
	testutil.NoError(t, os.WriteFile(path, []byte("#!"+python+`
import ctypes, errno, os, resource, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[2])
s.listen()
conn, _ = s.accept()
def can(f):
    try:
        f()
        return True
    except (OSError, ValueError): # a limit above what may be is the latter
        return False
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    # What fails for another reason, the kernel has taken.
    if getattr(libc, name)(*args) == -1 and ctypes.get_errno() == errno.EPERM:
        raise OSError(errno.EPERM, name)
def send(path):
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path)
def clone():
    child = libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
def more(what, than):
    if not 0 <= resource.getrlimit(what)[1] <= than:
        return
    resource.setrlimit(what, (resource.getrlimit(what)[1] + 1,) * 2)
did = [name for name, f in {
    "write": lambda: open("`+dir+`/written", "w"),
    "kill": lambda: os.kill(1, 0),
    "root": lambda: os.setuid(0),
    "network": lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 1), 1),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "connect": lambda: socket.socket(socket.AF_UNIX).connect("`+dir+`/open"),
    "send": lambda: send("`+dir+`/datagrams"),
    "trace": lambda: call("ptrace", 16, 0x3fffffff, 0, 0),
    "look": lambda: call("process_vm_readv", os.getppid(), None, 0, None, 0, 0),
    "clone": clone, # before the next one, in which nobody may
    "namespace": lambda: call("unshare", 0x10000000),
    "descriptors": lambda: more(resource.RLIMIT_NOFILE, 1 << 18),
    "processes": lambda: more(resource.RLIMIT_NPROC, 1 << 12),
    "memory": lambda: more(resource.RLIMIT_DATA, 4 << 30),
    "core": lambda: more(resource.RLIMIT_CORE, 0),
}.items() if can(f)]
conn.send(("may " + " ".join(did)).encode())
conn.recv(1)
`), 0o755))
	listenForAnybody(t, dir)
	confined := &process.Confined{User: user, Dir: filepath.Join(dir, "its"), By: "/proc/self/exe"}
	program := process.Program{Name: "program", Path: path, Socket: confined.Socket(), Log: filepath.Join(dir, "log"), OwnNetns: true, Confined: confined}
	dial := func(path string) (l link, err error) {
		conn, err := net.Dial("unixpacket", path)
		if err != nil {
			return l, err
		}
		return link{conn.(*net.UnixConn)}, nil
	}
	asks := func(p process.Program) string {
		t.Helper()
		l, err := process.Reach(p, dial)
		testutil.NoError(t, err)
		defer l.conn.Close()
		buf := make([]byte, 200)
		n, err := l.conn.Read(buf)
		testutil.NoError(t, err)
		if p.Confined != nil {
			testutil.NoError(t, confined.IsPeer(l.conn))
			if !confined.IsProcess(l.Process()) || confined.IsProcess(os.Getpid()) {
				t.Error("whose process it is, is not known")
			}
		}
		return string(buf[:n])
	}
	if may := asks(program); may != "may " {
		t.Errorf("confined, it %s", may)
	}
	program.Confined, program.Socket = nil, filepath.Join(dir, "socket")
	may := asks(program)
	for _, what := range []string{"write", "kill", "raw", "netlink", "connect", "send", "trace", "look", "namespace", "clone", "memory"} {
		if !strings.Contains(may, " "+what) {
			t.Errorf("unconfined, it %s, and not %s: this tests nothing", may, what)
		}
	}

	// Attack: somebody else's socket in its folder.
	testutil.NoError(t, os.RemoveAll(confined.Dir))
	testutil.NoError(t, os.Mkdir(confined.Dir, 0o700))
	testutil.NoError(t, os.Chown(confined.Dir, user, user))
	other, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, "other"), Net: "unixpacket"})
	testutil.NoError(t, err)
	defer other.Close()
	asIt := exec.CommandContext(t.Context(), "ln", "-s", filepath.Join(dir, "other"), confined.Socket())
	asIt.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	if out, err := asIt.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	l, err := dial(confined.Socket())
	testutil.NoError(t, err)
	defer l.conn.Close()
	if err := confined.IsPeer(l.conn); err == nil || !strings.Contains(err.Error(), "user 0") {
		t.Errorf("somebody else is taken for it: %v", err)
	}
	_ = unix.Unlink(confined.Socket()) // it goes with the folder
}

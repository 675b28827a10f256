package process_test

import (
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

// TestConfined: a program that is confined has no privileges, and cannot have the agent talk to
// somebody else. Unconfined, the same program has them.
func TestConfined(t *testing.T) {
	dir := rootsFolder(t)
	const python = "/usr/bin/python3" // one that every user may execute
	if _, err := os.Stat(python); err != nil {
		t.Skip("needs python3: it is the program that looks what it may do")
	}
	path := filepath.Join(dir, "program")
	// It may make its socket, and says what else it may do.
	testutil.NoError(t, os.WriteFile(path, []byte("#!"+python+`
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[2])
s.listen()
conn, _ = s.accept()
def can(f):
    try:
        f()
        return True
    except OSError:
        return False
did = [name for name, f in {
    "write": lambda: open("`+dir+`/written", "w"),
    "kill": lambda: os.kill(1, 0),
    "root": lambda: os.setuid(0),
    "network": lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 1), 1),
    "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6),
}.items() if can(f)]
conn.send(("may " + " ".join(did)).encode())
conn.recv(1)
`), 0o755))
	confined := &process.Confined{User: user, Dir: filepath.Join(dir, "its")}
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
		buf := make([]byte, 100)
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
	if may := asks(program); !strings.Contains(may, "write") || !strings.Contains(may, "kill") {
		t.Errorf("unconfined, it %s: this tests nothing", may)
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

package programs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestStackOfOwn: a module of the operator's own, examples/stack-module, runs a container's TCP:
// Python's servers and clients as they are. The node that lacks it says what to do. It has no
// privileges, is started again when it is killed or hangs, and outlives the agent.
func TestStackOfOwn(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "python3")
	modules, err := os.MkdirTemp("", "stack-modules") // t's own are closed to the module's user
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(modules) })
	testutil.NoError(t, os.Chmod(modules, 0o755))
	l := newStacksLab(t, "module/example", "--agent-arg=--stack-modules="+modules)
	copyPrograms(t, l.dir, "stack_echo.py")
	if served := l.served(); served.Stack != "kernel" || !strings.Contains(served.Fault, "install the program as "+modules+"/example") {
		t.Fatalf("without the program: %+v", served)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", filepath.Join(modules, "example"), "../../examples/stack-module")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	testutil.Eventually(t, "the node serves it", func() (bool, string) {
		served := l.served()
		return served.Stack == "module/example" && served.Fault == "", served.Fault
	})

	server := l.start("n1/c1", "9005", "python3", filepath.Join(l.dir, "stack_echo.py"), "9005")
	l.start("n2/c1", "9006", "python3", filepath.Join(l.dir, "stack_echo.py"), "9006")
	l.must("n2/c1", "python3", "-c", askEcho, l.address("n1/c1"), "9005")
	l.must("n1/c1", "python3", "-c", askEcho, l.address("n2/c1"), "9006")
	l.isConfined(t)

	first, err := l.connect(9005)
	testutil.NoError(t, err)
	testutil.NoError(t, first.echoes())
	l.endAgent()
	l.up()
	testutil.NoError(t, first.echoes())
	next := l.outlives(first, 9005, "a module of one's own", l.killModule)
	l.outlives(next, 9005, "a module of one's own that hangs", func() {
		testutil.NoError(t, unix.Kill(l.module().PID, unix.SIGSTOP)) // until the agent kills it
	})
	if t.Failed() {
		t.Log(server.Output())
	}
}

// askEcho sends a megabyte to an echo server, which ends it.
const askEcho = `import socket, sys, threading
conn = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
data, back = bytes(range(256)) * 4096, b""
threading.Thread(target=conn.sendall, args=(data,)).start()
while len(back) < len(data):
    more = conn.recv(65536)
    if not more:
        break
    back += more
conn.shutdown(socket.SHUT_WR)
sys.exit(0 if back == data and conn.recv(1) == b"" else "not what was sent")
`

// served is what n1's agent says of its container's stack.
func (l stacksLab) served() api.EndpointStack {
	l.Helper()
	all := l.stacks().Endpoints
	if len(all) != 1 {
		l.Fatalf("want one endpoint: %+v", all)
	}
	return all[0]
}

// isConfined looks at what the module's process may do.
func (l stacksLab) isConfined(t *testing.T) {
	pid := l.module().PID
	var st, own unix.Stat_t
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	testutil.NoError(t, unix.Stat(proc, &st))
	if st.Uid < 0x6f000000 || st.Uid != st.Gid {
		t.Errorf("it is user %d, group %d", st.Uid, st.Gid)
	}
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	testutil.NoError(t, err)
	for _, want := range []string{"NoNewPrivs:\t1", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "Groups:\t \n", "Seccomp:\t2"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("its status has no %q:\n%s", want, status)
		}
	}
	limits, err := os.ReadFile(filepath.Join(proc, "limits"))
	testutil.NoError(t, err)
	for _, want := range []string{"Max processes             4096", "Max data size             4294967296", "Max core file size        0"} {
		if !strings.Contains(string(limits), want) {
			t.Errorf("its limits have no %q:\n%s", want, limits)
		}
	}
	for _, kind := range []string{"net", "ipc"} {
		testutil.NoError(t, unix.Stat(filepath.Join(proc, "ns", kind), &st))
		testutil.NoError(t, unix.Stat("/proc/self/ns/"+kind, &own))
		if st.Ino == own.Ino {
			t.Errorf("it has the node's %s namespace", kind)
		}
	}
	// What it can reach of the node is what anybody can.
	as := exec.CommandContext(t.Context(), "cat", filepath.Join("/run/heddle/lab", l.name, "n1", "join.pem"))
	as.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 0x6f000000, Gid: 0x6f000000}}
	if as.Run() == nil {
		t.Error("its user reads the key by which nodes join")
	}
}

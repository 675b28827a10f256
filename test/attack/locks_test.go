package attack

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks, attack{"hold the locks of sockets for ever", model.ProtectLocks, "n1", holdLocks})
}

// holder connects and, in a thread for each connection, sends from memory that nobody provides. It
// takes /dev/userfaultfd from the test: it stands for a container that was given that device, a
// FUSE mount or a network file system, or CAP_SYS_PTRACE.
const holder = `
import ctypes, fcntl, mmap, os, select, socket, struct, sys, threading
host, port, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
given = socket.socket(socket.AF_UNIX)
given.bind(sys.argv[4])
given.listen(1)
print("listens", flush=True)
device = socket.recv_fds(given.accept()[0], 1, 1)[1][0]
page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
libc.send.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
uffd = fcntl.ioctl(device, 0xaa00, 0)  # USERFAULTFD_IOC_NEW
fcntl.ioctl(uffd, 0xc018aa3f, bytearray(struct.pack("QQQ", 0xaa, 0, 0)))
memory = mmap.mmap(-1, n * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(uffd, 0xc020aa00, bytearray(struct.pack("QQQQ", start, n * page, 1, 0)))
held = [socket.create_connection((host, port)) for _ in range(n)]
for i, s in enumerate(held):
    threading.Thread(target=libc.send, args=(s.fileno(), start + i * page, page, 0), daemon=True).start()
for _ in held:
    os.read(uffd, 32)  # the kernel asks for a page
print("held", flush=True)
sys.stdin.read()
`

const (
	heldSockets = 64 // so that a pass meets one of them before the victims, wherever these are
	victims     = 8
)

// holdLocks has a container hold the locks of sockets while policy changes so that it forbids
// connections of another: these must end within a second.
func holdLocks(t *testing.T) (gained string) {
	server, client := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	far, port, farPort := lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort(), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = [connect(4, %q, %d) for _ in range(%d)]`, lab.Address(t, "heddle", "n1/c1"), port, victims)
	server.Must(`c = [l.accept() for _ in range(%d)]`, victims)
	var ports []uint16
	testutil.NoError(t, json.Unmarshal([]byte(client.Do(`[c.getsockname()[1] for c in s]`)), &ports))
	far.Must(`l = listen(4, "0.0.0.0", %d, backlog=%d)`, farPort, 2*heldSockets)
	attacker := hold(t, lab.Address(t, "heddle", "n2/c1"), farPort)
	defer attacker.Stop() // before policies are deleted
	applied := forbidBeside(t, port)
	testutil.Eventually(t, "the policy to be in force", func() (bool, string) {
		got := client.Do(`error_of(connect, 4, %q, %d)`, lab.Address(t, "heddle", "n1/c1"), port)
		return got == `"ECONNREFUSED"`, got
	})
	ended := client.Do(`ended_within(1, s)`)
	if ended != strconv.Itoa(victims) {
		attacker.Stop()
		<-applied
		return fmt.Sprintf("%s of %d forbidden connections of another container's had ended after a second", ended, victims)
	}
	awaitReasons(t, port, ports)
	// What else passes over sockets goes on, containers start, and the operator is told.
	// Without the protection a pass may have met the victims before the locks: then the list waits.
	list, err := exec.CommandContext(t.Context(), lab.Bin, "connections", "--node", "n1", "--lab", lab.Name).CombinedOutput()
	if err != nil {
		attacker.Stop()
		<-applied
		return fmt.Sprintf("the list of connections does not come: %v: %s", err, list)
	}
	if !strings.Contains(string(list), strconv.Itoa(farPort)) {
		t.Errorf("the list of connections lacks those whose lock is held:\n%s", list)
	}
	e, id := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), fmt.Sprintf("cni-held%d", lab.FreePort())
	e.Add(e.Sandbox(id)) // as a container starts
	said := ""
	testutil.Eventually(t, "the fault", func() (bool, string) {
		said = lab.Heddle(t, "status", "--node", "n1")
		return strings.Contains(said, string(tcp.FaultPassStuck)) && strings.Contains(said, lab.Address(t, "heddle", "n1/c1")), said
	})
	attacker.Stop()
	<-applied
	testutil.Eventually(t, "the fault to go", func() (bool, string) {
		said = lab.Heddle(t, "status", "--node", "n1")
		return !strings.Contains(said, string(tcp.FaultPassStuck)), said
	})
	return ""
}

// hold has n1/c1 connect to there and hold the locks of these sockets.
func hold(t *testing.T, addr string, port int) *lab.Program {
	device, err := os.Open("/dev/userfaultfd")
	if err != nil {
		t.Skipf("there is no memory that does not come: %v", err)
	}
	defer device.Close()
	path := filepath.Join(os.TempDir(), lab.Name+"-holder")
	_ = os.Remove(path) // of a holder before
	attacker := lab.Start(t, "heddle", "n1/c1", lab.Python, "-c", holder, addr, strconv.Itoa(port), strconv.Itoa(heldSockets), path)
	t.Cleanup(func() { _ = os.Remove(path) })
	attacker.WaitFor("listens")
	conn, err := net.Dial("unix", path)
	testutil.NoError(t, err)
	defer conn.Close()
	_, _, err = conn.(*net.UnixConn).WriteMsgUnix([]byte("x"), unix.UnixRights(int(device.Fd())), nil)
	testutil.NoError(t, err)
	attacker.WaitFor("held")
	return attacker
}

// awaitReasons waits until each victim's cut has been told, with its reason: most were ended one by
// one, without the pass that waits for a lock. One end is enough: the other may have heard a reset
// before the pass came to it. Others are cut, too, that were opened before the policy was in force.
func awaitReasons(t *testing.T, port int, victims []uint16) {
	t.Helper()
	testutil.Eventually(t, "each cut to be told with its reason", func() (bool, string) {
		said := lab.Heddle(t, "observe", "--json", "--node", "n1", "--from", "n1/c2", "--event", "cut", "--port", strconv.Itoa(port))
		told := make(map[uint16]bool)
		for line := range strings.Lines(said) {
			var f flow.Flow
			testutil.NoError(t, json.Unmarshal([]byte(line), &f))
			if f.Reason == "cut_policy" {
				told[f.From.Port] = true
			}
		}
		return !slices.ContainsFunc(victims, func(p uint16) bool { return !told[p] }), said
	})
}

// forbidBeside applies a policy that forbids a port, beside what follows: an agent that waits for a
// lock does not answer. The policy is deleted at the end of the test.
func forbidBeside(t *testing.T, port int) (applied <-chan struct{}) {
	file := filepath.Join(t.TempDir(), "policy.json")
	doc := lab.EverybodyPolicy("locks", nil, []map[string]any{lab.DenyRule("reject", port)})
	testutil.NoError(t, os.WriteFile(file, []byte(lab.JSON(t, doc)), 0o600))
	done := make(chan struct{})
	t.Cleanup(func() {
		<-done
		if out, err := exec.Command(lab.Bin, "policy", "delete", "--all", "--lab", lab.Name).CombinedOutput(); err != nil {
			t.Errorf("delete policies: %v\n%s", err, out)
		}
	})
	go func() {
		defer close(done)
		out, err := exec.Command(lab.Bin, "policy", "apply", "-f", file, "--lab", lab.Name).CombinedOutput()
		if err != nil {
			t.Logf("policy apply: %v\n%s", err, out) // without the protection it may be too late
		}
	}()
	return done
}

package intercept

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/ioctl"
	"heddle.dev/heddle/internal/trap/task"
)

// testEndpoint's sockets carry its id as SO_PRIORITY, which needs no privilege up to 6.
const (
	testEndpoint = model.EndpointID(5)
	testName     = "n1/c1"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := childMain(name); err != nil {
			fmt.Fprintln(os.Stderr, name+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// testMaker makes sockets that carry their endpoint's id as SO_PRIORITY. Its fields are set before
// use.
type testMaker struct {
	gate    chan struct{} // if set, MakeSocket waits until it is closed
	entered func()        // called at the start of MakeSocket
	err     atomic.Pointer[error]
	calls   atomic.Int64
	quota   *atomic.Int64 // sockets that may be given; nil: any number
}

func (m *testMaker) MakeSocket(ep model.EndpointID, family int) (int, error) {
	m.calls.Add(1)
	if m.entered != nil {
		m.entered()
	}
	if m.gate != nil {
		<-m.gate
	}
	if err := m.err.Load(); err != nil {
		return -1, *err
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, int(ep)); err != nil {
		closeFD(fd)
		return -1, os.NewSyscallError("setsockopt", err)
	}
	return fd, nil
}

// Admit gives the number of sockets that quota leaves, if it is set. It compares callers as the
// kernel does for the agent.
func (m *testMaker) Admit(_ int, caller model.Caller) error {
	if caller.Thread != 0 {
		proc, err := task.Open()
		if err != nil {
			return err
		}
		defer proc.Close()
		netns, err := proc.Netns(caller.Thread)
		if err != nil {
			return model.ErrNoCaller
		}
		own, err := proc.Owner(caller.Thread)
		switch {
		case err != nil:
			return model.ErrNoCaller
		case caller.Netns != 0 && netns != uint64(caller.Netns):
			return model.ErrOtherNetns
		case !caller.AnyOwner && own != (task.Owner{UID: caller.UID, GID: caller.GID}):
			return model.ErrOtherOwner
		}
	}
	if m.quota != nil && m.quota.Add(-1) < 0 {
		return model.ErrSocketQuota
	}
	return nil
}

// admitCompares is Config.AdmitCompares of the servers that testConfig describes.
var admitCompares bool

// bothWays runs a test with callers looked at by Admit, and by the server itself.
func bothWays(t *testing.T, test func(t *testing.T)) {
	for _, compares := range []bool{false, true} {
		t.Run(fmt.Sprintf("admit compares %v", compares), func(t *testing.T) {
			defer func() { admitCompares = false }()
			admitCompares = compares
			test(t)
		})
	}
}

// SetMPTCP shows as SO_KEEPALIVE.
func (m *testMaker) SetMPTCP(fd int, _ model.EndpointID, on bool) error {
	value := 0
	if on {
		value = 1
	}
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, value))
}

// agentConfig is what the tests' agents are made of: the settings of the server and of the
// handlers.
type agentConfig struct {
	SocketPath                             string
	Maker                                  SocketMaker
	AdmitCompares                          bool
	Resolve                                func(string, specs.ContainerProcessState) (model.EndpointID, error)
	EndpointIn                             func(uint64) (model.EndpointID, bool)
	NetnsOf                                func(model.EndpointID) (uint64, bool)
	Log                                    *slog.Logger
	Keeper                                 trap.Keeper
	StartKeeper                            func() error
	Resuming                               func(error)
	ListenElsewhere                        func(*os.File) error
	ReadyPerFamily, MaxReady, MaxListeners int
	others                                 []trap.Handler
	away                                   *atomic.Bool // socket() may continue while no agent runs
}

// testAgent answers trapped calls as the agent does.
type testAgent struct {
	*trap.Server
	cfg     agentConfig
	sockets *Handler
	ioctls  *ioctl.Handler
}

// agentStats are what the agent reports of the interception.
type agentStats struct {
	trap.Stats
	Ready                                                         int
	Answered, PoolHits, PoolMisses, Ioctls, Batches, BatchSockets uint64
}

func (a *testAgent) Stats() agentStats {
	s := a.sockets.Stats()
	misses := s.PoolMisses + a.Redelivered(a.sockets)
	return agentStats{
		Stats: a.Server.Stats(), Ready: s.Ready, Answered: s.PoolHits + misses, PoolHits: s.PoolHits, PoolMisses: misses,
		Ioctls: a.ioctls.Made(), Batches: s.Batches, BatchSockets: s.BatchSockets,
	}
}

// listen makes an agent.
func listen(c agentConfig) (a *testAgent, err error) {
	a = &testAgent{cfg: c}
	if a.sockets, err = New(Config{
		Maker: c.Maker, AdmitCompares: c.AdmitCompares, Log: c.Log, ListenElsewhere: c.ListenElsewhere,
		ReadyPerFamily: c.ReadyPerFamily, MaxReady: c.MaxReady,
	}); err != nil {
		return nil, err
	}
	if a.ioctls, err = ioctl.New(ioctl.Config{OtherNetns: a.sockets.BatchNetns}); err != nil {
		a.sockets.Close()
		return nil, err
	}
	a.Server = trap.New()
	for _, h := range append([]trap.Handler{a.ioctls, a.sockets}, c.others...) {
		a.Handle(h)
	}
	away := func(*trap.Listener, model.EndpointID) (int32, bool) { return unix.SYS_SOCKET, c.away.Load() }
	if err := a.Listen(trap.Config{
		Away:       away,
		SocketPath: c.SocketPath, Resolve: c.Resolve, EndpointIn: c.EndpointIn,
		NetnsOf: c.NetnsOf, Log: c.Log, Keeper: c.Keeper, StartKeeper: c.StartKeeper, Resuming: c.Resuming, MaxListeners: c.MaxListeners,
	}); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

func testConfig(socket, keeper string, m SocketMaker) agentConfig {
	c := agentConfig{SocketPath: socket, Maker: m, AdmitCompares: admitCompares, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Resolve: func(metadata string, _ specs.ContainerProcessState) (model.EndpointID, error) {
			if metadata != testName {
				return 0, fmt.Errorf("no endpoint %q", metadata)
			}
			return testEndpoint, nil
		},
		NetnsOf: func(model.EndpointID) (uint64, bool) { return testNetns, true }}
	c.away = new(atomic.Bool)
	c.away.Store(os.Getenv("HEDDLE_AWAY") != "")
	if keeper != "" {
		c.Keeper = fdkeep.NewClient(keeper)
	}
	return c
}

// serve runs a server until the test ends or stop is called.
func serve(t testing.TB, c agentConfig) (s *testAgent, stop func()) {
	t.Helper()
	s, err := listen(c)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(context.Background()) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		s.Close()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
	}
	t.Cleanup(stop)
	return s, stop
}

// child is a trapped program under test.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	fd  int // its listener, until handed over

	annotations map[string]string // of its container
}

// startChild starts a trapped program whose listener nobody reads yet. attr may be nil.
func startChild(t testing.TB, attr *syscall.SysProcAttr, env ...string) *child {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "child end")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, childEnv+"=trapped")...)
	cmd.Stderr, cmd.ExtraFiles, cmd.SysProcAttr = os.Stderr, []*os.File{theirs}, attr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	c := &child{t: t, cmd: cmd, in: in, out: bufio.NewReader(out), fd: -1}
	t.Cleanup(c.kill)
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	closeFD(pair[0])
	if err != nil {
		t.Fatal(err)
	}
	if fds, err := descriptors(oob[:n]); err == nil && len(fds) == 1 {
		c.fd = fds[0]
	}
	return c
}

func startChildPlain(t testing.TB) *child { return startChild(t, nil, "HEDDLE_NO_FILTER=1") }

// kill ends the child and reaps it.
func (c *child) kill() {
	if c.fd >= 0 {
		closeFD(c.fd)
		c.fd = -1
	}
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

// handOver does what a runtime does with the listener.
func (c *child) handOver(path, metadata string) {
	c.t.Helper()
	state := specs.ContainerProcessState{Version: specs.Version, Fds: []string{specs.SeccompFdName},
		Pid: c.cmd.Process.Pid, Metadata: metadata,
		State: specs.State{Version: specs.Version, ID: "ctr", Status: specs.StateCreating, Pid: c.cmd.Process.Pid, Bundle: "/b", Annotations: c.annotations}}
	msg, err := json.Marshal(state)
	if err != nil {
		c.t.Fatal(err)
	}
	sendHandoff(c.t, path, msg, c.fd)
	closeFD(c.fd)
	c.fd = -1
}

func sendHandoff(t testing.TB, path string, msg []byte, fds ...int) {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, _, err := conn.(*net.UnixConn).WriteMsgUnix(msg, unix.UnixRights(fds...), nil); err != nil {
		t.Fatal(err)
	}
}

// tell sends a command without waiting for the answer.
func (c *child) tell(cmd command) {
	c.t.Helper()
	b, err := json.Marshal(cmd)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.in.Write(append(b, '\n')); err != nil {
		c.t.Fatal(err)
	}
}

// hear reads an answer. It waits at most 60 s.
func (c *child) hear() (o outcome) {
	c.t.Helper()
	watchdog := time.AfterFunc(60*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer watchdog.Stop()
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		c.t.Fatalf("child gave no answer: %v", err)
	}
	if err := json.Unmarshal(line, &o); err != nil {
		c.t.Fatal(err)
	}
	return o
}

func (c *child) do(cmd command) outcome {
	c.t.Helper()
	c.tell(cmd)
	return c.hear()
}

func (c *child) socket(family, typ, proto int) outcome {
	c.t.Helper()
	return c.do(command{Op: "socket", Family: family, Type: typ, Proto: proto})
}

// tcp calls socket(family, SOCK_STREAM, 0).
func (c *child) tcp(family int) outcome { c.t.Helper(); return c.socket(family, unix.SOCK_STREAM, 0) }

// trapped starts a child and hands it to the server at path.
func trapped(t testing.TB, path, metadata string) *child {
	t.Helper()
	c := startChild(t, nil)
	c.handOver(path, metadata)
	return c
}

func socketPath(t testing.TB) string { return filepath.Join(t.TempDir(), "s") }

// eventually waits for what another goroutine or process brings about.
var eventually = testutil.EventuallyTrue

// descriptors takes the descriptors out of control messages.
func descriptors(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range msgs {
		more, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, err
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

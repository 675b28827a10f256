package clib_test

import (
	"bytes"
	"context"
	"errors"
	"net"

	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Messages between agent and router: docs/protocols/verbs-agent.md.
const (
	agentVersion  = 3
	agentHello    = 1
	agentBegin    = 2
	agentEnd      = 3
	agentEndpoint = 4
	agentConnect  = 6
	agentReply    = 7
	agentAccepted = 8
	agentStats    = 10
	// agentStatistics answers it.
	agentStatistics = 11
)

// What a STATISTICS has of ids of RDMA-CM.
const (
	statisticsOfIDs = 3
	recordsAt       = 32
	idStateAt       = 54
	idListens       = 4
)

// agent plays the agent of the node for heddle-rdma: it names endpoints, and connects any two of
// them over the host's loopback.
type agent struct {
	t       *testing.T
	control int
	router  *exec.Cmd
	said    bytes.Buffer
	numbers map[[16]byte]uint64 // of endpoints, by GID
	answers chan []byte         // each STATISTICS; closed when the router has ended
}

// startRDMA starts heddle-rdma, as `make build` made it, with one endpoint for each GID, and gives
// the folders of their control sockets.
func startRDMA(t *testing.T, gids ...[4]byte) (a *agent, dirs []string) {
	t.Helper()
	return startSpinning(t, 0, gids...)
}

// startSpinning is startRDMA, with endpoints whose programs look for work for so many microseconds.
func startSpinning(t *testing.T, micros uint32, gids ...[4]byte) (a *agent, dirs []string) {
	t.Helper()
	a = &agent{t: t, numbers: map[[16]byte]uint64{}, answers: make(chan []byte, 1)}
	socket := filepath.Join(t.TempDir(), "agent")
	a.router = exec.Command(filepath.Join(filepath.Dir(library(t)), "heddle-rdma"), "--agent", socket, "--sockets", filepath.Dir(filepath.Dir(socket)))
	a.router.Stdout, a.router.Stderr = &a.said, &a.said
	if err := a.router.Start(); err != nil {
		t.Fatalf("run `make build`: %v", err)
	}
	t.Cleanup(a.kill)
	a.control = connect(t, socket)
	// Before the socket is closed, whose number another file may get.
	t.Cleanup(a.kill)
	a.send(agentHello, 0, 0, []byte{agentVersion, 0, 0, 0, 0, 0, 0, 0}, -1)
	a.send(agentBegin, 0, 0, nil, -1)
	for i, gid := range gids {
		dir := t.TempDir()
		listener := listenPacket(t, filepath.Join(dir, "control"))
		body := make([]byte, 32+64+64)
		body[10], body[11] = 0xff, 0xff
		copy(body[12:], gid[:])
		order.PutUint32(body[32+40:], micros)
		copy(body[96:], "test")
		a.numbers[[16]byte(body)] = uint64(i + 1)
		a.send(agentEndpoint, 0, uint64(i+1), body, listener)
		unix.Close(listener)
		dirs = append(dirs, dir)
	}
	a.send(agentEnd, 0, 0, nil, -1)
	go a.serve()
	return a, dirs
}

// serve answers what the router asks until it ends.
func (a *agent) serve() {
	defer close(a.answers)
	message := make([]byte, 1<<15)
	for {
		n, err := unix.Read(a.control, message)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n < 16 {
			return
		}
		switch order.Uint32(message) {
		case agentConnect:
			a.connect(message[:n])
		case agentStatistics:
			a.answers <- bytes.Clone(message[:n])
		}
	}
}

// listens reports whether a program listens by RDMA-CM.
func (a *agent) listens() bool {
	a.t.Helper()
	a.send(agentStats, 0, 0, []byte{statisticsOfIDs, 0, 0, 0, 0, 0, 0, 0}, -1)
	answer, ok := <-a.answers
	if !ok {
		a.t.Fatal("the router has ended")
	}
	size := int(order.Uint32(answer[recordsAt-4:]))
	for record := range slices.Chunk(answer[recordsAt:], size) {
		if record[idStateAt] == idListens {
			return true
		}
	}
	return false
}

// connect gives the two ends of a connection to the endpoint that asks and to the one it asks for.
func (a *agent) connect(message []byte) {
	from, tag, gids := order.Uint64(message[8:]), order.Uint32(message[4:]), message[16:48]
	there, known := a.numbers[[16]byte(gids[16:])]
	if !known {
		a.send(agentReply, tag, from, []byte{byte(unix.EHOSTUNREACH), 0, 0, 0, 0, 0, 0, 0}, -1)
		return
	}
	ours, theirs, err := tcpPair()
	if err != nil {
		a.t.Errorf("connect endpoints: %v", err)
		return
	}
	a.send(agentReply, tag, from, make([]byte, 8), ours)
	a.send(agentAccepted, 0, there, gids, theirs)
	unix.Close(ours)
	unix.Close(theirs)
}

// tcpPair gives the ends of a connection over loopback.
func tcpPair() (client, server int, err error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, 0, err
	}
	defer listener.Close()
	dialed, err := net.Dial("tcp4", listener.Addr().String())
	if err != nil {
		return 0, 0, err
	}
	defer dialed.Close()
	accepted, err := listener.Accept()
	if err != nil {
		return 0, 0, err
	}
	defer accepted.Close()
	var ends [2]int
	for i, c := range []net.Conn{dialed, accepted} {
		file, err := c.(*net.TCPConn).File()
		if err != nil {
			return 0, 0, err
		}
		ends[i], err = unix.Dup(int(file.Fd()))
		file.Close()
		if err != nil {
			return 0, 0, err
		}
	}
	return ends[0], ends[1], nil
}

func (a *agent) kill() {
	if a.router.ProcessState == nil {
		a.router.Process.Kill()
		a.router.Wait()
	}
	if a.t.Failed() {
		a.t.Logf("heddle-rdma says:\n%s", &a.said)
	}
}

func (a *agent) send(kind, tag uint32, endpoint uint64, body []byte, fd int) {
	a.t.Helper()
	message := make([]byte, 16, 16+len(body))
	order.PutUint32(message, kind)
	order.PutUint32(message[4:], tag)
	order.PutUint64(message[8:], endpoint)
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := unix.Sendmsg(a.control, append(message, body...), rights, nil, unix.MSG_NOSIGNAL); err != nil {
		a.t.Errorf("tell the router: %v", err)
	}
}

func listenPacket(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	}
	if err == nil {
		err = unix.Listen(fd, 64)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// connect waits until somebody listens.
func connect(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		if err == nil {
			return fd
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("nobody listens at %s: %v", path, err)
		}
	}
}

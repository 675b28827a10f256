package clib_test

import (
	"bytes"
	"context"
	"errors"

	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Messages between agent and router: docs/protocols/verbs-agent.md.
const (
	agentHello    = 1
	agentBegin    = 2
	agentEnd      = 3
	agentEndpoint = 4
)

// agent plays the agent of the node for heddle-rdma: it names endpoints and no connections.
type agent struct {
	t       *testing.T
	control int
	router  *exec.Cmd
	said    bytes.Buffer
}

// startRDMA starts heddle-rdma, as `make build` made it, with one endpoint for each GID, and gives the folders of their control sockets.
func startRDMA(t *testing.T, gids ...[4]byte) (a *agent, dirs []string) {
	t.Helper()
	a = &agent{t: t}
	socket := filepath.Join(t.TempDir(), "agent")
	a.router = exec.Command(filepath.Join(filepath.Dir(library(t)), "heddle-rdma"), "--agent", socket)
	a.router.Stdout, a.router.Stderr = &a.said, &a.said
	if err := a.router.Start(); err != nil {
		t.Fatalf("run `make build`: %v", err)
	}
	t.Cleanup(a.kill)
	a.control = connect(t, socket)
	a.send(agentHello, 0, []byte{1, 0, 0, 0, 0, 0, 0, 0}, -1)
	a.send(agentBegin, 0, nil, -1)
	for i, gid := range gids {
		dir := t.TempDir()
		listener := listenPacket(t, filepath.Join(dir, "control"))
		body := make([]byte, 32+64+64)
		body[10], body[11] = 0xff, 0xff
		copy(body[12:], gid[:])
		copy(body[96:], "test")
		a.send(agentEndpoint, uint64(i+1), body, listener)
		unix.Close(listener)
		dirs = append(dirs, dir)
	}
	a.send(agentEnd, 0, nil, -1)
	return a, dirs
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

func (a *agent) send(kind uint32, endpoint uint64, body []byte, fd int) {
	a.t.Helper()
	message := make([]byte, 16, 16+len(body))
	order.PutUint32(message, kind)
	order.PutUint64(message[8:], endpoint)
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := unix.Sendmsg(a.control, append(message, body...), rights, nil, unix.MSG_NOSIGNAL); err != nil {
		a.t.Fatalf("tell the router: %v\n%s", err, &a.said)
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

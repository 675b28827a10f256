package clib_test

import (
	"bufio"
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// compileAPI makes testdata/api.c and changes.c, linked with Debian's library.
func compileAPI(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "api")
	out, err := exec.Command("cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o", program, "testdata/api.c", "testdata/changes.c", "-libverbs").CombinedOutput()
	if err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	return program
}

// TestAPI: what Debian's programs do not try.
func TestAPI(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	p := newPlace(t, dirs[0])
	program := compileAPI(t)
	for _, part := range []string{"operations", "refusals", "events", "threads", "resize", "reregister", "groups", "naps", "shared", "scarce", "sleeping"} {
		t.Run(part, func(t *testing.T) {
			if out, err := p.command(program, part).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestSpins: programs of a container look for work for as long as its setting says.
func TestSpins(t *testing.T) {
	_, dirs := startSpinning(t, 1_000_000, [4]byte{10, 9, 0, 1})
	if out, err := newPlace(t, dirs[0]).command(compileAPI(t), "spins").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRouterEnds: a program whose router ends, or writes an index into a ring that cannot be, sees
// flushed requests and an event, and can clean up.
func TestRouterEnds(t *testing.T) {
	program := compileAPI(t)
	for part, end := range map[string]func(r *router){
		"end": (*router).end,
		"broken": func(r *router) {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, memory := range r.cqs {
				atomic.StoreUint32(word(memory, 128+produced), uint32(len(memory)))
			}
		},
	} {
		t.Run(part, func(t *testing.T) {
			r := startRouter(t, nil)
			p := newPlace(t, r.dir)
			cmd := p.command(program, part)
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(stdout)
			if !lines.Scan() || lines.Text() != "posted" {
				t.Errorf("it says %q", lines.Text())
			}
			end(r)
			stdin.Close()
			for lines.Scan() {
				t.Error(lines.Text())
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

// change makes another reply of the right one.
type change func(reply []byte, fds []int) ([]byte, []int)

// number puts a number into the reply.
func number(offset int, n uint32) change {
	return func(reply []byte, fds []int) ([]byte, []int) {
		out := bytes.Clone(reply)
		order.PutUint32(out[offset:], n)
		return out, fds
	}
}

// length cuts the reply, or makes it longer.
func length(n int) change {
	return func(reply []byte, fds []int) ([]byte, []int) {
		return append(bytes.Clone(reply), make([]byte, n)...)[:n], fds
	}
}

func refusal(errno unix.Errno) change {
	return func(reply []byte, _ []int) ([]byte, []int) { return refuse(reply, errno), nil }
}

func unsealed(reply []byte, fds []int) ([]byte, []int) {
	fd, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, 4096)
	}
	if err != nil {
		panic(err)
	}
	return reply, append([]int{fd}, fds[min(1, len(fds)):]...)
}

func null(reply []byte, _ []int) ([]byte, []int) {
	fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	return reply, []int{fd}
}

// TestHostileRouter: whatever the router answers, a program gets an errno and ends.
func TestHostileRouter(t *testing.T) {
	program := compileAPI(t)
	for name, c := range map[string]struct {
		command uint32
		change  change
		want    string
	}{
		"as it should be":       {0, nil, "all: errno 0"},
		"refuses the version":   {hello, refusal(unix.EPROTONOSUPPORT), "nothing: errno 93"},
		"quota":                 {createCQ, refusal(unix.ENOMEM), "channel: errno 12"},
		"another version":       {hello, number(16, 2), "nothing: errno 71"},
		"no descriptor":         {hello, func(q []byte, _ []int) ([]byte, []int) { return q, nil }, "nothing: errno 5"},
		"too many descriptors":  {allocPD, unsealed, "context: errno 5"},
		"unsealed":              {hello, unsealed, "nothing: errno 71"},
		"no memory at all":      {createCQ, null, "channel: errno 71"},
		"another size":          {createCQ, number(24, 1<<20), "channel: errno 71"},
		"another capacity":      {createCQ, number(20, 8), "channel: errno 71"},
		"receive ring outside":  {createQP, number(28, 1<<30), "CQ: errno 71"},
		"another tag":           {createQP, number(4, 99), "CQ: errno 5"},
		"another command":       {createQP, number(0, 99), "CQ: errno 5"},
		"an errno below 0":      {createQP, number(8, 0xffffffff), "CQ: errno 5"},
		"too short":             {createQP, length(20), "CQ: errno 5"},
		"shorter than a head":   {createQP, length(3), "CQ: errno 5"},
		"too long":              {createQP, length(68), "CQ: errno 5"},
		"nothing for 10 s":      {createQP, func([]byte, []int) ([]byte, []int) { return nil, nil }, "CQ: errno 5"},
		"an error and a socket": {createQP, func(q []byte, fds []int) ([]byte, []int) { return refuse(q, unix.EMFILE), fds }, "CQ: errno 5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRouter(t, func(command uint32, reply []byte, fds []int) ([]byte, []int, bool) {
				if command != c.command {
					return nil, nil, false
				}
				other, otherFDs := c.change(reply, fds)
				return other, otherFDs, true
			})
			p := newPlace(t, r.dir)
			if out, err := p.command(program, "make").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != c.want {
				t.Errorf("it says %q, %v; want %q", out, err, c.want)
			}
		})
	}
}

// TestNoRouter: without a socket there is no RDMA, without a router no device.
func TestNoRouter(t *testing.T) {
	program := compileAPI(t)
	r := startRouter(t, nil)
	r.end()
	p := newPlace(t, r.dir)
	if out, err := p.command("ibv_devices").CombinedOutput(); err != nil || strings.Contains(string(out), "heddle0") {
		t.Errorf("without a router: %v\n%s", err, out)
	}
	p = newPlace(t, t.TempDir())
	if out, err := p.command(program, "make").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "nothing: errno 38" {
		t.Errorf("without a socket: %v\n%s", err, out)
	}
}

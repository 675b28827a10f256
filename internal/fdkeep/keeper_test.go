package fdkeep

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// keeperEnv makes the test binary a keeper on the socket it names.
const keeperEnv = "HEDDLE_FD_KEEPER"

func TestMain(m *testing.M) {
	if path := os.Getenv(keeperEnv); path != "" {
		if err := Run(context.Background(), path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// run runs a keeper until the test ends or stop is called.
func run(t *testing.T) (c *Client, stop func()) {
	t.Helper()
	return runAt(t, filepath.Join(t.TempDir(), "h"))
}

func runAt(t *testing.T, path string) (c *Client, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, path) }()
	c = NewClient(path)
	testutil.EventuallyTrue(t, "keeper answers", func() bool { return c.answers() == nil })
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return c, stop
}

// pipe stands for a listener: its read end hangs up, as a listener does, once the write end is
// closed.
func pipe(t *testing.T) (read int, hangUp func()) {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	open := true
	hangUp = func() {
		if open {
			open = false
			closeAll(p[1:])
		}
	}
	t.Cleanup(func() { hangUp(); closeAll(p[:1]) })
	return p[0], hangUp
}

func page(t *testing.T, content string) int {
	t.Helper()
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	if err == nil {
		_, err = unix.Pwrite(fd, []byte(content), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll([]int{fd}) })
	return fd
}

func takeAll(t *testing.T, c *Client) map[string]Kept {
	t.Helper()
	all, err := c.TakeAll()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]Kept{}
	for _, p := range all {
		t.Cleanup(func() { closeAll([]int{p.FD, p.Page}) })
		m[p.Key] = p
	}
	return m
}

func TestPutTakeDrop(t *testing.T) {
	c, _ := run(t)
	fd, _ := pipe(t)
	for i := range 3 {
		key := "k" + strconv.Itoa(i)
		if err := c.Put(key, []byte("meta "+key), fd, page(t, key)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Put("k1", []byte("again"), fd, page(t, "new")); err != nil {
		t.Fatal(err)
	}
	if err := c.Drop("k2"); err != nil {
		t.Fatal(err)
	}
	if err := c.Drop("never"); err != nil {
		t.Errorf("drop of a key that holds nothing: %v", err)
	}
	for round := range 2 { // the keeper keeps what it gave
		all := takeAll(t, c)
		if len(all) != 2 || string(all["k0"].Meta) != "meta k0" || string(all["k1"].Meta) != "again" {
			t.Fatalf("round %d: %+v", round, all)
		}
		b := make([]byte, 3)
		if _, err := unix.Pread(all["k1"].Page, b, 0); err != nil || !bytes.Equal(b, []byte("new")) {
			t.Errorf("page of k1: %q %v", b, err)
		}
	}
	some, err := c.Take("k1")
	for _, p := range some {
		closeAll([]int{p.FD, p.Page})
	}
	if err != nil || len(some) != 1 || some[0].Key != "k1" {
		t.Errorf("taken of k1: %+v, %v", some, err)
	}
}

func TestHungUpListenersAreDropped(t *testing.T) {
	c, _ := run(t)
	stays, _ := pipe(t)
	goes, hangUp := pipe(t)
	before := openFiles(t)
	for key, fd := range map[string]int{"stays": stays, "goes": goes} {
		if err := c.Put(key, nil, fd, page(t, "")); err != nil {
			t.Fatal(err)
		}
	}
	hangUp()
	testutil.EventuallyTrue(t, "dropped", func() bool {
		all, err := c.TakeAll()
		for _, p := range all {
			closeAll([]int{p.FD, p.Page})
		}
		return err == nil && len(all) == 1 && all[0].Key == "stays"
	})
	if err := c.Drop("stays"); err != nil {
		t.Fatal(err)
	}
	testutil.EventuallyTrue(t, "its descriptors are closed", func() bool { return openFiles(t) <= before+1 }) // +2 pages, -1 pipe end
}

func openFiles(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// listFiles says what is open, for a test that counted too many.
func listFiles() string {
	var all strings.Builder
	names, _ := filepath.Glob("/proc/self/fd/*")
	for _, name := range names {
		if file, err := os.Readlink(name); err == nil {
			fmt.Fprintln(&all, path.Base(name), file)
		}
	}
	return all.String()
}

func TestOneKeeperAPath(t *testing.T) {
	c, stop := run(t)
	if err := Run(context.Background(), c.path); err == nil || !strings.Contains(err.Error(), "another fd keeper") {
		t.Errorf("second keeper: %v", err)
	}
	if st, err := os.Stat(c.path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v %v, want mode 0600", st.Mode(), err)
	}
	stop()
	if _, err := c.TakeAll(); err == nil {
		t.Error("a stopped keeper answers")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Run(ctx, c.path); err != nil {
		t.Errorf("after the first has stopped: %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	c, _ := run(t)
	fd, _ := pipe(t)
	if err := c.Put("", nil, fd, fd); err == nil {
		t.Error("empty key accepted")
	}
	if err := c.Put("k", make([]byte, MaxMetaBytes+1), fd, fd); err == nil {
		t.Error("long metadata accepted")
	}
	if err := c.Put("k", make([]byte, MaxMetaBytes), fd, page(t, "")); err != nil {
		t.Errorf("metadata of the greatest length: %v", err)
	}
	for _, msg := range []string{"", "{", `{"op":"dance"}`, `{"op":"put","key":"x"}`, strings.Repeat("x", maxMessageBytes+1)} {
		conn, err := net.Dial("unixpacket", c.path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(msg)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1024)
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		n, _ := conn.Read(b)
		if msg != "" && !strings.Contains(string(b[:n]), `"error":`) {
			t.Errorf("%.30q: answer %q", msg, b[:n])
		}
		conn.Close()
	}
	if len(takeAll(t, c)) != 1 {
		t.Error("the keeper did not survive bad requests")
	}
}

// A keeper whose socket, lock and directory were removed is found again, with what it holds.
func TestRemovedSocketComesBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c, _ := runAt(t, filepath.Join(dir, "h"))
	fd, _ := pipe(t)
	if err := c.Put("k", nil, fd, page(t, "")); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	started := exec.Command("/bin/false")
	if err := ensure(started, c.path, func() bool { return true }); err != nil || started.Process != nil {
		t.Fatalf("ensure: %v, process %v", err, started.Process)
	}
	if all := takeAll(t, c); len(all) != 1 {
		t.Errorf("after its socket was removed: %v", all)
	}
	if err := Run(context.Background(), c.path); !errors.Is(err, errOtherKeeper) {
		t.Errorf("second keeper: %v", err)
	}
}

// A keeper that finds another at its path, because its socket was removed, gives it everything and
// ends.
func TestKeeperGivesWay(t *testing.T) {
	first, _ := run(t)
	fd, _ := pipe(t)
	if err := first.Put("k", []byte("m"), fd, page(t, "")); err != nil {
		t.Fatal(err)
	}
	testutil.EventuallyTrue(t, "second keeper takes the path", func() bool {
		for _, p := range []string{first.path, first.path + ".lock"} {
			if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
		d, err := open(first.path) // fails if the first one was quicker
		if err != nil {
			return false
		}
		d.close()
		runAt(t, first.path)
		return true
	})
	testutil.EventuallyTrue(t, "second has it", func() bool { m := takeAll(t, first); return string(m["k"].Meta) == "m" })
}

func TestWatch(t *testing.T) {
	c, stop := run(t)
	accepted := regexp.MustCompile(` 03 +[0-9]+ ` + regexp.QuoteMeta(c.path) + "\n") // 3: SS_CONNECTED
	connections := func(n int) func() (bool, string) {
		return func() (bool, string) {
			sockets, err := os.ReadFile("/proc/net/unix")
			testutil.NoError(t, err)
			return len(accepted.FindAll(sockets, -1)) == n, string(sockets)
		}
	}
	testutil.Eventually(t, "the keeper to close what it was asked by", connections(0))
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(context.Background()) }()
	testutil.Eventually(t, "the keeper to accept the watch", connections(1))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Watch(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("watch that was cancelled: %v", err)
	}
	select {
	case err := <-ended:
		t.Fatalf("watch of a living keeper ended: %v", err)
	default:
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("watch of a keeper that ended: %v", err)
	}
	if err := c.Watch(context.Background()); err == nil {
		t.Error("no keeper: no error")
	}
}

func TestEnsureStartsAndStopEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "h")
	cmd := func() *exec.Cmd {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), keeperEnv+"="+path)
		return c
	}
	first := cmd()
	if err := ensure(first, path, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Process.Kill() })
	if sid, err := unix.Getsid(first.Process.Pid); err != nil || sid != first.Process.Pid {
		t.Errorf("session %d of keeper %d: %v", sid, first.Process.Pid, err)
	}
	second := cmd()
	if err := ensure(second, path, nil); err != nil || second.Process != nil {
		t.Errorf("second start: %v, process %v", err, second.Process)
	}
	c := NewClient(path)
	fd, hangUp := pipe(t)
	if err := c.Put("k", nil, fd, page(t, "")); err != nil {
		t.Fatal(err)
	}
	hangUp()
	testutil.EventuallyTrue(t, "dropped", func() bool { return len(takeAll(t, c)) == 0 })
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	testutil.EventuallyTrue(t, "ended", func() bool { return errors.Is(unix.Kill(first.Process.Pid, 0), unix.ESRCH) })
	if err := Ensure("/bin/false", path, nil); err == nil || !strings.Contains(err.Error(), "/bin/false park --socket") {
		t.Errorf("a program that ends at once: %v", err)
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"op":"put","key":"k","meta":"aGk="}`), 2)
	f.Add([]byte(`{"op":"take"}`), 0)
	f.Add([]byte(`{"op":"drop","key":""}`), 0)
	f.Fuzz(func(t *testing.T, msg []byte, fds int) {
		r, err := parseRequest(msg, fds)
		if err == nil && (r.Op == opPut) != (fds == fdsPerEntry) {
			t.Errorf("accepted %q with %d descriptors", msg, fds)
		}
	})
}

// connected gives the ends of a connection.
func connected(t *testing.T) (ours, theirs *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err := net.Dial("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.UnixConn), b.(*net.UnixConn)
}

// Each message of a transfer has its time, at both ends.
func TestLongTransfer(t *testing.T) {
	before := exchangeTimeout
	exchangeTimeout = 400 * time.Millisecond
	t.Cleanup(func() { exchangeTimeout = before })
	const entries, pause = 4, 250 * time.Millisecond
	fd, _ := pipe(t)
	fds := []int{fd, page(t, "")}

	t.Run("client", func(t *testing.T) {
		ours, theirs := connected(t)
		go func() {
			defer theirs.Close()
			_, _, _ = receive(theirs)
			for i := range entries {
				time.Sleep(pause)
				_ = send(theirs, reply{Key: strconv.Itoa(i)}, fds...)
			}
			_ = send(theirs, reply{Last: true})
		}()
		_ = ours.SetDeadline(time.Now().Add(exchangeTimeout)) // as dial
		all, err := exchange(ours, request{Op: opTake})
		if err != nil || len(all) != entries {
			t.Errorf("%d entries, %v", len(all), err)
		}
		for _, p := range all {
			closeAll([]int{p.FD, p.Page})
		}
	})
	t.Run("keeper", func(t *testing.T) {
		c, _ := run(t)
		// More than the socket's buffer holds, so that the keeper waits for who reads.
		const many = 100
		for i := range many {
			if err := c.Put(strconv.Itoa(i), bytes.Repeat([]byte{'m'}, MaxMetaBytes), fds[0], fds[1]); err != nil {
				t.Fatal(err)
			}
		}
		conn, err := c.dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := send(conn, request{Op: opTake, Look: true}); err != nil {
			t.Fatal(err)
		}
		got := 0
		for ; ; got++ {
			if got < 60 {
				time.Sleep(20 * time.Millisecond)
			}
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			msg, in, err := receive(conn)
			closeAll(in)
			if err != nil || bytes.Contains(msg, []byte(`"last":true`)) {
				break
			}
		}
		if got != many {
			t.Errorf("%d entries, want %d", got, many)
		}
	})
}

// A transfer has a time for all of it, too.
func TestEndlessTransfer(t *testing.T) {
	before := takeTimeout
	takeTimeout = 300 * time.Millisecond
	t.Cleanup(func() { takeTimeout = before })
	ours, theirs := connected(t)
	fd, _ := pipe(t)
	fds := []int{fd, page(t, "")}
	go func() {
		_, _, _ = receive(theirs)
		for i := 0; send(theirs, reply{Key: strconv.Itoa(i)}, fds...) == nil && i < 100; i++ {
			time.Sleep(50 * time.Millisecond)
		}
		theirs.Close()
	}()
	began := time.Now()
	all, err := exchange(ours, request{Op: opTake})
	if took := time.Since(began); !errors.Is(err, os.ErrDeadlineExceeded) || len(all) > 0 || took > 3*time.Second {
		t.Errorf("%d entries, %v after %v", len(all), err, took)
	}
}

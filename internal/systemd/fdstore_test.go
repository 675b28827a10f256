package systemd

import (
	"maps"
	"net"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPassed(t *testing.T) {
	for _, c := range []struct {
		pid, fds, names string
		want            map[string]int
	}{
		{"7", "2", "a:b-c", map[string]int{"a": 3, "b-c": 4}},
		{"8", "1", "a", map[string]int{}}, // for another process
		{"7", "x", "a", map[string]int{}},
		{"7", "2", "a", map[string]int{"a": 3}},
		{"7", "0", "", map[string]int{}},
	} {
		env := map[string]string{"LISTEN_PID": c.pid, "LISTEN_FDS": c.fds, "LISTEN_FDNAMES": c.names}
		if got := passed(7, func(n string) string { return env[n] }); !maps.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", env, got, c.want)
		}
	}
}

func TestFDStore(t *testing.T) {
	t.Setenv(EnvSocket, "")
	if OpenFDStore() != nil {
		t.Error("a store without a service manager")
	}
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv(EnvSocket, path)
	s := OpenFDStore()
	for _, c := range []struct {
		send func() error
		want string
		fds  int
	}{
		{func() error { return s.Store("a", 0) }, "FDSTORE=1\nFDNAME=a", 1},
		{func() error { return s.Remove("a") }, "FDSTOREREMOVE=1\nFDNAME=a", 0},
	} {
		if err := c.send(); err != nil {
			t.Fatal(err)
		}
		text, control := make([]byte, 200), make([]byte, 200)
		n, cn, _, _, err := conn.ReadMsgUnix(text, control)
		if err != nil || string(text[:n]) != c.want {
			t.Errorf("%q, %v, want %q", text[:n], err, c.want)
		}
		got := 0
		messages, err := unix.ParseSocketControlMessage(control[:cn])
		for _, m := range messages {
			fds, rerr := unix.ParseUnixRights(&m)
			if rerr != nil {
				t.Error(rerr)
			}
			for _, fd := range fds {
				got++
				_ = unix.Close(fd)
			}
		}
		if err != nil || got != c.fds {
			t.Errorf("%q: %d descriptors, %v, want %d", c.want, got, err, c.fds)
		}
	}
}

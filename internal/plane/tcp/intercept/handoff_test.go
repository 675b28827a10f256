package intercept

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const goodState = `{"ociVersion":"1.2.0","fds":["seccompFd"],"pid":7,"metadata":"n1/c1",` +
	`"state":{"ociVersion":"1.2.0","id":"ctr","status":"creating","bundle":"/b"}}`

// Limits of package trap.
const maxHandoffFDs, maxHandoffBytes = 16, 1 << 20

// Whatever comes, the connection is closed, the descriptors are closed, and the server goes on.
func TestBadHandoffs(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	many := make([]int, maxHandoffFDs+4)
	for i := range many {
		many[i] = int(null.Fd())
	}
	fds := count(t, "/proc/self/fd")
	n := uint64(0)
	for what, h := range map[string]struct {
		msg string
		fds []int
	}{
		"not JSON":         {"hello }", many[:1]},
		"no descriptor":    {goodState, nil},
		"not a listener":   {goodState, many[:1]},
		"many descriptors": {goodState, many},
		"cut short":        {goodState[:20], many[:1]},
		"endless":          {`{"ociVersion":"` + strings.Repeat("x", maxHandoffBytes+100), many[:1]},
		"two, one unnamed": {goodState, many[:2]},
		"nothing but a fd": {" ", many[:1]},
		"nothing said":     {"", nil}, // heddle-runtime asks so
	} {
		if what != "nothing said" {
			n++
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		u := c.(*net.UnixConn)
		_ = u.SetDeadline(time.Now().Add(10 * time.Second))
		if h.msg != "" {
			var oob []byte
			if h.fds != nil {
				oob = unix.UnixRights(h.fds...)
			}
			_, _, _ = u.WriteMsgUnix([]byte(h.msg[:min(len(h.msg), 1000)]), oob, nil)
			_, _ = u.Write([]byte(h.msg[min(len(h.msg), 1000):])) // the server may have hung up already
		}
		_ = u.CloseWrite()
		if _, err := u.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Errorf("%s: connection not closed: %v", what, err)
		}
		c.Close()
		eventually(t, what+": counted", func() bool { return s.Stats().Failed["handoff"] == n })
	}
	eventually(t, "descriptors are closed", func() bool { return count(t, "/proc/self/fd") <= fds })
	if o := trapped(t, path, testName).tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("afterwards: %v", unix.Errno(o.Errno))
	}
}

// A hand-off in pieces on a connection that stays open is as good as any.
func TestHandoffInPieces(t *testing.T) {
	path := socketPath(t)
	serve(t, testConfig(path, "", &testMaker{}))
	c := startChild(t, nil)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cut := strings.LastIndex(goodState, "}") // the first part ends in a brace but is not whole
	if _, _, err := conn.(*net.UnixConn).WriteMsgUnix([]byte(goodState[:cut]), unix.UnixRights(c.fd), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte(goodState[cut:] + "\n")); err != nil {
		t.Fatal(err)
	}
	closeFD(c.fd)
	c.fd = -1
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Error(unix.Errno(o.Errno))
	}
}

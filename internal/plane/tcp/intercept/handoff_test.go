package intercept

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const goodState = `{"ociVersion":"1.2.0","fds":["seccompFd"],"pid":7,"metadata":"n1/c1",` +
	`"state":{"ociVersion":"1.2.0","id":"ctr","status":"creating","bundle":"/b"}}`

func TestParseState(t *testing.T) {
	st, i, err := parseState([]byte(goodState), 1)
	if err != nil || i != 0 || st.Metadata != "n1/c1" || st.State.ID != "ctr" || st.Pid != 7 {
		t.Fatalf("%+v %d %v", st, i, err)
	}
	two := strings.Replace(goodState, `["seccompFd"]`, `["pidFd","seccompFd"]`, 1)
	if _, i, err := parseState([]byte(two), 2); err != nil || i != 1 {
		t.Errorf("second descriptor: %d %v", i, err)
	}
	if _, _, err := parseState([]byte(strings.Replace(goodState, `"pid"`, `"later":{},"pid"`, 1)), 1); err != nil {
		t.Errorf("a field of a later specification: %v", err)
	}
	bad := map[string]struct {
		old, new string
		fds      int
	}{
		"ociVersion": {`{"ociVersion":"1.2.0",`, `{`, 1},
		"pid":        {`"pid":7`, `"pid":0`, 1},
		"cannot":     {`"pid":7`, `"pid":"7"`, 1},
		"state.id":   {`"id":"ctr",`, ``, 1},
		"metadata":   {`n1/c1`, strings.Repeat("m", maxMetadataBytes+1), 1},
		"2 came":     {``, ``, 2},
		"0 came":     {``, ``, 0},
		"twice":      {`["seccompFd"]`, `["seccompFd","seccompFd"]`, 2},
		"lacks":      {`["seccompFd"]`, `["pidFd"]`, 1},
		"after":      {`"bundle":"/b"}}`, `"bundle":"/b"}}{}`, 1},
		"unexpected": {`"bundle":"/b"}}`, `"bundle":"/b"}`, 1},
	}
	for what, b := range bad {
		_, _, err := parseState([]byte(strings.Replace(goodState, b.old, b.new, 1)), b.fds)
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: error %v", what, err)
		}
	}
}

func FuzzParseState(f *testing.F) {
	f.Add([]byte(goodState), 1)
	f.Add([]byte(`{"fds":["seccompFd","seccompFd"]}`), 2)
	f.Add([]byte(`[]`), 0)
	f.Add([]byte(``), 0)
	f.Fuzz(func(t *testing.T, msg []byte, fds int) {
		st, i, err := parseState(msg, fds)
		if err == nil && (i < 0 || i >= fds || st.Fds[i] != specs.SeccompFdName || st.Pid <= 0 || st.State.ID == "") {
			t.Errorf("accepted %q with %d descriptors: index %d of %v", msg, fds, i, st.Fds)
		}
	})
}

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
		"nothing said":     {"", nil}, // heddle-runtime's guard
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

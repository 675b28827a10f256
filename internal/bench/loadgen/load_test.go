package loadgen

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// memcached is just enough of a server for the load: it forgets nothing and answers in small
// pieces.
func memcached(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in, stored := bufio.NewReader(c), map[string]bool{}
				for {
					line, err := in.ReadString('\n')
					f := strings.Fields(line)
					if err != nil || len(f) < 2 {
						return
					}
					answer := "END\r\n"
					switch {
					case f[0] == "set":
						n, _ := strconv.Atoi(f[4])
						if _, err := io.CopyN(io.Discard, in, int64(n+2)); err != nil {
							return
						}
						stored[f[1]] = true
						answer = "STORED\r\n"
					case stored[f[1]]:
						answer = "VALUE " + f[1] + " 0 5\r\nhello\r\nEND\r\n"
					}
					for _, half := range []string{answer[:3], answer[3:]} {
						if _, err := io.WriteString(c, half); err != nil {
							return
						}
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// runLoad runs a load and reads what it printed behind the line that says that it has measured.
func runLoad(t *testing.T, args ...string) Load {
	t.Helper()
	var out bytes.Buffer
	if err := Main(t.Context(), args, Streams{In: strings.NewReader(""), Out: &out, Err: t.Output()}); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	mark, rest, _ := strings.Cut(out.String(), "\n")
	var l Load
	if err := json.Unmarshal([]byte(rest), &l); err != nil || mark != Measured {
		t.Fatalf("%v printed %q: %v", args, &out, err)
	}
	return l
}

func TestMemcacheLoad(t *testing.T) {
	l := runLoad(t, "memcache", "-to", memcached(t), "-threads", "2", "-connections", "5", "-warm-up", "50ms", "-duration", "300ms")
	sets, gets := l.Latency[KindSet].Count(), l.Latency[KindGet].Count()
	if sets == 0 || int(sets+gets) != l.Operations || l.Unfinished != 0 {
		t.Fatalf("%d SETs and %d GETs of %d operations, %d unfinished", sets, gets, l.Operations, l.Unfinished)
	}
	// Every connection is somewhere in its pattern of eleven at either end.
	if off := int(gets) - memcacheGets*int(sets); off > 2*5*memcacheGets || off < -2*5*memcacheGets {
		t.Errorf("%d SETs and %d GETs: want 1 to %d", sets, gets, memcacheGets)
	}
}

// TestHTTPLoadAtARate checks the schedule, and that a server that stalls is charged with what was
// due meanwhile.
func TestHTTPLoadAtARate(t *testing.T) {
	const stall = 300 * time.Millisecond
	body, asked := strings.Repeat("x", 300<<10), 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked++; asked == 20 { // one connection: no two at once
			time.Sleep(stall)
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		if asked == 21 { // a busy machine does not come to many more in time
			w.Header().Set("Connection", "close")
		}
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	l := runLoad(t, "http", "-to", s.Listener.Addr().String(), "-connections", "1", "-rate", "100", "-duration", "1s")
	if l.Operations < 1 || l.Operations+l.Unfinished < 99 || l.Operations+l.Unfinished > 101 {
		t.Fatalf("%d operations and %d unfinished: want 100 in all", l.Operations, l.Unfinished)
	}
	if l.Connections != 2 {
		t.Errorf("%d connections: want a second one after the server closed the first", l.Connections)
	}
	// 30 were due while it stalled, so a quarter of all waited more than a few milliseconds;
	// without the correction one did.
	if got := l.Latency[KindRequest].Quantile(0.9); got < stall/10 {
		t.Errorf("p90 %s: the requests due during a stall of %s are left out", got, stall)
	}
}

func TestLoadReportsErrors(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(s.Close)
	address := s.Listener.Addr().String()
	for want, args := range map[string][]string{
		"404":       {"http", "-to", address, "-connections", "1"},
		"--to":      {"http", "-to", "nowhere"},
		"--threads": {"memcache", "-to", address, "-threads", "3", "-connections", "2"},
		"--rate":    {"memcache", "-to", address, "-connections", "2", "-rate", "-1"},
		"connect":   {"memcache", "-to", freePort(t, "tcp", "127.0.0.1:0"), "-connections", "2"},
	} {
		err := Main(t.Context(), args, Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want something about %s", args, err, want)
		}
	}
}

// answers of servers, whole, and how they end.
func TestReadersTakeAnyPieces(t *testing.T) {
	header := "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-length: 5\r\n\r\n"
	for _, tt := range []struct {
		answer string
		reader func() interface{ feed([]byte) (bool, error) }
	}{
		{"STORED\r\n", func() interface{ feed([]byte) (bool, error) } { return &memcacheReader{set: true} }},
		{"END\r\n", func() interface{ feed([]byte) (bool, error) } { return &memcacheReader{} }},
		{"VALUE k 0 7\r\nEND\r\nxx\r\nEND\r\n", func() interface{ feed([]byte) (bool, error) } { return &memcacheReader{} }},
		{header + "hello", func() interface{ feed([]byte) (bool, error) } { return &httpReader{} }},
	} {
		for cut := range len(tt.answer) {
			r := tt.reader()
			if done, err := r.feed([]byte(tt.answer[:cut])); done || err != nil {
				t.Fatalf("%q: ended after %d bytes, %v", tt.answer, cut, err)
			}
			if done, err := r.feed([]byte(tt.answer[cut:])); !done || err != nil {
				t.Errorf("%q cut at %d: not ended, %v", tt.answer, cut, err)
			}
		}
		if _, err := tt.reader().feed([]byte(tt.answer + "x")); err == nil {
			t.Errorf("%q: more than it was taken", tt.answer)
		}
	}
	for _, bad := range []string{"ERROR\r\n", "VALUE k 0 x\r\n", "VALUE k 0 -1\r\n", "VALUE k 0 1\r\na\r\nVALUE k 0 1\r\n", strings.Repeat("x", maxLine+1)} {
		if _, err := (&memcacheReader{}).feed([]byte(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
	for _, bad := range []string{"HTTP/1.1 500 No\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", strings.Repeat("x", maxHeader)} {
		if _, err := (&httpReader{}).feed([]byte(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// FuzzReaders checks that answers cut in two mean the same as whole ones.
func FuzzReaders(f *testing.F) {
	f.Add([]byte("VALUE k 0 7\r\nEND\r\nxx\r\nEND\r\n"), 9, byte(0))
	f.Add([]byte("STORED\r\n"), 3, byte(1))
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), 30, byte(2))
	f.Fuzz(func(t *testing.T, b []byte, cut int, kind byte) {
		if len(b) == 0 || cut < 0 {
			return
		}
		read := func(pieces ...[]byte) string {
			var r interface{ feed([]byte) (bool, error) }
			switch kind % 3 {
			case 0:
				r = &memcacheReader{}
			case 1:
				r = &memcacheReader{set: true}
			default:
				r = &httpReader{}
			}
			done := false
			for _, p := range pieces {
				if len(p) == 0 {
					continue
				}
				var err error
				if done, err = r.feed(p); err != nil {
					return "error"
				}
			}
			return fmt.Sprint(done)
		}
		cut %= len(b)
		if whole, parts := read(b), read(b[:cut], b[cut:]); whole != parts {
			t.Errorf("%q: whole %s, cut at %d %s", b, whole, cut, parts)
		}
	})
}

// TestGuardSaysWhenItsServerListens: the guarded program listens late, and what the guard says must
// not come before.
func TestGuardSaysWhenItsServerListens(t *testing.T) {
	// The port is this test's from the beginning, and nobody else's, because it is bound; connects
	// are refused until it listens.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
	guard := startMain(t, "guard", "-until", address, "--", "sh", "-c", "sleep 0.2; echo late; exec sleep 60")
	if line := guard.line(); line != "late" {
		t.Fatalf("%q before anybody listens", line)
	}
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	guard.awaitReady()
	guard.stop()
}

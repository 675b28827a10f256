package intercept

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/trap"
)

// awayFrom gives a program whose agent has ended, by end, and with it a keeper and the agent's
// socket.
func awayFrom(t *testing.T, end func(t *testing.T, hp, path string, begin func())) (c *child, hp, path string) {
	t.Helper()
	hp, path = keeper(t), socketPath(t)
	end(t, hp, path, func() {
		c = trapped(t, path, testName)
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Fatalf("with an agent: %+v", o)
		}
	})
	return c, hp, path
}

func closes(t *testing.T, hp, path string, begin func()) {
	t.Helper()
	cfg := testConfig(path, hp, &testMaker{})
	cfg.away.Store(true)
	_, stop := serve(t, cfg)
	begin()
	stop()
}

func isKilled(t *testing.T, hp, path string, begin func()) {
	t.Helper()
	a, _ := agent(t, path, hp, "HEDDLE_AWAY=1")
	begin()
	killAgent(a)
}

// While no agent runs, socket() is the container's own stack's, and counted by the next agent.
// Other calls wait for that, and keep socket() from nothing.
func TestSocketsWithoutAgent(t *testing.T) {
	for name, end := range map[string]func(*testing.T, string, string, func()){"closed": closes, "killed": isKilled} {
		t.Run(name, func(t *testing.T) {
			c, hp, path := awayFrom(t, end)
			c.do(command{Op: "others", N: 3})
			eventually(t, "others wait", func() bool { return waitIn(t, c, unix.SYS_GETPRIORITY) == 3 })
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				o := c.socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
				if o.Errno != 0 || o.Priority != 0 || !o.Nonblock || !o.CloExec || o.Protocol != unix.IPPROTO_TCP {
					t.Errorf("without agent: %+v, want a socket that no agent made", o)
				}
			}
			if n := waitIn(t, c, unix.SYS_GETPRIORITY); n != 3 {
				t.Errorf("%d other calls wait, want 3", n)
			}

			var log lockedBuffer
			cfg := testConfig(path, hp, &testMaker{})
			cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
			s, stop := serve(t, cfg)
			eventually(t, "the listener is resumed", func() bool { return s.Stats().Listeners == 1 })
			if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
				t.Errorf("with the next agent: %+v", o)
			}
			c.do(command{Op: "others ended"})
			if n := s.Stats().Failed["no_agent"]; n != 2 {
				t.Errorf("counted %d, want 2", n)
			}
			if got := log.String(); !strings.Contains(got, "reason=no_agent sockets=2 container=ctr") {
				t.Errorf("log: %s", got)
			}
			// That one has its own answer to the question whether they may, and it is no.
			stop()
			c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
			eventually(t, "socket() waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) == 1 })
			s, _ = serve(t, testConfig(path, hp, &testMaker{}))
			if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) {
				t.Errorf("call that waited: %+v", o)
			}
			if n := s.Stats().Failed["no_agent"]; n != 2 {
				t.Errorf("counted %d, want the 2 of before", n)
			}
		})
	}
}

// Calls that wait for the agent are kept in places of a page. When these are taken socket() waits,
// too, and nothing is lost.
func TestManyCallsWithoutAgent(t *testing.T) {
	const many = fdkeep.PageBytes/fdkeep.PlaceBytes + 8
	c, hp, path := awayFrom(t, isKilled)
	c.do(command{Op: "others", N: many})
	eventually(t, "others wait", func() bool { return waitIn(t, c, unix.SYS_GETPRIORITY) == many })
	c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
	eventually(t, "socket() waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) == 1 })
	serve(t, testConfig(path, hp, &testMaker{}))
	if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) {
		t.Errorf("%+v", o)
	}
	c.do(command{Op: "others ended"})
}

// asked is a handler of a library's questions.
type asked struct{}

const askKind = 0x5f1d_93c2_0b7e_a648

func (asked) Owns(*trap.Data) bool                { return false }
func (asked) Answer(c *trap.Call) error           { return c.Next() }
func (asked) Reasons() []*trap.Reason             { return nil }
func (asked) Asked(*trap.Listener) (uint64, bool) { return askKind, true }

// Who asks the agent something is told at once that there is none, whether or not socket()
// continues.
func TestQuestionsWithoutAgent(t *testing.T) {
	const questions = fdkeep.PageBytes/fdkeep.PlaceBytes + 1 // none stays in its place
	for _, continues := range []bool{true, false} {
		t.Run(fmt.Sprintf("socket continues %v", continues), func(t *testing.T) {
			c, hp, path := awayFrom(t, func(t *testing.T, hp, path string, begin func()) {
				cfg := testConfig(path, hp, &testMaker{})
				cfg.away.Store(continues)
				cfg.others = []trap.Handler{asked{}}
				_, stop := serve(t, cfg)
				begin()
				stop()
			})
			for range questions {
				if o := c.do(command{Op: "ask"}); o.Errno != int(unix.EAGAIN) {
					t.Fatalf("question without agent: %v", unix.Errno(o.Errno))
				}
			}
			c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
			var o outcome
			if continues {
				o = c.hear()
			} else {
				eventually(t, "socket() waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) == 1 })
			}
			s, _ := serve(t, testConfig(path, hp, &testMaker{}))
			if !continues {
				o = c.hear()
			}
			if o.Errno != 0 || (o.Priority == 0) != continues {
				t.Errorf("socket(): %+v", o)
			}
			eventually(t, "questions are counted", func() bool { return s.Stats().Failed["no_agent_asked"] == questions })
		})
	}
}

// What an agent refuses does not continue without it: an endpoint that was removed.
func TestRemovedEndpointWithoutAgent(t *testing.T) {
	c, hp, path := awayFrom(t, func(t *testing.T, hp, path string, begin func()) {
		cfg := testConfig(path, hp, &testMaker{})
		cfg.away.Store(true)
		s, stop := serve(t, cfg)
		begin()
		s.Forget(testEndpoint)
		stop()
	})
	c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
	eventually(t, "socket() waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) == 1 })
	serve(t, testConfig(path, hp, &testMaker{}))
	if o := c.hear(); o.Errno != 0 {
		t.Errorf("%+v", o)
	}
}

// A change of mind reaches listeners that are served already.
func TestAwayChanged(t *testing.T) {
	hp, path := keeper(t), socketPath(t)
	cfg := testConfig(path, hp, &testMaker{})
	s, stop := serve(t, cfg)
	c := trapped(t, path, testName)
	c.tcp(unix.AF_INET)
	cfg.away.Store(true)
	s.AwayChanged()
	stop()
	if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != 0 {
		t.Errorf("without agent: %+v", o)
	}
}

// No call fails, hangs, gives a second descriptor or is anything but the agent's or the kernel's,
// wherever the kill falls.
func TestKillsUnderLoadAndAway(t *testing.T) {
	const calls, kills = 12000, 20
	t.Setenv("HEDDLE_AWAY", "1")
	o := underLoad(t, calls, kills, killAgent)
	if o.OK+o.Strange != calls || o.Errno != 0 || o.Open != 0 {
		t.Errorf("%d of the agent and %d others of %d, %d left open, first errno %v", o.OK, o.Strange, calls, o.Open, unix.Errno(o.Errno))
	}
}

// lockedBuffer is a buffer that several goroutines write to.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

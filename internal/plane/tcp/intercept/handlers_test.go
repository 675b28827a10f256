package intercept

import (
	"errors"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
)

// priorities is a handler as another plane may have one: it answers getpriority(), by what is asked
// for.
type priorities struct {
	refused trap.Reason
	gave    atomic.Uint64 // files
}

// What getpriority()'s second argument asks priorities for.
const (
	wantValue = iota + 1
	wantErrno
	wantFile
	wantOwn
	wantFailure
)

func (h *priorities) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && d.Nr == unix.SYS_GETPRIORITY && d.Args[0] == unix.PRIO_USER
}

func (h *priorities) Answer(c *trap.Call) error {
	switch c.Data().Args[1] {
	case wantValue:
		return c.Return(42)
	case wantErrno:
		return c.Refuse(unix.EXDEV)
	case wantFile:
		fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := c.Give(trap.Descriptor{FD: fd}); err != nil {
			return err
		}
		h.gave.Add(1)
		return nil
	case wantOwn:
		return c.PassThrough()
	}
	return h.refused.Because(errors.New("cannot"))
}

func (h *priorities) Reasons() []*trap.Reason { return []*trap.Reason{&h.refused} }

// TestAnotherHandler: a handler of another plane answers its calls by the same listener, in its own
// ways, and changes nothing for the others; what is nobody's call the kernel carries out.
func TestAnotherHandler(t *testing.T) {
	h := &priorities{refused: trap.Reason{Name: "no_priority", Errno: unix.EDOM}}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	s, _ := serve(t, cfg)
	for _, container := range []struct {
		metadata string
		sockets  uint64 // of the agent's
	}{{testName, 1}, {model.EndpointNone, 1}} {
		c := trapped(t, path, container.metadata)
		own := c.do(command{Op: "priority", Type: unix.PRIO_PROCESS})
		for ask, want := range map[int]outcome{
			wantValue: {OK: 42}, wantErrno: {Errno: int(unix.EXDEV), OK: -1}, wantFailure: {Errno: int(unix.EDOM), OK: -1}, wantOwn: {Errno: int(unix.ESRCH), OK: -1},
		} {
			if got := c.do(command{Op: "priority", Type: unix.PRIO_USER, N: ask}); got.Errno != want.Errno || want.Errno == 0 && got.OK != want.OK {
				t.Errorf("%q asks for %d: %+v, want %+v", container.metadata, ask, got, want)
			}
		}
		if got := c.do(command{Op: "priority", Type: unix.PRIO_USER, N: wantFile}); got.Errno != 0 || got.OK < 3 {
			t.Errorf("%q asks for a file: %+v", container.metadata, got)
		}
		if own.Errno != 0 || own.OK == 0 || own.OK == 42 {
			t.Errorf("%q: nobody's call: %+v", container.metadata, own)
		}
		if o := c.tcp(unix.AF_INET); o.Errno != 0 {
			t.Errorf("%q: socket(): %v", container.metadata, unix.Errno(o.Errno))
		}
		if st := s.Stats(); st.Answered != container.sockets {
			t.Errorf("%q: %d sockets given, want %d", container.metadata, st.Answered, container.sockets)
		}
	}
	if gave, failed := h.gave.Load(), s.Stats().Failed["no_priority"]; gave != 2 || failed != 2 {
		t.Errorf("%d files given and %d calls failed, want 2 and 2", gave, failed)
	}
}

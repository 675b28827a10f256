package lockwait

import (
	"errors"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// pausing is an iterator that gives one byte a read, each after EAGAIN.
type pausing struct{ reads, left int }

func (p *pausing) Read(b []byte) (int, error) {
	p.reads++
	switch {
	case p.reads%2 == 1:
		return 0, &os.PathError{Op: "read", Path: "bpf_iter", Err: unix.EAGAIN}
	case p.left == 0:
		return 0, io.EOF
	}
	p.left--
	b[0] = 1
	return 1, nil
}

func collect(r io.Reader) (all []byte, err error) {
	err = ReadAll(r.Read, func(part []byte) error {
		all = append(all, part...)
		return nil
	})
	return all, err
}

// TestReadAll checks that an iterator that pauses is read to its end, and one that never ends
// is given up.
func TestReadAll(t *testing.T) {
	if all, err := collect(&pausing{left: 3}); err != nil || len(all) != 3 {
		t.Errorf("read %v, %v; want 3 bytes", all, err)
	}
	if _, err := collect(&pausing{left: 1 << 20}); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("an iterator that pauses for ever: %v, want EAGAIN", err)
	}
}

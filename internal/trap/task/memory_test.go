package task

import (
	"bytes"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// TestReadMemory: what callers name is read as far as it is there. None of it may be a fault of the
// agent's: a program chooses address and length.
func TestReadMemory(t *testing.T) {
	own := []byte("what a program gives")
	at := uint64(uintptr(unsafe.Pointer(&own[0])))
	for _, c := range []struct {
		addr uint64
		n    int
		want []byte
	}{
		{at, len(own), own},
		{at, 4, own[:4]},
		{at, 0, nil},
		{at, -1, nil},
		{0, 4, nil},
		{1 << 63, 4, nil},
		{4096, 4, nil}, // nothing is mapped there
	} {
		got, err := ReadMemory(uint32(unix.Gettid()), c.addr, c.n)
		if testutil.NoError(t, err); !bytes.Equal(got, c.want) {
			t.Errorf("%d bytes at %#x: %q, want %q", c.n, c.addr, got, c.want)
		}
	}
}

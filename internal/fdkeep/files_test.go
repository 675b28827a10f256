package fdkeep

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestRaiseFiles(t *testing.T) {
	var before, after unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &before) // the hard limit may stay raised
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 512, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	limit, err := RaiseFiles()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &after); err != nil || after.Cur != limit || limit < min(before.Max, wantFiles) {
		t.Errorf("said %d, is %d, the hard limit was %d: %v", limit, after.Cur, before.Max, err)
	}
	if again, err := RaiseFiles(); err != nil || again != limit {
		t.Errorf("again: %d, %v", again, err)
	}
	for limit, want := range map[uint64]uint64{0: 0, agentFiles: 0, 20000: 7850, 1 << 20: 522138} {
		if got := RoomFor(limit); got != want {
			t.Errorf("%d files are room for %d containers, want %d", limit, got, want)
		}
	}
}

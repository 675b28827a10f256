package fdkeep

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// wantFiles is room for what a keeper keeps at most, and for an agent that serves half of that.
	wantFiles = 1 << 17
	// agentFiles is what an agent has open beside its listeners, sockets that were made ahead most
	// of all.
	agentFiles = 4300
)

// LeastFiles is a limit with which an agent can do: room for some 1,900 containers.
const LeastFiles = 8192

// RaiseFiles lets this process have as many files open as an agent or a keeper may need, or as many
// as it may give itself, and says how many.
func RaiseFiles() (limit uint64, err error) {
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		return 0, fmt.Errorf("read RLIMIT_NOFILE: %w", err)
	}
	if now.Cur >= wantFiles {
		return now.Cur, nil
	}
	for _, to := range []uint64{max(now.Max, wantFiles), now.Max} { // only some may raise the hard limit
		if err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: to, Max: to}); err == nil {
			return to, nil
		}
	}
	return now.Cur, fmt.Errorf("raise RLIMIT_NOFILE: %w", err)
}

// RoomFor gives for how many containers such a limit is enough.
func RoomFor(limit uint64) uint64 { return (max(limit, agentFiles) - agentFiles) / fdsPerEntry }

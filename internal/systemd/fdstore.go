package systemd

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// firstFD is the first descriptor that a service manager passes: sd_listen_fds(3).
const firstFD = 3

// FDStore keeps descriptors in the service manager, for the next process of this service: FDSTORE=
// in sd_notify(3). They are lost when the service is stopped, or the unit has no
// FileDescriptorStoreMax=.
type FDStore struct {
	path string
	kept map[string]int
}

// OpenFDStore gives the service manager's store, and nil if there is no service manager. It takes
// what the manager has passed, so it must be called once, before this process starts another.
func OpenFDStore() *FDStore {
	path := os.Getenv(EnvSocket)
	if path == "" {
		return nil
	}
	s := &FDStore{path: path, kept: passed(os.Getpid(), os.Getenv)}
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		_ = os.Unsetenv(name) // of a valid name, it cannot fail
	}
	for _, fd := range s.kept {
		unix.CloseOnExec(fd)
	}
	return s
}

// passed gives the descriptors that were passed to process pid, by name.
func passed(pid int, getenv func(string) string) map[string]int {
	out := map[string]int{}
	n, err := strconv.Atoi(getenv("LISTEN_FDS"))
	if getenv("LISTEN_PID") != strconv.Itoa(pid) || err != nil {
		return out
	}
	names := strings.Split(getenv("LISTEN_FDNAMES"), ":")
	for i := range min(n, len(names)) {
		out[names[i]] = firstFD + i
	}
	return out
}

// Kept gives what an earlier process of the service stored; the descriptors are the caller's, so it
// gives them once.
func (s *FDStore) Kept() map[string]int {
	out := s.kept
	s.kept = nil
	return out
}

// Store makes the service manager keep a duplicate of fd. It lets go by itself of what hangs up.
func (s *FDStore) Store(name string, fd int) error {
	return s.send("FDSTORE=1\nFDNAME="+name, unix.UnixRights(fd))
}

// Remove makes the service manager close what it keeps under name.
func (s *FDStore) Remove(name string) error {
	return s.send("FDSTOREREMOVE=1\nFDNAME="+name, nil)
}

// send sends one message. While the service manager is behind, it waits.
func (s *FDStore) send(state string, rights []byte) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("tell service manager: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendmsg(fd, []byte(state), rights, &unix.SockaddrUnix{Name: s.path}, 0); err != nil {
		return fmt.Errorf("tell service manager: %w", err)
	}
	return nil
}

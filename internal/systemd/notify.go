// Package systemd talks to the service manager that started this process, if one did: it tells it
// that the service is ready, and finds the control group it delegated.
package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// EnvSocket names the variable with the address of the service manager's socket.
const EnvSocket = "NOTIFY_SOCKET"

// States of a service: sd_notify(3).
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
)

// ExtendTimeout is the state that asks for more time to start or to stop, at least d from now.
func ExtendTimeout(d time.Duration) string {
	return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", d.Microseconds())
}

// Notify sends a state to the service manager. Without one it does nothing.
func Notify(state string) error {
	path := os.Getenv(EnvSocket)
	if path == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"}) // "@" is understood as in sd_notify
	if err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	_, err = conn.Write([]byte(state))
	if err = errors.Join(err, conn.Close()); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	return nil
}

// subgroup is the part of a delegated control group that the agent lives in. The service manager
// keeps the group itself for its own: a new process of the service starts there, and it may be one
// that is no agent.
const subgroup = "agent"

// Delegated gives the control group (version 2) for the agent, as a path in the file system: one
// below this process's own, which a service manager must have delegated. It does not make it.
func Delegated() (string, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("find own control group: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find own control group: %w", err)
	}
	return delegated(string(own), string(mounts))
}

func delegated(own, mounts string) (string, error) {
	path := ""
	for line := range strings.Lines(own) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			path = p
		}
	}
	if path == "" {
		return "", errors.New("find own control group: this host has control groups of version 1 only")
	}
	if filepath.Clean(path) == "/" || strings.HasPrefix(path, "/..") {
		return "", errors.New("find own control group: it is the top one, which nobody delegated: give --cgroup a path, such as /sys/fs/cgroup/heddle")
	}
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 1 || right[0] != "cgroup2" {
			continue
		}
		below, err := filepath.Rel(left[3], path)
		if err != nil || strings.HasPrefix(below, "..") {
			continue // another part of the tree is mounted there
		}
		full := filepath.Join(left[4], below)
		if filepath.Base(full) != subgroup {
			full = filepath.Join(full, subgroup)
		}
		return full, nil
	}
	return "", errors.New("find own control group: no cgroup2 file system is mounted that has it")
}

package task

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// Capable reports whether thread tid has a capability (unix.CAP_*) in the user namespace that owns
// its network namespace, or in one above that: what the kernel asks of who acts on the network.
func (p Proc) Capable(tid uint32, capability int) (bool, error) {
	dir := strconv.FormatUint(uint64(tid), 10)
	status, err := p.Read(dir + "/status")
	if err != nil {
		return false, err
	}
	has := false
	for line := range strings.Lines(status) {
		if text, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
			if err != nil {
				return false, fmt.Errorf("capabilities of thread %d: %w", tid, err)
			}
			has = set>>capability&1 != 0
		}
	}
	if !has {
		return false, nil
	}
	own, err := p.open(dir + "/ns/user")
	if err != nil {
		return false, err
	}
	defer own.Close()
	of, err := p.open(dir + "/ns/net")
	if err != nil {
		return false, err
	}
	owner, err := namespaceAt(of, unix.NS_GET_USERNS)
	for err == nil {
		same, serr := netns.Same(owner, own)
		if same || serr != nil {
			return same, errors.Join(serr, owner.Close())
		}
		owner, err = namespaceAt(owner, unix.NS_GET_PARENT)
	}
	if errors.Is(err, unix.EPERM) { // above the agent's there is none
		return false, nil
	}
	return false, fmt.Errorf("user namespaces of thread %d: %w", tid, err)
}

func (p Proc) open(path string) (*os.File, error) {
	fd, err := unix.Openat(int(p), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /proc/%s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// namespaceAt gives the namespace that of, which it closes, has for a request.
func namespaceAt(of *os.File, request uint) (*os.File, error) {
	defer of.Close()
	fd, err := unix.IoctlRetInt(int(of.Fd()), request)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), of.Name()), nil
}

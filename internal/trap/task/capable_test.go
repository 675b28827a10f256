package task

import (
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// TestCapable: a capability counts in the user namespace of the network namespace and above it, not
// in one below.
func TestCapable(t *testing.T) {
	testutil.NeedRoot(t, "makes user namespaces")
	p, err := Open()
	testutil.NoError(t, err)
	defer p.Close()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	for name, tc := range map[string]struct {
		attr syscall.SysProcAttr
		want bool
	}{
		"root":                         {syscall.SysProcAttr{}, true},
		"a user":                       {syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, false},
		"root of another's network":    {syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}, false},
		"root of a network of its own": {syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNET, UidMappings: ids, GidMappings: ids}, true},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "cat")
			cmd.SysProcAttr = &tc.attr
			in, err := cmd.StdinPipe()
			testutil.NoError(t, err)
			testutil.NoError(t, cmd.Start())
			defer func() {
				testutil.NoError(t, in.Close())
				testutil.NoError(t, cmd.Wait())
			}()
			got, err := p.Capable(uint32(cmd.Process.Pid), unix.CAP_NET_BIND_SERVICE)
			if testutil.NoError(t, err); got != tc.want {
				t.Errorf("capable: %v", got)
			}
		})
	}
}

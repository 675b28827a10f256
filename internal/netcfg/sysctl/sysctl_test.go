package sysctl

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// inNew runs fn in a network namespace of its own, and fails the test on its error.
func inNew(t *testing.T, fn func() error) {
	t.Helper()
	testutil.NeedRoot(t, "makes network namespaces")
	testutil.NoError(t, netns.OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return fn()
	}))
}

// TestSysctlsAreFoundOnce: the directory of a family is looked for once for all settings in it, the
// node's once for all endpoints, and a container's by way of a mount that the machine's other programs
// do not look by.
func TestSysctlsAreFoundOnce(t *testing.T) {
	inNew(t, func() error {
		n, err := Open()
		if err != nil {
			return err
		}
		defer n.Close()
		if err := n.Set(Setting{"ipv4/conf/lo/accept_local", "1"}, Setting{"ipv4/conf/lo/route_localnet", "1"}, Setting{"ipv6/conf/lo/disable_ipv6", "0"}); err != nil {
			return err
		}
		for _, path := range []string{"ipv4/conf/lo/accept_local", "ipv4/conf/lo/route_localnet"} {
			if value, err := Get(path); err != nil || value != "1" {
				t.Errorf("%s: %q, %v", path, value, err)
			}
		}
		if len(n.dirs) != 2 {
			t.Errorf("open: %v", n.dirs)
		}
		var own, shared unix.Stat_t
		if err := unix.Fstat(n.net, &own); err != nil {
			return err
		}
		if err := unix.Stat(root, &shared); err != nil {
			return err
		}
		if own.Dev == shared.Dev {
			t.Error("settings are looked for where those of all namespaces are")
		}
		first, err := OfNode()
		if err != nil {
			return err
		}
		if again, err := OfNode(); again != first || err != nil {
			t.Errorf("the node's are opened twice, %v", err)
		}
		if value, err := first.Get("ipv4/conf/lo/accept_local"); value != "1" || err != nil {
			t.Errorf("the node's: %q, %v", value, err)
		}
		return nil
	})
	inNew(t, func() error {
		n, err := OfNode()
		if err != nil {
			return err
		}
		if value, err := n.Get("ipv4/conf/lo/accept_local"); value != "0" || err != nil {
			t.Errorf("another namespace's: %q, %v", value, err)
		}
		if _, err := n.Get("ipv4/conf/none"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a setting that is not there: %v", err)
		}
		return nil
	})
}

// TestMountsGo: a mount goes after so many uses, what is open below it stays, and each namespace has
// its own values by way of it.
func TestMountsGo(t *testing.T) {
	inNew(t, func() error {
		mounts := make(map[uint64]bool)
		var first *Namespace
		for range mountUses + 1 {
			n, err := Open()
			if err != nil {
				return err
			}
			defer n.Close()
			var st unix.Stat_t
			if err := unix.Fstat(n.net, &st); err != nil {
				return err
			}
			mounts[st.Dev] = true
			if first == nil {
				first = n
			}
		}
		if len(mounts) != 2 {
			t.Errorf("%d namespaces were looked at by way of %d mounts; want 2", mountUses+1, len(mounts))
		}
		if err := first.Set(Setting{"ipv4/conf/lo/accept_local", "1"}); err != nil {
			return err
		}
		if value, err := Get("ipv4/conf/lo/accept_local"); err != nil || value != "1" {
			t.Errorf("set by way of the first mount, read by way of another: %q, %v", value, err)
		}
		return nil
	})
	inNew(t, func() error {
		if value, err := Get("ipv4/conf/lo/accept_local"); err != nil || value != "0" {
			t.Errorf("another namespace's by way of the same mount: %q, %v", value, err)
		}
		return nil
	})
}

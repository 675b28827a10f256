package netcfg

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSysctlsAreFoundOnce: the directory of a family is looked for once for all settings in it, the
// node's once for all endpoints, and a container's by way of a mount that nobody else has.
func TestSysctlsAreFoundOnce(t *testing.T) {
	ns := newNetns(t)
	in(t, ns, func() error {
		n, err := openSysctls()
		if err != nil {
			return err
		}
		defer n.close()
		if err := n.set(setting{"ipv4/conf/lo/accept_local", "1"}, setting{"ipv4/conf/lo/route_localnet", "1"}, setting{"ipv6/conf/lo/disable_ipv6", "0"}); err != nil {
			return err
		}
		for _, path := range []string{"ipv4/conf/lo/accept_local", "ipv4/conf/lo/route_localnet"} {
			if value, err := sysctl(path); err != nil || value != "1" {
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
		if err := unix.Stat(procSysNet, &shared); err != nil {
			return err
		}
		if own.Dev == shared.Dev {
			t.Error("settings are looked for where those of all namespaces are")
		}
		first, err := nodeSysctls()
		if err != nil {
			return err
		}
		if again, err := nodeSysctls(); again != first || err != nil {
			t.Errorf("the node's are opened twice, %v", err)
		}
		if value, err := first.get("ipv4/conf/lo/accept_local"); value != "1" || err != nil {
			t.Errorf("the node's: %q, %v", value, err)
		}
		return nil
	})
	other := newNetns(t)
	in(t, other, func() error {
		n, err := nodeSysctls()
		if err != nil {
			return err
		}
		if value, err := n.get("ipv4/conf/lo/accept_local"); value != "0" || err != nil {
			t.Errorf("another namespace's: %q, %v", value, err)
		}
		if _, err := n.get("ipv4/conf/none"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a setting that is not there: %v", err)
		}
		return nil
	})
}

// TestDevice: a device is found by its index.
func TestDevice(t *testing.T) {
	ns := newNetns(t)
	run(t, ns, "ip link add hd7 mtu 1400 type veth peer name hd8")
	in(t, ns, func() error {
		l, err := getLink("hd7")
		if err != nil {
			return err
		}
		if name, mtu, err := Device(l.Attrs().Index); name != "hd7" || mtu != 1400 || err != nil {
			t.Errorf("%s, %d, %v", name, mtu, err)
		}
		if _, _, err := Device(1 << 20); err == nil {
			t.Error("a device that is not there is found")
		}
		return nil
	})
}

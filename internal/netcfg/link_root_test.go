package netcfg

import (
	"testing"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// TestDevice: a device is found by its index.
func TestDevice(t *testing.T) {
	ns := newNetns(t)
	run(t, ns, "ip link add hd7 mtu 1400 type veth peer name hd8")
	in(t, ns, func() error {
		l, err := rtnl.GetLink("hd7")
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

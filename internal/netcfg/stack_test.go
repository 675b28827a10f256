package netcfg

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// TestPackagedStackDevice: the agent as the package starts it may open the device that
// AddStackDevice opens.
func TestPackagedStackDevice(t *testing.T) {
	unit, err := os.ReadFile("../../packaging/heddled.service")
	testutil.NoError(t, err)
	lines := strings.Split(string(unit), "\n")
	has := map[string]bool{}
	for _, line := range lines {
		has[line] = true
	}
	if has["DevicePolicy=closed"] && !has["DeviceAllow=/dev/net/tun rw"] {
		t.Error("heddled.service closes all devices but does not allow /dev/net/tun")
	}
}

// TestStackDeviceMTU: a module's packets fit the overlay, whatever the container's device has.
func TestStackDeviceMTU(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	ns := newNetns(t)
	run(t, ns, "ip link add hd7 index 7 mtu 1500 type veth peer name other mtu 1500")
	in(t, ns, func() error {
		for _, tc := range []struct {
			command string
			mtu     int
		}{{"true", 1500}, {"ip link add heddle-vx0 mtu 1450 type veth peer name beyond", 1450}, {"ip link set hd7 mtu 1400", 1400}} {
			if out, err := exec.Command("sh", "-c", tc.command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", tc.command, err, out)
			}
			dev, err := DescribeStackDevice(7, 7)
			if err != nil || dev.MTU != tc.mtu {
				t.Errorf("after %q: %+v, %v, want MTU %d", tc.command, dev, err, tc.mtu)
			}
		}
		return nil
	})
}

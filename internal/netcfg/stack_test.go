package netcfg

import (
	"os"
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

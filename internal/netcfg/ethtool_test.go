package netcfg

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOffloads: every kernel has lo cut up and join packets; what is not there is an error.
func TestOffloads(t *testing.T) {
	on, off, err := Offloads("lo")
	if err != nil || !slices.Contains(on, "GSO") || len(on)+len(off) != len(offloads) {
		t.Errorf("lo has %v on, %v off (%v)", on, off, err)
	}
	if _, _, err := Offloads("heddle-none"); !errors.Is(err, unix.ENODEV) {
		t.Errorf("a device that is not there: %v", err)
	}
	cards, err := Cards()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cards {
		if c.MTU == 0 || c.Name == "lo" {
			t.Errorf("%+v is no network card", c)
		}
	}
}

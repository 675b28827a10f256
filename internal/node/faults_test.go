package node

import (
	"errors"
	"testing"

	"heddle.dev/heddle/internal/api"
)

func TestFaults(t *testing.T) {
	var f faults
	if f.List() != nil || f.Has(api.FaultLimits) || f.Clear(api.FaultLimits, "") {
		t.Error("faults before there are any")
	}
	if !f.Set(api.FaultLimits, "", errors.New("one")) || f.Set(api.FaultLimits, "", errors.New("one")) {
		t.Error("a fault is news once")
	}
	f.Set(api.FaultEndpoint, "n1/c2", errors.New("x"))
	f.Set(api.FaultEndpoint, "n1/c1", errors.New("x"))
	first := f.List()
	if !f.Set(api.FaultLimits, "", errors.New("two")) {
		t.Error("another error is no news")
	}
	got := f.List()
	if len(got) != 3 || got[0].Endpoint != "n1/c1" || got[1].Endpoint != "n1/c2" || got[2].Error != "two" || !got[2].Since.Equal(first[2].Since) {
		t.Errorf("%+v, before %+v", got, first)
	}
	if !f.Clear(api.FaultEndpoint, "n1/c1") || !f.Has(api.FaultEndpoint) || !f.Clear(api.FaultEndpoint, "n1/c2") || f.Has(api.FaultEndpoint) {
		t.Errorf("%+v after all of endpoints were cleared", f.List())
	}
}

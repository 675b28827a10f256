package netcfg

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestBatch: a request that fails says which it is, and those after it are made.
func TestBatch(t *testing.T) {
	ns := newNetns(t)
	first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	in(t, ns, func() error {
		var b batch
		b.up(LoopbackIfindex)
		b.address(LoopbackIfindex, first)
		b.address(999, first)
		b.address(LoopbackIfindex, second)
		failed, err := b.send()
		if err != nil || len(failed) != 4 {
			t.Fatalf("%d answers, %v", len(failed), err)
		}
		for i, err := range failed {
			if (err != nil) != (i == 2) {
				t.Errorf("request %d: %v", i, err)
			}
		}
		if err := failed[2]; !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), "add address 192.0.2.1") {
			t.Errorf("the third: %v", err)
		}
		b.address(LoopbackIfindex, first)
		if err := b.do(); !errors.Is(err, unix.EEXIST) {
			t.Errorf("an address that is there: %v", err)
		}
		b.address(LoopbackIfindex, first)
		return b.do(unix.EEXIST)
	})
	if got := run(t, ns, "ip -o addr show dev lo"); !strings.Contains(got, "192.0.2.1/32") || !strings.Contains(got, "2001:db8::1/128") {
		t.Errorf("addresses of lo:\n%s", got)
	}
}

// TestAnswers: what is no answer to a request is not taken for one.
func TestAnswers(t *testing.T) {
	for name, raw := range map[string][]byte{
		"another message": {20, 0, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"too long":        {36, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"too short":       {16, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		if acks, err := parseAcks(raw); err == nil {
			t.Errorf("%s: %v", name, acks)
		}
	}
	raw := []byte{20, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0xef, 0xff, 0xff, 0xff}
	acks, err := parseAcks(append(raw, raw...))
	if err != nil || len(acks) != 2 || acks[1] != (ack{7, unix.EEXIST}) {
		t.Errorf("%v, %v", acks, err)
	}
}

package rtnl

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// TestBatch: a request that fails says which it is, and those after it are made.
func TestBatch(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	const lo = 1 // its index
	first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	testutil.NoError(t, netns.OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		var b Batch
		b.Up(lo)
		b.Address(lo, first)
		b.Address(999, first)
		b.Address(lo, second)
		failed, err := b.Send()
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
		b.Address(lo, first)
		if err := b.Do(); !errors.Is(err, unix.EEXIST) {
			t.Errorf("an address that is there: %v", err)
		}
		b.Address(lo, first)
		if err := b.Do(unix.EEXIST); err != nil {
			return err
		}
		have, err := Each().AddrList(nil, unix.AF_UNSPEC)
		for _, want := range []netip.Addr{first, second} {
			if !slices.ContainsFunc(have, func(a netlink.Addr) bool { return FromIPNet(a.IPNet) == netip.PrefixFrom(want, want.BitLen()) }) {
				t.Errorf("addresses of lo: %v; want %v", have, want)
			}
		}
		return err
	}))
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

package netcfg

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// TestDeleteSeen: when a device's deletion returns, both ends of the pair are gone and their names
// can be taken, and it has not waited for the kernel's answer.
func TestDeleteSeen(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	node, container := newNetns(t), newNetns(t)
	ns, err := netns.Open(container)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	in(t, node, func() error {
		h, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		for range 20 {
			pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "seen0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns.Fd())}
			if err := h.LinkAdd(pair); err != nil {
				return err // EEXIST: an end of the one before is still there
			}
			l, err := h.LinkByName("seen0")
			if err != nil {
				return err
			}
			if told, err := deleteSeen(l); err != nil || !told {
				t.Fatalf("deleteSeen: told %v, %v", told, err)
			}
			if told, err := deleteSeen(l); err != nil || told {
				t.Fatalf("deleteSeen of what is gone: told %v, %v", told, err)
			}
		}
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		if _, err := deleteSeen(lo); err == nil {
			t.Error("lo can be deleted")
		}
		return nil
	})
}

// TestGoneBy: another device's end, and what is no answer, are not taken for the deletion.
func TestGoneBy(t *testing.T) {
	message := func(kind uint16, data ...byte) []byte {
		return append([]byte{byte(16 + len(data)), 0, 0, 0, byte(kind), byte(kind >> 8), 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, data...)
	}
	link := func(index byte) []byte {
		return message(unix.RTM_DELLINK, 0, 0, 0, 0, index, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	for name, c := range map[string]struct {
		raw        []byte
		done, told bool
		err        error
	}{
		"the device":      {raw: link(7), done: true, told: true},
		"another":         {raw: link(8)},
		"behind another":  {raw: append(link(8), link(7)...), done: true, told: true},
		"answered":        {raw: message(unix.NLMSG_ERROR, 0, 0, 0, 0), done: true},
		"was gone":        {raw: message(unix.NLMSG_ERROR, 0xed, 0xff, 0xff, 0xff), done: true},
		"refused":         {raw: message(unix.NLMSG_ERROR, 0xff, 0xff, 0xff, 0xff), done: true, err: unix.EPERM},
		"cut short":       {raw: message(unix.RTM_DELLINK, 0, 0, 0, 0)},
		"another message": {raw: message(unix.RTM_NEWLINK, link(7)[16:]...)},
	} {
		done, told, err := goneBy(c.raw, 7)
		if done != c.done || told != c.told || err != c.err {
			t.Errorf("%s: done %v, told %v, %v", name, done, told, err)
		}
	}
}

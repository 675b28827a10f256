package netcfg

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/testutil"
)

// TestOneDeviceAmongMany asks for one device's qdisc and neighbours, with others beside it that
// have other ones.
func TestOneDeviceAmongMany(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	in(t, newNetns(t), func() error {
		h, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		var links []netlink.Link
		for _, name := range []string{"many0", "many1", "many2"} {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
			if err := h.LinkAdd(l); err != nil {
				return err
			}
			link, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			links = append(links, link)
		}
		clsact := func(l netlink.Link, want bool, when string) {
			t.Helper()
			if have, err := hasClsact(l.Attrs().Index); err != nil || have != want {
				t.Errorf("%s: %s has a clsact qdisc: %v, %v; want %v", when, l.Attrs().Name, have, err, want)
			}
		}
		clsact(links[1], false, "at first")
		for range 2 {
			if err := ensureClsact(h, links[1]); err != nil {
				return err
			}
		}
		clsact(links[0], false, "beside one that has it")
		clsact(links[1], true, "added")
		if err := h.QdiscDel(newClsact(links[1].Attrs().Index)); err != nil {
			return err
		}
		clsact(links[1], false, "deleted")
		ingress := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: links[2].Attrs().Index, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0)}}
		if err := h.QdiscAdd(ingress); err != nil {
			return err
		}
		clsact(links[2], false, "ingress")
		if err := ensureClsact(h, links[2]); err == nil {
			t.Error("an ingress qdisc is taken for clsact")
		}

		for i, l := range links {
			want := map[netip.Addr]string{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}): "02:00:00:00:00:01", netip.MustParseAddr("fd00::1"): "02:00:00:00:00:02"}
			if err := setNeighbours(h, l.Attrs().Index, want); err != nil {
				return err
			}
		}
		for i, l := range links {
			list, err := neighboursOf(l.Attrs().Index, netlink.FAMILY_V4)
			if err != nil || len(list) != 1 || rtnl.FromIP(list[0].IP) != netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) {
				t.Errorf("%s: %v, %v", l.Attrs().Name, list, err)
			}
			if err := setNeighbours(h, l.Attrs().Index, nil); err != nil {
				return err
			}
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				if list, err := neighboursOf(l.Attrs().Index, family); err != nil || len(list) != 0 {
					t.Errorf("%s: %v, %v; want none", l.Attrs().Name, list, err)
				}
			}
		}
		return nil
	})
}

// TestOwnedRoutes: a route is added without a look at others, one that is there stays, Heddle's own
// to the same destination is replaced, and another's is an error.
func TestOwnedRoutes(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	in(t, newNetns(t), func() error {
		h, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		var index [2]int
		for i, name := range []string{"many0", "many1"} {
			if err := h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}); err != nil {
				return err
			}
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			if err := rtnl.SetUp(h, l); err != nil {
				return err
			}
			index[i] = l.Attrs().Index
		}
		for _, dst := range []string{"198.51.100.1/32", "fd00:1::1/128"} {
			want := route{table: unix.RT_TABLE_MAIN, dst: netip.MustParsePrefix(dst), kind: unix.RTN_UNICAST, link: index[0]}
			fresh := &ownedRoutes{h: h}
			if err := fresh.ensure(want); err != nil || fresh.have != nil {
				t.Errorf("%s: %v; listed: %v", dst, err, fresh.have)
			}
			want.link = index[1]
			for range 2 {
				if err := (&ownedRoutes{h: h}).ensure(want); err != nil {
					t.Errorf("%s to another device: %v", dst, err)
				}
			}
			have, err := ownRoutes(h)
			if r := have[want.key()]; err != nil || r != want {
				t.Errorf("%s: %+v, %v; want %+v", dst, r, err, want)
			}
		}
		foreign := route{table: unix.RT_TABLE_MAIN, dst: netip.MustParsePrefix("198.51.100.2/32"), kind: unix.RTN_UNICAST, link: index[0]}
		other := foreign.netlink()
		other.Protocol = unix.RTPROT_STATIC
		if err := h.RouteAdd(other); err != nil {
			return err
		}
		if err := (&ownedRoutes{h: h}).ensure(foreign); err == nil {
			t.Error("another's route is taken for Heddle's")
		}
		return nil
	})
}

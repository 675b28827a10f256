package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// tunnelled is a datagram of a container of node A for one of node B, as node A sends it: change
// alters it before its headers get their sums, and inner is what the device would take out.
func tunnelled(change func(outer []byte)) (outer, inner []byte) {
	inner = udp(overlayA, overlayB)
	outer = ethernet(0x0800, ipv4(underlayA, underlayB, 17, 0, vxlan(testVNI, inner)))
	binary.BigEndian.PutUint16(outer[34:], 0xd123)
	if change != nil {
		change(outer)
	}
	withSum(outer[14:])
	return outer, inner
}

// TestDecapsulate: the programs take plain packets out of their tunnel, whole and unchanged, for the
// overlay's device to bring them; all else, and what follows it, they leave to the device.
func TestDecapsulate(t *testing.T) {
	d := loadForRedirect(t, 0)
	const left = heddleHeddleReasonREASON_TUNNEL_DEVICE
	plain, inner := tunnelled(nil)
	sends(t, d, d.objs.FromUnderlay, plain, actOK, 0) // until it is wanted
	if err := d.SetPackets(Packets{Redirected: true, Tunnelled: true}); err != nil {
		t.Fatal(err)
	}
	if out := sends(t, d, d.objs.FromUnderlay, plain, actRedirect, 0); !bytes.Equal(out, inner) {
		t.Errorf("taken out:\n%swant\n%s", hex.Dump(out), hex.Dump(inner))
	}
	six := ethernet(0x86dd, ipv6(overlay6(overlayA), overlay6(overlayB), 17, make([]byte, 24)))
	whole := ethernet(0x0800, withSum(ipv4(underlayA, underlayB, 17, 0, vxlan(testVNI, six))))
	if out := sends(t, d, d.objs.FromUnderlay, whole, actRedirect, 0); !bytes.Equal(out, six) {
		t.Errorf("taken out:\n%swant\n%s", hex.Dump(out), hex.Dump(six))
	}
	for name, change := range map[string]func([]byte){
		"congestion noted":  func(b []byte) { b[15] = 3 },
		"first fragment":    func(b []byte) { b[20] = 0x20 },
		"longer than UDP":   func(b []byte) { b[39]-- },
		"longer than IP":    func(b []byte) { b[17]-- },
		"other VXLAN flags": func(b []byte) { b[42] = 0x0c },
	} {
		t.Run(name, func(t *testing.T) {
			// Of a flow of its own, by its port.
			changed, _ := tunnelled(func(b []byte) { b[35]++; change(b) })
			following, _ := tunnelled(func(b []byte) { b[35]++ })
			if out := sends(t, d, d.objs.FromUnderlay, changed, actOK, left); !bytes.Equal(out, changed) {
				t.Errorf("changed:\n%swas\n%s", hex.Dump(out), hex.Dump(changed))
			}
			sends(t, d, d.objs.FromUnderlay, plain, actRedirect, 0)
			testutil.Eventually(t, "its flow to be decapsulated again", func() (bool, string) {
				verdict, _, err := d.objs.FromUnderlay.Test(following)
				return verdict == actRedirect && err == nil, ""
			})
		})
	}
	t.Run("what follows", func(t *testing.T) {
		opts := ebpf.RunOptions{Data: plain, DataOut: make([]byte, 256), Context: segmented(10)}
		if verdict, err := d.objs.FromUnderlay.Run(&opts); verdict != actOK || err != nil {
			t.Fatalf("segments: verdict %d, %v", verdict, err)
		}
		sends(t, d, d.objs.FromUnderlay, plain, actOK, left)
	})
}

// segmented is the context of a packet of segments of so many bytes.
func segmented(size uint32) skbContext {
	var c skbContext
	const gsoSize = 176 // its offset in struct __sk_buff
	c.Rest[gsoSize/4-12] = size
	return c
}

// TestDecapsulateIsGuarded: what the guards of the overlay drop stays dropped.
func TestDecapsulateIsGuarded(t *testing.T) {
	d := loadForRedirect(t, 0)
	if err := d.SetPackets(Packets{Redirected: true, Tunnelled: true}); err != nil {
		t.Fatal(err)
	}
	stranger := netip.MustParseAddr("192.0.2.9").AsSlice()
	for name, tc := range map[string]struct {
		change func([]byte)
		reason heddleHeddleReason
	}{
		"a stranger":             {func(b []byte) { copy(b[26:], stranger) }, heddleHeddleReasonREASON_DROP_OVERLAY_STRANGER},
		"a source of this node":  {func(b []byte) { copy(b[76:], overlayB.AsSlice()) }, heddleHeddleReasonREASON_DROP_OVERLAY_SOURCE},
		"a source outside":       {func(b []byte) { copy(b[76:], stranger) }, heddleHeddleReasonREASON_DROP_OVERLAY_SOURCE},
		"a tag before the inner": {func(b []byte) { copy(b[62:], []byte{0x81, 0}) }, heddleHeddleReasonREASON_DROP_OVERLAY_SOURCE},
	} {
		t.Run(name, func(t *testing.T) {
			forged, _ := tunnelled(tc.change)
			sends(t, d, d.objs.FromUnderlay, forged, actShot, tc.reason)
		})
	}
	other, _ := tunnelled(func(b []byte) { copy(b[30:], stranger) }) // not for this node's address
	sends(t, d, d.objs.FromUnderlay, other, actOK, 0)
	network, _ := tunnelled(func(b []byte) { b[48]++ })
	sends(t, d, d.objs.FromUnderlay, network, actOK, 0)
}

// TestEncapsulate: what leaves for another node has the headers that its device takes, and goes by
// the device itself where there is no neighbour to send it to, or an MTU on the way is too small.
func TestEncapsulate(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	const name = "heddle-tunnel-test"
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testutil.NoError(t, netns.Delete(name)) })
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", append([]string{"-n", name}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	// As a node's.
	testutil.NoError(t, netns.Do(netns.Path(name), func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }))
	const device, overlay = 77, 78
	ip("link", "add", "under", "index", "77", "type", "veth", "peer", "name", "overlay", "index", "78", "mtu", "1450")
	ip("link", "set", "overlay", "up")
	ip("addr", "add", underlayB.String()+"/24", "dev", "under")
	ip("link", "set", "under", "up")
	d := loadForTestAs(t, 0, func(c *Config) { c.UnderlayIfindex, c.OverlayIfindex, c.VTEPMAC = device, overlay, "02:48:c0:00:02:02" })
	prepareRedirect(t, d)
	if err := d.SetPackets(Packets{Redirected: true, Tunnelled: true}); err != nil {
		t.Fatal(err)
	}
	frames := map[string][]byte{"IPv4": udp(overlayB, overlayA), "IPv6": ethernet(0x86dd, ipv6(overlay6(overlayB), overlay6(overlayA), 17, make([]byte, 24)))}
	run := func(t *testing.T, frame []byte, byDevice bool) (out []byte) {
		t.Helper()
		// The way is asked for anew.
		if err := d.objs.WayByUnderlay.Delete(fromAddr(underlayA).Word[3]); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
		before := counters(t, d)
		err := netns.Do(netns.Path(name), func() error {
			verdict, result, err := d.objs.FromEndpoint.Test(frame)
			if verdict != actRedirect {
				t.Errorf("verdict %d", verdict)
			}
			out = result
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		const left = heddleHeddleReasonREASON_TUNNEL_DEVICE
		if got := counters(t, d)[left] > before[left]; got != byDevice {
			t.Errorf("left to the device: %v, want %v", got, byDevice)
		}
		return out
	}
	run(t, frames["IPv4"], true) // a neighbour that has not been asked for
	ip("neigh", "replace", underlayA.String(), "lladdr", "02:00:00:00:00:01", "dev", "under", "nud", "permanent")
	for name, frame := range frames {
		t.Run(name, func(t *testing.T) {
			out := run(t, frame, false)
			if len(out) != len(frame)+50 {
				t.Fatalf("%d bytes, want %d", len(out), len(frame)+50)
			}
			if headerSum(out[14:]) != 0xffff {
				t.Errorf("header with a wrong checksum: %x", out[14:34])
			}
			want := ethernet(0x0800, ipv4(underlayB, underlayA, 17, 0, vxlan(testVNI, frame)))
			copy(want[50:], []byte{2, 0x48, 0xc0, 0, 2, 1, 2, 0x48, 0xc0, 0, 2, 2}) // from one overlay device to the other
			want[64+8-1]--                                                          // the hop limit of IPv6
			if frame[12] == 8 {
				want[64+8-1]++
				want[64+8]--
				copy(want[64+10:], out[64+10:64+12])
				if headerSum(out[64:]) != 0xffff {
					t.Errorf("inner header with a wrong checksum: %x", out[64:84])
				}
			}
			for _, of := range [][2]int{{0, 14}, {18, 20}, {24, 26}, {34, 36}} { // the neighbour's, id, sum, port
				copy(want[of[0]:of[1]], out[of[0]:of[1]])
			}
			if !bytes.Equal(out, want) {
				t.Errorf("sent:\n%swant\n%s", hex.Dump(out), hex.Dump(want))
			}
			if port := binary.BigEndian.Uint16(out[34:]); port < 0xc000 {
				t.Errorf("from port %d", port)
			}
		})
	}
	t.Run("congestion", func(t *testing.T) {
		for inner, want := range map[byte]byte{0: 0, 1: 1, 2: 2, 3: 2, 0xb8: 0} {
			frame := bytes.Clone(frames["IPv4"])
			frame[15] = inner
			if out := run(t, withSumAt14(frame), false); out[15] != want {
				t.Errorf("TOS %#x of the container: %#x outside, want %#x", inner, out[15], want)
			}
		}
	})
	ip("link", "set", "under", "mtu", "1499") // what fits the overlay's 1450 does not fit with 50 more
	run(t, frames["IPv4"], true)
	ip("link", "set", "under", "mtu", "1500")
	run(t, frames["IPv4"], false)
	ip("route", "add", underlayA.String(), "dev", "under", "mtu", "lock", "1400")
	run(t, frames["IPv4"], true)
}

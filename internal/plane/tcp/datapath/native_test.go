package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// Hardware addresses of node A, of node B's device on the network of both, and of a third there.
var (
	macA = net.HardwareAddr{2, 0, 0, 0, 0, 0xa}
	macB = net.HardwareAddr{2, 0, 0, 0, 0, 0xb}
	macC = net.HardwareAddr{2, 0, 0, 0, 0, 0xc}
)

// Node B's devices.
const underB, overlayDeviceB = 77, 78

const actStolen = 4

// atNodeB runs programs as node B, on a network of its own where node A has macA.
type atNodeB struct {
	*Datapath
	netns string
}

func nodeBOnANetwork(t *testing.T, without uint64) atNodeB {
	t.Helper()
	testutil.NeedRoot(t, "makes a network namespace")
	n := atNodeB{netns: "heddle-native-test"}
	testutil.NoError(t, netns.Create(n.netns))
	t.Cleanup(func() { testutil.NoError(t, netns.Delete(n.netns)) })
	testutil.NoError(t, netns.Do(netns.Path(n.netns), func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }))
	n.ip(t, "link", "add", "under", "index", "77", "address", macB.String(), "type", "veth", "peer", "name", "overlay", "index", "78", "mtu", "1450")
	n.ip(t, "link", "set", "overlay", "up")
	n.ip(t, "addr", "add", underlayB.String()+"/24", "dev", "under")
	n.ip(t, "link", "set", "under", "up")
	n.ip(t, "neigh", "replace", underlayA.String(), "lladdr", macA.String(), "dev", "under", "nud", "permanent")
	n.Datapath = loadForTestAs(t, without, func(c *Config) {
		c.UnderlayIfindex, c.OverlayIfindex, c.VTEPMAC = underB, overlayDeviceB, "02:48:c0:00:02:02"
	})
	prepareRedirect(t, n.Datapath)
	testutil.NoError(t, n.SetPackets(Packets{Redirected: true, Tunnelled: true, Native: true}))
	return n
}

func (n atNodeB) ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", n.netns}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

// receives and leaves give what the programs do with a frame that the underlay's device brings, and
// with one of a container.
func (n atNodeB) receives(t *testing.T, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	return n.run(t, n.objs.FromUnderlay, &ebpf.RunOptions{Data: frame, Context: skbContext{Ifindex: underB}})
}

func (n atNodeB) leaves(t *testing.T, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	return n.run(t, n.objs.FromEndpoint, &ebpf.RunOptions{Data: frame})
}

func (n atNodeB) run(t *testing.T, p *ebpf.Program, opts *ebpf.RunOptions) (verdict uint32, out []byte) {
	t.Helper()
	opts.DataOut = make([]byte, 512)
	testutil.NoError(t, netns.Do(netns.Path(n.netns), func() (err error) {
		verdict, err = p.Run(opts)
		return err
	}))
	return verdict, opts.DataOut
}

// awaitTunnel waits until a container's packets go by the tunnel.
func (n atNodeB) awaitTunnel(t *testing.T) {
	t.Helper()
	testutil.Eventually(t, "packets in the tunnel", func() (bool, string) {
		const tunnelled = heddleHeddleReasonREASON_REDIRECT_OVERLAY
		before := counters(t, n.Datapath)[tunnelled]
		n.leaves(t, udp(overlayB, overlayA))
		return counters(t, n.Datapath)[tunnelled] > before, ""
	})
}

func gatewayOf(a netip.Addr) netip.Addr { return model.Gateway(netip.PrefixFrom(a, 24)) }

// echo6 is the same by IPv6, kind 128 or 129.
func echo6(kind, hops byte, vni uint32) []byte {
	icmp := binary.BigEndian.AppendUint32([]byte{kind, 0, 0, 0}, vni)
	packet := ipv6(overlay6(gatewayOf(overlayA)), overlay6(gatewayOf(overlayB)), 58, icmp)
	packet[7] = hops
	sum := uint32(58 + len(icmp))
	for i := 8; i < len(packet); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(packet[42:], ^uint16(sum+sum>>16))
	return between(macA, macB, ethernet(0x86dd, packet))
}

// echo is a probe of node A for node B, kind 8, or an answer, 0.
func echo(kind, hops byte, vni uint32) []byte {
	icmp := binary.BigEndian.AppendUint32([]byte{kind, 0, 0, 0}, vni)
	sum := uint32(kind)<<8 + vni>>16 + vni&0xffff
	binary.BigEndian.PutUint16(icmp[2:], ^uint16(sum+sum>>16))
	packet := ipv4(gatewayOf(overlayA), gatewayOf(overlayB), 1, 0, icmp)
	packet[8] = hops
	return between(macA, macB, ethernet(0x0800, withSum(packet)))
}

// between gives the frame other hardware addresses.
func between(src, dst net.HardwareAddr, frame []byte) []byte {
	copy(frame, dst)
	copy(frame[6:], src)
	return frame
}

// TestNativeProbe: a probe that travelled as a container's packet would is answered the same way; an
// answer is noted, and counts for a while. What is no probe of this network is dropped.
func TestNativeProbe(t *testing.T) {
	n := nodeBOnANetwork(t, 0)
	verdict, out := n.receives(t, echo(8, 255, testVNI))
	want := between(macB, macA, echo(0, 255, testVNI))
	copy(want[26:], gatewayOf(overlayB).AsSlice())
	copy(want[30:], gatewayOf(overlayA).AsSlice())
	if verdict != actRedirect || !bytes.Equal(out, want) {
		t.Errorf("a probe: verdict %d\n%swant\n%s", verdict, hex.Dump(out), hex.Dump(want))
	}
	verdict, out = n.receives(t, echo6(128, 255, testVNI))
	want = between(macB, macA, echo6(129, 255, testVNI))
	gateways := slices.Concat(overlay6(gatewayOf(overlayB)).AsSlice(), overlay6(gatewayOf(overlayA)).AsSlice())
	copy(want[22:], gateways)
	if verdict != actRedirect || !bytes.Equal(out, want) {
		t.Errorf("a probe by IPv6: verdict %d\n%swant\n%s", verdict, hex.Dump(out), hex.Dump(want))
	}
	native := func() bool {
		known, err := n.Neighbours()
		testutil.NoError(t, err)
		if len(known) != 1 || known[0].Underlay != underlayA || !bytes.Equal(known[0].Peer, macA) || !bytes.Equal(known[0].Self, macB) || !known[0].Near {
			t.Fatalf("neighbours %+v", known)
		}
		return known[0].Native()
	}
	if native() {
		t.Error("native before an answer")
	}
	if verdict, _ := n.receives(t, echo(0, 255, testVNI)); verdict != actStolen || !native() {
		t.Errorf("an answer: verdict %d, native %v", verdict, native())
	}
	datagram := echo(8, 255, testVNI)
	datagram[23] = 17
	for name, frame := range map[string][]byte{
		"another network's": echo(8, 255, testVNI+1),
		"no ICMP":           withSumAt14(datagram),
		"another's, IPv6":   echo6(128, 255, testVNI+1),
		"someone else's":    between(macC, macB, echo(8, 255, testVNI)),
	} {
		if verdict, _ := n.receives(t, frame); verdict != actShot {
			t.Errorf("%s: verdict %d", name, verdict)
		}
	}
	for _, frame := range [][]byte{echo(8, 254, testVNI), echo6(128, 254, testVNI)} {
		if verdict, _ := n.receives(t, frame); verdict == actRedirect {
			t.Error("what a router passed on is answered")
		}
	}
	for _, how := range []struct {
		still   bool
		verdict uint32
	}{{true, actStolen}, {false, actShot}} {
		testutil.NoError(t, n.SetPackets(Packets{Redirected: true, Tunnelled: true, NativeStill: how.still}))
		if verdict, _ := n.receives(t, echo(8, 255, testVNI)); verdict != how.verdict {
			t.Errorf("a probe where a tunnel is wanted, still taken %v: verdict %d", how.still, verdict)
		}
	}
}

// TestNative: to a node that answered packets go as they are, until a router is on the way or it
// answers no more.
func TestNative(t *testing.T) {
	n := nodeBOnANetwork(t, 0)
	n.awaitTunnel(t)
	n.receives(t, echo(0, 255, testVNI))
	const native = heddleHeddleReasonREASON_REDIRECT_NATIVE
	six := ethernet(0x86dd, ipv6(overlay6(overlayB), overlay6(overlayA), 17, make([]byte, 24)))
	before := counters(t, n.Datapath)[native]
	if n.leaves(t, six); counters(t, n.Datapath)[native] != before {
		t.Error("IPv6 without a tunnel on the word of IPv4")
	}
	n.receives(t, echo6(129, 255, testVNI))
	for _, frame := range [][]byte{udp(overlayB, overlayA), six} {
		want := between(macB, macA, bytes.Clone(frame))
		if frame[12] == 8 {
			want[22]-- // hops
			want = withSumAt14(want)
		} else {
			want[21]--
		}
		for _, which := range []string{"the first", "by what the first found"} {
			before := counters(t, n.Datapath)[native]
			verdict, out := n.leaves(t, frame)
			if verdict != actRedirect || counters(t, n.Datapath)[native] != before+1 || !bytes.Equal(out, want) {
				t.Errorf("%s: verdict %d, sent:\n%swant\n%s", which, verdict, hex.Dump(out), hex.Dump(want))
			}
		}
	}
	n.ip(t, "neigh", "replace", "192.0.2.77", "lladdr", "02:00:00:00:00:77", "dev", "under", "nud", "permanent")
	n.ip(t, "route", "add", underlayA.String(), "via", "192.0.2.77", "dev", "under", "onlink")
	n.awaitTunnel(t)
	n.ip(t, "route", "del", underlayA.String())
	n.receives(t, echo(0, 255, testVNI))
	n.awaitTunnel(t) // in time
}

// TestNativeArrives: what a node sends without a tunnel is taken for what the overlay's device
// brings, if it has the node's hardware address; without the protection from anybody.
func TestNativeArrives(t *testing.T) {
	for without, forged := range map[uint64]uint32{0: actShot, 1 << model.ProtectOverlay: actRedirect} {
		t.Run(fmt.Sprintf("without %#x", without), func(t *testing.T) {
			n := nodeBOnANetwork(t, without)
			if verdict, _ := n.receives(t, between(macC, macB, udp(overlayA, overlayB))); verdict != forged {
				t.Errorf("first from another: verdict %d, want %d", verdict, forged)
			}
			came := between(macA, macB, udp(overlayA, overlayB))
			want := between([]byte{2, 0x48, 0x45, 0, 0, 5}, []byte{2, 0x48, 0x43, 0, 0, 5}, bytes.Clone(came))
			want[22]-- // hops
			want = withSumAt14(want)
			if verdict, out := n.receives(t, came); verdict != actRedirect || !bytes.Equal(out, want) {
				t.Errorf("verdict %d\n%swant\n%s", verdict, hex.Dump(out), hex.Dump(want))
			}
			if verdict, _ := n.receives(t, between(macC, macB, udp(overlayA, overlayB))); verdict != forged {
				t.Errorf("from another: verdict %d, want %d", verdict, forged)
			}
		})
	}
	n := nodeBOnANetwork(t, 0)
	byDevice(t, n)
	for name, frame := range map[string][]byte{
		"a source of this node":   between(macA, macB, udp(besideB, overlayB)),
		"a destination elsewhere": between(macA, macB, udp(overlayA, netip.MustParseAddr("198.51.100.7"))),
	} {
		if verdict, _ := n.receives(t, frame); verdict != actShot {
			t.Errorf("%s: verdict %d", name, verdict)
		}
	}
	if verdict, _ := n.receives(t, between(macA, macC, udp(overlayA, overlayB))); verdict == actRedirect {
		t.Error("for another's hardware address: taken")
	}
	for still, want := range map[bool]uint32{true: actRedirect, false: actShot} {
		testutil.NoError(t, n.SetPackets(Packets{Redirected: true, Tunnelled: true, NativeStill: still}))
		if verdict, _ := n.receives(t, between(macA, macB, udp(overlayA, overlayB))); verdict != want {
			t.Errorf("where a tunnel is wanted, still taken %v: verdict %d, want %d", still, verdict, want)
		}
	}
}

// byDevice: what has more to be asked than policy goes on by the overlay's device, and so does what
// only the node's stack does; a rule is asked and counted once.
func byDevice(t *testing.T, n atNodeB) {
	t.Helper()
	rejected := heddleHeddleReason(heddleHeddleReasonREASON_DROP_POLICY_REJECTED)
	data := between(macA, macB, frame(overlayA, overlayB, 80, tcpACK, nil))
	arrives := func(what string, frame []byte, device bool, reason heddleHeddleReason) {
		t.Helper()
		before := counters(t, n.Datapath)[reason]
		verdict, out := n.receives(t, frame)
		if verdict != actRedirect || bytes.Equal(out[:6], []byte{2, 0x48, 0xc0, 0, 2, 2}) != device || counters(t, n.Datapath)[reason] != before+1 {
			t.Errorf("%s: verdict %d, to %x, counted: %v", what, verdict, out[:6], counters(t, n.Datapath)[reason] != before)
		}
	}
	const redirected = heddleHeddleReasonREASON_REDIRECT_CONTAINER
	arrives("TCP", data, false, redirected)
	apply(t, n.Datapath, twoWays(overlayA, overlayB, model.PairVerdict{Default: model.VerdictReject}, model.PairVerdict{}))
	arrives("rejected", between(macA, macB, udp(overlayA, overlayB)), true, rejected)
	arrives("rejected, TCP", data, true, rejected)
	testutil.NoError(t, n.ApplyPolicy(model.PolicyChange{Reset: true}))
	testutil.NoError(t, n.SetLimit(5, Limit{Ingress: Cap{Rate: 1, Class: 1}}))
	arrives("a limit", between(macA, macB, udp(overlayA, overlayB)), true, heddleHeddleReasonREASON_ROUTE_LIMIT)
	testutil.NoError(t, n.ClearLimit(5))
	first := func(what string, flags byte) {
		t.Helper()
		if verdict, out := n.receives(t, between(macA, macB, frame(overlayA, overlayB, 80, flags, nil))); verdict != actRedirect || out[2] != 0xc0 {
			t.Errorf("%s: verdict %d, to %x", what, verdict, out[:6])
		}
	}
	first("a SYN", tcpSYN)
	first("the answer to one", tcpSYN|tcpACK)
	testutil.NoError(t, n.SetEndpoint(model.Endpoint{ID: 5, Name: "b", Addrs: []netip.Addr{overlayB}, Planes: intercepted(true)}, 0, ContainerSide{}))
	first("data for an intercepted container, earlier programs' sockets unknown", tcpACK)
	testutil.NoError(t, n.TakeOver())
	arrives("data for an intercepted container's own stack", data, false, redirected)
	testutil.NoError(t, n.objs.CrossedById.Put(uint32(5), uint32(1)))
	first("data where sockets cross", tcpACK)
	testutil.NoError(t, n.objs.CrossedById.Put(uint32(5), uint32(0)))
	crossing := heddleFlowKey{Daddr: fromAddr(netip.AddrFrom4([4]byte{250, 0, 5 << 2, 1})).Word[3]} // of endpoint 5
	testutil.NoError(t, n.objs.CrossedByWire.Put(crossing, heddleAddress{}))
	testutil.NoError(t, n.TakeOver())
	first("data where sockets of earlier programs cross", tcpACK)
	testutil.NoError(t, n.objs.CrossedById.Put(uint32(5), uint32(0)))
	var l net.Listener
	testutil.NoError(t, netns.Do(netns.Path(n.netns), func() (err error) {
		l, err = net.Listen("tcp4", "0.0.0.0:80")
		return err
	}))
	defer l.Close()
	first("data that a socket of the node matches", tcpACK)
}

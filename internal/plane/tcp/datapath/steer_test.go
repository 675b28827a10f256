package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
)

// Addresses of the packets in these tests: node A sends to node B, on which the programs run.
var (
	underlayA = netip.MustParseAddr("192.0.2.1")
	underlayB = netip.MustParseAddr("192.0.2.2")
	overlayA  = netip.MustParseAddr("10.244.1.2")
	overlayB  = netip.MustParseAddr("10.244.2.2")
)

const directPort = 17440

// loadForTest loads the programs, pinned nowhere and attached to nothing, with B's topology.
func loadForTest(t testing.TB) *Datapath {
	t.Helper()
	return loadForTestWithout(t, 0)
}

// loadForTestWithout does without a set of protections.
func loadForTestWithout(t testing.TB, without uint64) *Datapath {
	t.Helper()
	return loadForTestAs(t, without, func(*Config) {})
}

// loadForTestAs changes the node's configuration.
func loadForTestAs(t testing.TB, without uint64, change func(*Config)) *Datapath {
	t.Helper()
	testutil.NeedRoot(t, "loads BPF programs")
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Prefix6:   netip.MustParsePrefix("fd48:6464:1::/96"),
		Pool:      []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		NetworkID: 7, Underlay: underlayB, DirectPorts: model.PortRange{First: 17440, Last: 17455},
		Mark: 1, OverlayMark: 2, DropMark: 3, RejectMark: 4, ServiceMark: 6, VXLANPort: testVXLANPort, VNI: testVNI,
	}
	change(&cfg)
	if err := setVariables(spec, cfg); err != nil {
		t.Fatal(err)
	}
	if err := spec.Variables["config_without"].Set(without); err != nil {
		t.Fatal(err)
	}
	d := &Datapath{cfg: cfg}
	if err := spec.LoadAndAssign(&d.objs, nil); err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			t.Fatalf("%+v", ve)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	nodes := []model.Node{
		{Name: "a", Underlay: underlayA, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Planes: takesDirect(cfg.DirectPorts)},
		{Name: "b", Underlay: underlayB, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}, Planes: takesDirect(cfg.DirectPorts)},
	}
	if err := d.SetTopology("b", nil, nodes, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.SetEndpoint(model.Endpoint{ID: 5, Name: "y", Addrs: []netip.Addr{overlayB}, Planes: intercepted(true)}, 0, ContainerSide{}); err != nil {
		t.Fatal(err)
	}
	return d
}

// frame builds an Ethernet frame with a TCP segment from src to dst:port and the given flags and
// options.
func frame(src, dst netip.Addr, port uint16, flags byte, options []byte) []byte {
	for len(options)%4 != 0 {
		options = append(options, 0)
	}
	b := make([]byte, 14+20+20, 128)
	binary.BigEndian.PutUint16(b[12:], 0x0800)
	ip := b[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, 6
	binary.BigEndian.PutUint16(ip[2:], uint16(40+len(options)))
	copy(ip[12:], src.AsSlice())
	copy(ip[16:], dst.AsSlice())
	tcp := ip[20:]
	binary.BigEndian.PutUint16(tcp, 40000)
	binary.BigEndian.PutUint16(tcp[2:], port)
	tcp[12], tcp[13] = byte(5+len(options)/4)<<4, flags
	return append(b, options...)
}

// option gives a SYN option that B accepts from A, in its bytes.
func option() []byte {
	o := []byte{253, 16, 0x48, 0x64, 1 << 4, 7, 0, 80}
	o = append(o, overlayB.AsSlice()...)
	return append(o, overlayA.AsSlice()...)
}

func with(o []byte, at int, v byte) []byte {
	out := append([]byte(nil), o...)
	out[at] = v
	return out
}

const (
	tcpSYN, tcpACK = 0x02, 0x10
	actOK, actShot = 0xffffffff, 2 // on to the next filter; dropped
	actRedirect    = 7             // sent elsewhere
)

// TestSteerRejects sends named packets through from_underlay. Each must give the verdict and be
// counted under exactly the reason that docs/protocols/syn-option.md gives it.
func TestSteerRejects(t *testing.T) {
	d := loadForTest(t)
	padded := func(pre ...byte) []byte { return append(pre, option()...) }
	for _, tc := range []struct {
		name    string
		packet  []byte
		verdict uint32
		reason  heddleHeddleReason
	}{
		{"no option", frame(underlayA, underlayB, directPort, tcpSYN, nil), actOK, 0},
		{"other options only", frame(underlayA, underlayB, directPort, tcpSYN, []byte{2, 4, 5, 180, 4, 2, 1, 1}), actOK, 0},
		{"not a direct port", frame(underlayA, underlayB, 80, tcpSYN, option()), actOK, 0},
		{"not this node", frame(underlayA, overlayB, directPort, tcpSYN, option()), actOK, 0},
		{"not a SYN", frame(underlayA, underlayB, directPort, tcpACK, option()), actOK, 0},
		{"no listener, no veth", frame(underlayA, underlayB, directPort, tcpSYN, option()), actOK, 0},
		{"after padding", frame(underlayA, underlayB, directPort, tcpSYN, padded(1, 1, 2, 4, 5, 180)), actOK, 0},
		{"too short", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 1, 15)), actShot, heddleHeddleReasonREASON_DROP_OPTION_MALFORMED},
		{"too long", frame(underlayA, underlayB, directPort, tcpSYN, append(with(option(), 1, 20), 0, 0, 0, 0)), actShot, heddleHeddleReasonREASON_DROP_OPTION_MALFORMED},
		{"runs past the header", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 1, 60)), actShot, heddleHeddleReasonREASON_DROP_OPTION_MALFORMED},
		{"length 0", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 1, 0)), actShot, heddleHeddleReasonREASON_DROP_OPTION_MALFORMED},
		{"port 0", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 7, 0)), actShot, heddleHeddleReasonREASON_DROP_OPTION_MALFORMED},
		{"other experiment", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 2, 0x49)), actOK, 0},
		{"version 4", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 4, 0x40)), actShot, heddleHeddleReasonREASON_DROP_OPTION_VERSION},
		{"version 0", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 4, 0)), actShot, heddleHeddleReasonREASON_DROP_OPTION_VERSION},
		{"other network", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 5, 8)), actShot, heddleHeddleReasonREASON_DROP_OPTION_NETWORK},
		{"unknown node", frame(netip.MustParseAddr("192.0.2.9"), underlayB, directPort, tcpSYN, option()), actShot, heddleHeddleReasonREASON_DROP_UNKNOWN_NODE},
		{"source of another node", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 14, 2)), actShot, heddleHeddleReasonREASON_DROP_SOURCE_NOT_OF_NODE},
		{"source outside the overlay", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 12, 11)), actShot, heddleHeddleReasonREASON_DROP_SOURCE_NOT_OF_NODE},
		{"no such endpoint", frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 11, 99)), actOK, heddleHeddleReasonREASON_DROP_NO_ENDPOINT},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := counters(t, d)
			verdict, _, err := d.objs.FromUnderlay.Test(tc.packet)
			if err != nil {
				t.Fatal(err)
			}
			if verdict != tc.verdict {
				t.Errorf("verdict %d, want %d", verdict, tc.verdict)
			}
			after := counters(t, d)
			for i := range after {
				want := before[i]
				if tc.reason != 0 && i == int(tc.reason) {
					want++
				}
				if after[i] != want {
					t.Errorf("counter %s: %d, want %d", names.Reason(i), after[i], want)
				}
			}
		})
	}
}

func counters(t testing.TB, d *Datapath) []uint64 {
	t.Helper()
	c, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// FuzzSteer feeds arbitrary TCP options to the real program: whatever arrives is passed on or
// dropped with a reason, and never becomes a relayed or remembered connection of an endpoint that
// has no veth.
func FuzzSteer(f *testing.F) {
	testutil.NeedRoot(f, "loads BPF programs")
	f.Add(option(), byte(tcpSYN))
	f.Add([]byte{253, 1}, byte(tcpSYN))
	f.Add([]byte{1, 1, 1, 253, 16, 0x48, 0x64}, byte(tcpSYN))
	f.Add([]byte{}, byte(tcpACK))
	f.Add(with(option(), 4, 3<<4), byte(tcpSYN))
	d := loadForTest(f)
	f.Fuzz(func(t *testing.T, options []byte, flags byte) {
		options = options[:min(len(options), 40)]
		verdict, _, err := d.objs.FromUnderlay.Test(frame(underlayA, underlayB, directPort, flags, options))
		if err != nil {
			t.Fatal(err)
		}
		probe := len(options) >= 5 && bytes.Contains(options, []byte{253, 16, 0x48, 0x64, 3 << 4}) && flags&(tcpSYN|tcpACK) == tcpSYN
		if verdict != actOK && verdict != actShot && !(verdict == actRedirect && probe) {
			t.Errorf("verdict %d", verdict)
		}
		var k heddleFlowKey
		var v heddleFlow
		if it := d.objs.FlowByWire.Iterate(); it.Next(&k, &v) {
			t.Errorf("remembered %+v -> %+v", k, v)
		}
	})
}

package capture

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// seeds make the generated packets the same in every run.
var seeds = rand.NewPCG(2026, 11)

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// serialize builds a packet by gopacket's own means, checksums included.
func serialize(t testing.TB, parts ...gopacket.SerializableLayer) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, parts...); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// ipLayer gives the IP header for a packet from src to dst.
func ipLayer(src, dst netip.Addr, proto layers.IPProtocol) gopacket.SerializableLayer {
	if src.Is4() {
		return &layers.IPv4{Version: 4, TOS: 0x10, Id: 7, TTL: 63, Protocol: proto, Flags: layers.IPv4DontFragment, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
	}
	return &layers.IPv6{Version: 6, TrafficClass: 0x10, HopLimit: 63, NextHeader: proto, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
}

// segment is a TCP packet to build.
type segment struct {
	src, dst netip.AddrPort
	flags    uint8
	seq      uint32
	options  []layers.TCPOption
	payload  []byte
}

func (s segment) bytes(t testing.TB) []byte {
	t.Helper()
	tcp := &layers.TCP{SrcPort: layers.TCPPort(s.src.Port()), DstPort: layers.TCPPort(s.dst.Port()), Seq: s.seq, Window: 100, Options: s.options,
		SYN: s.flags&flagSYN != 0, ACK: s.flags&flagACK != 0, FIN: s.flags&flagFIN != 0, RST: s.flags&flagRST != 0}
	ip := ipLayer(s.src.Addr(), s.dst.Addr(), layers.IPProtocolTCP)
	if err := tcp.SetNetworkLayerForChecksum(ip.(gopacket.NetworkLayer)); err != nil {
		t.Fatal(err)
	}
	return serialize(t, ip, tcp, gopacket.Payload(s.payload))
}

// synOption is Heddle's option of network 7 as a layer.
func synOption(src netip.Addr, dst netip.AddrPort) layers.TCPOption {
	data := binary.BigEndian.AppendUint16(nil, optionExID)
	data = binary.BigEndian.AppendUint16(data, optionVersion<<12|7)
	data = binary.BigEndian.AppendUint16(data, dst.Port())
	data = append(append(data, dst.Addr().AsSlice()...), src.AsSlice()...)
	return layers.TCPOption{OptionType: optionKind, OptionLength: optionLength, OptionData: data}
}

// decode reads a packet by gopacket's own means, and demands that its checksums are right.
func decode(t testing.TB, raw []byte) gopacket.Packet {
	t.Helper()
	first := gopacket.LayerType(layers.LayerTypeIPv4)
	if raw[0]>>4 == 6 {
		first = layers.LayerTypeIPv6
	}
	p := gopacket.NewPacket(raw, first, gopacket.Default)
	if l := p.ErrorLayer(); l != nil {
		t.Fatalf("%x does not decode: %v", raw, l.Error())
	}
	if l, ok := p.TransportLayer().(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		if err := l.SetNetworkLayerForChecksum(p.NetworkLayer()); err != nil {
			t.Fatal(err)
		}
	}
	err, wrong := p.VerifyChecksums()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range wrong {
		t.Errorf("layer %d of %x: checksum %#x, want %#x", w.LayerIndex, raw, w.Actual, w.Correct)
	}
	return p
}

func mustParse(t testing.TB, raw []byte) packet {
	t.Helper()
	p, err := parse(raw)
	if err != nil {
		t.Fatalf("parse %x: %v", raw, err)
	}
	return p
}

// randomEnd gives an address of a random family.
func randomEnd(r *rand.Rand, v6 bool) netip.AddrPort {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], r.Uint64()|1<<61)
	binary.BigEndian.PutUint64(b[8:], r.Uint64())
	if v6 {
		return netip.AddrPortFrom(netip.AddrFrom16(b), uint16(r.Uint32()))
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(r.Uint32()))
}

// TestRewriteProperty: whatever the packet and the new addresses, of either family, the result has
// these addresses, right checksums, and the payload, flags and sequence number of the original.
func TestRewriteProperty(t *testing.T) {
	r := rand.New(seeds)
	for range 2000 {
		from6, to6 := r.IntN(2) == 0, r.IntN(2) == 0
		s := segment{src: randomEnd(r, from6), dst: randomEnd(r, from6), flags: uint8(r.IntN(32)) &^ 0x28, seq: r.Uint32(), payload: make([]byte, r.IntN(1500))}
		for i := range s.payload {
			s.payload[i] = byte(r.Uint32())
		}
		if r.IntN(2) == 0 {
			s.options = append(s.options, layers.TCPOption{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{5, 180}})
		}
		raw := s.bytes(t)
		p := mustParse(t, raw)
		// On the node most packets have a checksum that the device is to fill in.
		raw[p.l4+16], raw[p.l4+17] = byte(r.Uint32()), byte(r.Uint32())
		before := bytes.Clone(raw)
		src, dst := randomEnd(r, to6), randomEnd(r, to6)
		out := p.rewrite(src, dst, false)
		if !bytes.Equal(raw, before) {
			t.Fatal("rewriting changed the frame")
		}
		again := mustParse(t, out)
		if again.src != src || again.dst != dst || again.flags != p.flags {
			t.Fatalf("from %s to %s became %s to %s", src, dst, again.src, again.dst)
		}
		tcp := decode(t, out).Layer(layers.LayerTypeTCP).(*layers.TCP)
		if !bytes.Equal(tcp.Payload, s.payload) || tcp.Seq != s.seq || len(tcp.Options) != len(s.options) {
			t.Fatalf("payload or header changed: %v", tcp)
		}
	}
}

func TestRewriteUDP(t *testing.T) {
	src, dst := addrPort("10.244.0.2:5000"), addrPort("10.244.1.2:4000")
	ip := ipLayer(src.Addr(), dst.Addr(), layers.IPProtocolUDP)
	udp := &layers.UDP{SrcPort: layers.UDPPort(src.Port()), DstPort: layers.UDPPort(dst.Port())}
	if err := udp.SetNetworkLayerForChecksum(ip.(gopacket.NetworkLayer)); err != nil {
		t.Fatal(err)
	}
	raw := serialize(t, ip, udp, gopacket.Payload("who?"))
	p := mustParse(t, raw)
	if p.src != src || p.dst != dst {
		t.Fatalf("parsed as %s to %s", p.src, p.dst)
	}
	raw[p.l4+6] ^= 0xff // not filled in yet
	if got := decode(t, p.rewrite(src, dst, false)).ApplicationLayer().Payload(); string(got) != "who?" {
		t.Errorf("payload %q", got)
	}
	raw[p.l4+6], raw[p.l4+7] = 0, 0 // goes without
	if out := p.rewrite(src, dst, false); out[p.l4+6] != 0 || out[p.l4+7] != 0 {
		t.Error("a checksum was put where the sender wanted none")
	}
}

func TestSynOption(t *testing.T) {
	x, y := netip.MustParseAddr("10.244.1.2"), addrPort("10.244.2.2:80")
	mss := layers.TCPOption{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{5, 180}}
	scale := layers.TCPOption{OptionType: layers.TCPOptionKindWindowScale, OptionLength: 3, OptionData: []byte{7}}
	s := segment{src: addrPort("192.0.2.1:40000"), dst: addrPort("192.0.2.2:17410"), flags: flagSYN,
		options: []layers.TCPOption{mss, synOption(x, y), scale}, payload: []byte("fast")}
	p := mustParse(t, s.bytes(t))
	o, ok := p.option(nil)
	if !ok || o.src != x || o.dst != y || o.network != 7 {
		t.Fatalf("option %+v, %v", o, ok)
	}
	kinds := func(raw []byte) (list []layers.TCPOptionKind) {
		tcp := decode(t, raw).Layer(layers.LayerTypeTCP).(*layers.TCP)
		if string(tcp.Payload) != "fast" {
			t.Errorf("payload %q", tcp.Payload)
		}
		for _, o := range tcp.Options {
			if o.OptionType > layers.TCPOptionKindNop {
				list = append(list, o.OptionType)
			}
		}
		return list
	}
	src := netip.AddrPortFrom(x, 40000)
	if got := kinds(p.rewrite(src, y, false)); len(got) != 2 || got[0] != layers.TCPOptionKindMSS || got[1] != layers.TCPOptionKindWindowScale {
		t.Errorf("options left: %v", got)
	}
	if got := kinds(p.rewrite(src, y, true)); len(got) != 3 {
		t.Errorf("options kept: %v", got)
	}
	s.flags |= flagACK
	p = mustParse(t, s.bytes(t))
	if _, ok := p.option(nil); ok {
		t.Error("an option was read from a SYN-ACK")
	}
}

func TestParseRefuses(t *testing.T) {
	good := segment{src: addrPort("192.0.2.1:1"), dst: addrPort("192.0.2.2:2"), payload: []byte("x")}.bytes(t)
	for n := range len(good) {
		if _, err := parse(good[:n]); !errors.Is(err, errTruncated) {
			t.Errorf("%d of %d bytes: %v", n, len(good), err)
		}
	}
	if p := mustParse(t, append(bytes.Clone(good), 0, 0, 0)); len(p.raw) != len(good) {
		t.Errorf("the link's padding was kept: %d bytes of %d", len(p.raw), len(good))
	}
	if _, err := parse([]byte{0x50}); !errors.Is(err, errVersion) {
		t.Errorf("version 5: %v", err)
	}
	later := bytes.Clone(good)
	later[6], later[7] = 0, 100 // a fragment that begins at byte 800
	if p := mustParse(t, later); p.src.Port() != 0 || !p.fragment || p.l4 != 0 {
		t.Errorf("later fragment: %+v", p)
	}
	six := segment{src: addrPort("[2001:db8::1]:1"), dst: addrPort("[2001:db8::2]:2"), payload: []byte("x")}.bytes(t)
	hop := append(bytes.Clone(six[:ipv6Header]), protoTCP, 0, 1, 4, 0, 0, 0, 0) // with an extension header
	hop = append(hop, six[ipv6Header:]...)
	hop[5], hop[6] = hop[5]+8, protoDestOpts
	if p := mustParse(t, hop); p.dst.Port() != 2 || p.proto != protoTCP {
		t.Errorf("behind an extension header: %+v", p)
	}
}

// FuzzParse: bytes from outside must neither break the parser nor what is done with its result.
func FuzzParse(f *testing.F) {
	x, y := netip.MustParseAddr("10.244.1.2"), addrPort("10.244.2.2:80")
	f.Add(segment{src: addrPort("192.0.2.1:1"), dst: addrPort("192.0.2.2:2"), flags: flagSYN, options: []layers.TCPOption{synOption(x, y)}}.bytes(f))
	f.Add(segment{src: addrPort("[::1]:1"), dst: addrPort("[::1]:2"), payload: []byte("x")}.bytes(f))
	f.Add([]byte{0x45})
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := parse(raw)
		if err != nil {
			return
		}
		ends := [][2]netip.AddrPort{{p.src, p.dst}}
		if p.proto == protoTCP && p.l4 != 0 && !p.fragment {
			ends = append(ends, [2]netip.AddrPort{addrPort("10.244.1.2:1"), y}, [2]netip.AddrPort{addrPort("[::1]:1"), addrPort("[::1]:2")})
		}
		for _, e := range ends {
			for _, keep := range []bool{true, false} {
				out := p.rewrite(e[0], e[1], keep)
				again, err := parse(out)
				if err != nil || again.src.Addr() != e[0].Addr() || again.dst.Addr() != e[1].Addr() {
					t.Fatalf("%x became %x: %v", raw, out, err)
				}
				if again.proto == protoTCP && again.l4 != 0 && !again.fragment &&
					transportSum(protoTCP, again.src.Addr(), again.dst.Addr(), again.raw[again.l4:]) != 0xffff {
					t.Fatalf("%x: wrong checksum in %x", raw, out)
				}
				if begin, end := findOption(again.tcp()); end != begin && !keep && again.opens() {
					// Two options in one header: the first is gone.
					if b, e := findOption(p.tcp()); e == b {
						t.Fatalf("an option appeared: %x", out)
					}
				}
			}
		}
	})
}

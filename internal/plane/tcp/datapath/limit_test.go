package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// skbContext is struct __sk_buff as far as these tests set or read it.
type skbContext struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTci, VlanProto, Priority uint32
	IngressIfindex, Ifindex, TCIndex                                                      uint32
	Rest                                                                                  [36]uint32
}

// limitOut runs limit_out on a frame from src, on its first visit, and gives the verdict, the
// priority and the frame.
func limitOut(t *testing.T, d *Datapath, src netip.Addr, sport uint16) (matched bool, priority uint32, out []byte) {
	t.Helper()
	in := frame(src, netip.MustParseAddr("10.244.1.9"), 80, tcpACK, nil)
	binary.BigEndian.PutUint16(in[34:], sport)
	var after skbContext
	opts := ebpf.RunOptions{Data: in, DataOut: make([]byte, 256), Context: skbContext{Priority: 3}, ContextOut: &after}
	verdict, err := d.objs.LimitOut.Run(&opts)
	if err != nil {
		t.Fatal(err)
	}
	return verdict == 0xffffffff, after.Priority, opts.DataOut
}

// TestLimit: what limit_out does with packets of an endpoint's own stack, as its limits come,
// change and go.
func TestLimit(t *testing.T) {
	d := loadForTest(t)
	if matched, priority, _ := limitOut(t, d, overlayB, 1000); matched || priority != 3 {
		t.Errorf("no limit: matched %v, priority %#x", matched, priority)
	}
	if v := limitsInForce(t, d); v != 0 {
		t.Errorf("limits_in_force %d without limits", v)
	}
	set := func(l Limit) {
		t.Helper()
		if err := d.SetLimit(5, l); err != nil {
			t.Fatal(err)
		}
	}
	set(Limit{Egress: Cap{Rate: 8e6, Class: 5}})
	if matched, priority, _ := limitOut(t, d, overlayB, 1000); !matched || priority != 0x48640005 {
		t.Errorf("cap: matched %v, priority %#x", matched, priority)
	}
	if matched, _, _ := limitOut(t, d, netip.MustParseAddr("10.244.2.3"), 1000); matched {
		t.Error("the packet of another container was matched")
	}
	if v := limitsInForce(t, d); v != 1 {
		t.Errorf("limits_in_force %d with a limit", v)
	}
	dscp := uint8(46)
	set(Limit{DSCP: &dscp, Priority: model.PriorityHigh})
	matched, priority, out := limitOut(t, d, overlayB, 1000)
	if matched || priority != 6 || out[15] != 46<<2 {
		t.Errorf("mark: matched %v, priority %d, TOS %#x", matched, priority, out[15])
	}
	// The frames of these tests have the checksum 0: what it became makes up for the TOS alone.
	if sum := binary.BigEndian.Uint16(out[24:]); sum != ^uint16(46<<2) {
		t.Errorf("checksum %#x, want %#x", sum, ^uint16(46<<2))
	}
	if err := d.ClearLimit(5); err != nil {
		t.Fatal(err)
	}
	if matched, priority, out := limitOut(t, d, overlayB, 1000); matched || priority != 3 || out[15] != 0 {
		t.Errorf("lifted: matched %v, priority %#x, TOS %#x", matched, priority, out[15])
	}
	if v := limitsInForce(t, d); v != 0 {
		t.Errorf("limits_in_force %d after the last limit", v)
	}
}

// TestLimitConnections: connections get a class each, keep it, and none is outside the block.
func TestLimitConnections(t *testing.T) {
	d := loadForTest(t)
	const first = 0x8100
	if err := d.SetLimit(5, Limit{Egress: Cap{Rate: 8e6, Class: first, Connections: first}}); err != nil {
		t.Fatal(err)
	}
	// A class is taken from a connection that was silent for a second. On a slow machine this one
	// may look so.
	for !eachHasItsClass(t, d, first) {
		if t.Context().Err() != nil {
			t.Fatal("32 connections never had a class each")
		}
	}
	have, err := d.Limits()
	if err != nil || len(have) != 1 || have[5].Egress.Connections != first {
		t.Errorf("limits %+v, %v", have, err)
	}
	for port := uint16(2000); port < 3000; port++ { // more than there are classes
		if matched, priority, _ := limitOut(t, d, overlayB, port); !matched || priority&0xffff <= first || priority&0xffff >= first+uint32(LimitSlots)-1 {
			t.Fatalf("port %d of many: matched %v, class %#x", port, matched, priority&0xffff)
		}
	}
	if err := d.ClearLimit(5); err != nil {
		t.Fatal(err)
	}
	var slots heddleLimitSlots
	if err := d.objs.SlotsByClass.Lookup(uint32(first), &slots); ignoreAbsent(err) != nil || err == nil {
		t.Errorf("slots of a limit that is lifted: %v", err)
	}
}

// eachHasItsClass sends from 32 connections, twice, and reports whether each had one class that no
// other had.
func eachHasItsClass(t *testing.T, d *Datapath, first uint32) bool {
	t.Helper()
	const connections = 32
	began := time.Now()
	byPort := make(map[uint16]uint32)
	byClass := make(map[uint32]uint16)
	good := true
	for i := range uint16(2 * connections) {
		port := 1000 + i%connections
		matched, priority, _ := limitOut(t, d, overlayB, port)
		class := priority & 0xffff
		if !matched || class <= first || class >= first+uint32(LimitSlots)-1 {
			t.Fatalf("port %d: matched %v, class %#x", port, matched, class)
		}
		if other, taken := byClass[class]; taken && other != port {
			good = false
		}
		if had, ok := byPort[port]; ok && had != class {
			good = false
		}
		byPort[port], byClass[class] = class, port
	}
	if !good && time.Since(began) < 900*time.Millisecond {
		t.Fatalf("classes by port: %v", byPort)
	}
	return good
}

func limitsInForce(t *testing.T, d *Datapath) (v uint32) {
	t.Helper()
	if err := d.objs.LimitsInForce.Get(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

package datapath

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// relayed gives packets of a connection that node B relays: from port sport of overlay address src,
// by direct port number direct, to as many ports as there are direct ones.
func relayed(src netip.Addr, sport uint16, direct int, flags byte) []byte {
	o := option()
	copy(o[12:], src.AsSlice())
	o[7] += byte(direct)
	if flags&tcpSYN == 0 {
		o = nil
	}
	b := frame(underlayA, underlayB, directPort+uint16(direct), flags, o)
	binary.BigEndian.PutUint16(b[34:], sport)
	return b
}

const tupleSets, setTuples = 1024, 8 // of bpf/include/abi/flow.h

// wireEntries counts what is in a map from flow keys.
func wireEntries[V any](t *testing.T, m *ebpf.Map) (n int) {
	t.Helper()
	var (
		k heddleFlowKey
		v V
	)
	it := m.Iterate()
	for it.Next(&k, &v) {
		n++
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}

// told gives the events of relays that wait to be read.
func told(t *testing.T, d *Datapath) (all []string) {
	t.Helper()
	r, err := ringbuf.NewReader(d.objs.FlowEvents)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	r.SetDeadline(time.Now())
	for {
		rec, err := r.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		eachObservation(rec.RawSample, bootTime(), func(o flow.Observation) {
			if o.Relayed {
				all = append(all, string(o.Event)+" "+o.Connection.Reason)
			}
		})
	}
}

// TestWireFlood: whoever opens more relayed connections than a node remembers of one loses his own,
// and of those first the ones that have ended.
func TestWireFlood(t *testing.T) {
	victim, attacker := overlayA, netip.MustParseAddr("10.244.1.3")
	endpoint := model.Endpoint{ID: 5, Name: "y", Addrs: []netip.Addr{overlayB}, Planes: intercepted(true)}
	load := func(t *testing.T, without uint64) *Datapath {
		t.Helper()
		d := loadForTestWithout(t, without)
		if err := d.SetEndpoint(endpoint, 1, ContainerSide{}); err != nil {
			t.Fatal(err)
		}
		return d
	}
	arrives := func(t *testing.T, d *Datapath, packet []byte) bool {
		t.Helper()
		verdict, _, err := d.objs.FromUnderlay.Test(packet)
		if err != nil {
			t.Fatal(err)
		}
		return verdict == actRedirect
	}
	for name, tc := range map[string]struct {
		without uint64
		from    netip.Addr
		n       int
		end     bool // each at once
		lives   bool
	}{
		"another's":                         {0, attacker, 150_000, false, true},
		"another's, without the protection": {1 << model.ProtectFlowMemory, attacker, 150_000, false, false},
		"its own, which end":                {0, victim, 30_000, true, true},
		"its own":                           {0, victim, 30_000, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := load(t, tc.without)
			if !arrives(t, d, relayed(victim, 1, 0, tcpSYN)) {
				t.Fatal("the connection is not relayed")
			}
			if !arrives(t, d, relayed(victim, 1, 0, tcpACK)) {
				t.Fatal("the connection is not established")
			}
			before := counters(t, d)
			for i := range tc.n {
				sport, direct := uint16(1024+i%60000), 1+i/60000
				for range 2 { // what is sent twice counts as used
					if !arrives(t, d, relayed(tc.from, sport, direct, tcpSYN)) {
						t.Fatalf("connection %d is not relayed", i)
					}
				}
				if tc.end && !arrives(t, d, relayed(tc.from, sport, direct, tcpRST)) {
					t.Fatalf("the end of connection %d is not relayed", i)
				}
			}
			if got := arrives(t, d, relayed(victim, 1, 0, tcpACK)); got != tc.lives {
				t.Errorf("the idle connection lives: %v, want %v", got, tc.lives)
			}
			forgotten := counters(t, d)[heddleHeddleReasonREASON_CUT_RELAY_FORGOTTEN] - before[heddleHeddleReasonREASON_CUT_RELAY_FORGOTTEN]
			if tc.without != 0 {
				return
			}
			if (forgotten > 0) != !tc.end {
				t.Errorf("cut_relay_forgotten rose by %d", forgotten)
			}
			want := []string{"open relay_opened"} // of those of the flood none is established
			if !tc.lives {
				want = append(want, "cut cut_relay_forgotten")
			}
			if got := told(t, d); !slices.Equal(got, want) {
				t.Errorf("told %q, want %q", got, want)
			}
			flows, back := wireEntries[heddleFlow](t, d.objs.FlowByWire), wireEntries[heddleFlowKey](t, d.objs.WireByRelay)
			if most := 1 + int(tupleSets*setTuples); flows > most || flows < most*9/10 || back != flows {
				t.Errorf("%d flows and %d ways back are remembered, want %d at most of the flood", flows, back, most)
			}
		})
	}
}

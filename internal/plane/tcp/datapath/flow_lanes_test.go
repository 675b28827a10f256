package datapath

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// laneNested is LANE_NESTED of bpf/include/flow_lane.h.
const laneNested = 16

// putEvent is what programs do (bpf/include/flow_lane.h); false: the lane is full.
func putEvent(lane *heddleFlowLane, e heddleFlowEvent) bool {
	slots := uint64(len(lane.Slots))
	if atomic.LoadUint64(&lane.Head)-atomic.LoadUint64(&lane.Tail) >= slots-laneNested {
		return false
	}
	at := atomic.AddUint64(&lane.Head, 1) - 1
	s := &lane.Slots[at%slots]
	s.Event = e
	atomic.StoreUint64(&s.Turn, at+1)
	return true
}

// TestLaneTellsOnce: of programs that interrupt each other each event comes once, whole, those of
// one in their order, while the agent empties the lane; what found it full comes by the ring.
func TestLaneTellsOnce(t *testing.T) {
	const writers, each = 4, 50_000
	lane := new(heddleFlowLane)
	var byRing [writers][]uint64
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range uint64(each) {
				if !putEvent(lane, heddleFlowEvent{EndpointId: uint32(w), Cookie: i, BytesSent: ^i}) {
					byRing[w] = append(byRing[w], i)
					runtime.Gosched()
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	var byLane [writers][]uint64
	add := func(e *heddleFlowEvent) {
		if e.BytesSent != ^e.Cookie {
			t.Fatalf("half of an event: %+v", e)
		}
		byLane[e.EndpointId] = append(byLane[e.EndpointId], e.Cookie)
	}
	for running := true; running; {
		select {
		case <-ended:
			running = false
		default:
		}
		takeLane(lane, add)
	}
	for w := range writers {
		if len(byLane[w]) == 0 || !slices.IsSorted(byLane[w]) {
			t.Errorf("of writer %d came %d, in order: %v", w, len(byLane[w]), slices.IsSorted(byLane[w]))
		}
		all := slices.Concat(byLane[w], byRing[w])
		slices.Sort(all)
		if len(all) != each || len(slices.Compact(all)) != each {
			t.Errorf("of writer %d came %d events, want each of %d once", w, len(all), each)
		}
	}
}

// TestLaneWaitsForSlot: what is behind a slot that is being written comes when that has been.
func TestLaneWaitsForSlot(t *testing.T) {
	lane, taken := new(heddleFlowLane), []uint64(nil)
	add := func(e *heddleFlowEvent) { taken = append(taken, e.Cookie) }
	putEvent(lane, heddleFlowEvent{Cookie: 1})
	at := lane.Head
	lane.Head++ // another has taken a slot, and writes
	putEvent(lane, heddleFlowEvent{Cookie: 3})
	if takeLane(lane, add); !slices.Equal(taken, []uint64{1}) {
		t.Errorf("before it is written: %v", taken)
	}
	lane.Slots[at].Event.Cookie = 2
	atomic.StoreUint64(&lane.Slots[at].Turn, at+1)
	if takeLane(lane, add); !slices.Equal(taken, []uint64{1, 2, 3}) {
		t.Errorf("after: %v", taken)
	}
}

// TestLaneFull: a lane has room for what it says, and again when it has been emptied.
func TestLaneFull(t *testing.T) {
	lane := new(heddleFlowLane)
	for round := range 3 {
		n := 0
		for putEvent(lane, heddleFlowEvent{}) {
			n++
		}
		taken := 0
		takeLane(lane, func(*heddleFlowEvent) { taken++ })
		if n != len(lane.Slots)-laneNested || taken != n {
			t.Errorf("round %d: room for %d, %d taken", round, n, taken)
		}
	}
}

// TestFlowEventsInOrder: events that came by several ways are told in the order of their times, the
// end of a connection behind its opening also of one time; what is young waits.
func TestFlowEventsInOrder(t *testing.T) {
	const opened, over = uint8(heddleFlowEventKindFLOW_EVENT_OPENED), uint8(heddleFlowEventKindFLOW_EVENT_ENDED)
	var w flowEvents
	for _, e := range []heddleFlowEvent{{Time: 30, Cookie: 1, Kind: over}, {Time: 10, Cookie: 2, Kind: over}, {Time: 10, Cookie: 2, Kind: opened}, {Time: 20, Cookie: 1}} {
		w.add(&e)
	}
	tell := func(before uint64) (told []uint64) {
		for _, e := range w.until(before) {
			told = append(told, e.Time*100+e.Cookie*10+uint64(e.Kind))
		}
		return told
	}
	for _, step := range []struct {
		before uint64
		want   []uint64
	}{{10, nil}, {30, []uint64{1020, 1021, 2010}}, {30, nil}} {
		if got := tell(step.before); !slices.Equal(got, step.want) {
			t.Errorf("before %d: %v, want %v", step.before, got, step.want)
		}
	}
	w.add(&heddleFlowEvent{Time: 25, Cookie: 3})
	if got := tell(31); !slices.Equal(got, []uint64{2530, 3011}) {
		t.Errorf("at last: %v", got)
	}
}

// TestLanesAreTheMaps: the agent sees what is in the kernel's map, of every processor, and the
// programs see what it has read.
func TestLanesAreTheMaps(t *testing.T) {
	d := loadForTest(t)
	lanes, err := openFlowLanes(d.objs.FlowLanes)
	if err != nil {
		t.Fatal(err)
	}
	defer lanes.close()
	for cpu := range lanes.lanes {
		putEvent(&lanes.lanes[cpu], heddleFlowEvent{Cookie: uint64(cpu)})
	}
	var seen []uint64
	lanes.take(func(e *heddleFlowEvent) { seen = append(seen, e.Cookie) })
	for cpu := range lanes.lanes {
		var lane heddleFlowLane
		if err := d.objs.FlowLanes.Lookup(uint32(cpu), &lane); err != nil {
			t.Fatal(err)
		}
		if seen[cpu] != uint64(cpu) || lane.Head != 1 || lane.Tail != 1 || lane.Slots[0].Event.Cookie != uint64(cpu) {
			t.Errorf("processor %d: saw %d; the map has %d to %d", cpu, seen[cpu], lane.Tail, lane.Head)
		}
	}
}

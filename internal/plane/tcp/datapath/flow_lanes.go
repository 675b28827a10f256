package datapath

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// flowLanes are the processors' lanes of events (bpf/include/flow_lane.h), in this process's
// memory. The programs write slots and head, this side tail. One goroutine calls its methods.
type flowLanes struct {
	memory []byte
	lanes  []heddleFlowLane // the same
}

func openFlowLanes(m *ebpf.Map) (*flowLanes, error) {
	n := int(m.MaxEntries())
	memory, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(heddleFlowLane{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map lanes of events: %w", err)
	}
	return &flowLanes{memory, unsafe.Slice((*heddleFlowLane)(unsafe.Pointer(&memory[0])), n)}, nil
}

func (l *flowLanes) close() { _ = unix.Munmap(l.memory) } // fails for other memory only

// take gives add the events of all lanes, which have room again then.
func (l *flowLanes) take(add func(*heddleFlowEvent)) {
	for i := range l.lanes {
		takeLane(&l.lanes[i], add)
	}
}

// takeLane empties a lane up to a slot that is being written.
func takeLane(lane *heddleFlowLane, add func(*heddleFlowEvent)) {
	head, tail := atomic.LoadUint64(&lane.Head), lane.Tail
	for ; tail != head; tail++ {
		slot := &lane.Slots[tail%uint64(len(lane.Slots))]
		if atomic.LoadUint64(&slot.Turn) != tail+1 {
			break
		}
		add(&slot.Event)
	}
	atomic.StoreUint64(&lane.Tail, tail)
}

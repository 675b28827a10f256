package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// What giveBack takes for rest, and for worth it. An agent at rest allocates some tens of kB a
// second: heartbeats, and the store's.
const (
	restPeriod   = 5 * time.Second
	restAllocs   = 2 << 20 // bytes in a period, at most
	worthGiving  = 4 << 20 // bytes
	allocated    = "/gc/heap/allocs:bytes"
	liveObjects  = "/gc/heap/live:bytes"
	objects      = "/memory/classes/heap/objects:bytes"
	unusedInUse  = "/memory/classes/heap/unused:bytes"
	freeNotGiven = "/memory/classes/heap/free:bytes"
)

// giveBack gives the kernel the memory back that a burst of work has left, such as the start of
// hundreds of containers, once the agent is at rest. By itself Go collects what little is allocated
// then every two minutes, and keeps a tenth more than its heap may grow to: half of what is
// resident for a container among a thousand.
func giveBack(ctx context.Context) {
	ticker := time.NewTicker(restPeriod)
	defer ticker.Stop()
	before, kept := readHeap(), uint64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := readHeap()
		kept = min(kept, now.idle)
		if now.allocated-before.allocated < restAllocs && now.idle-kept >= worthGiving {
			debug.FreeOSMemory()
			now = readHeap()
			kept = now.idle
		}
		before = now
	}
}

// heap is what giveBack goes by, in bytes: all that was ever allocated, and what is resident
// although nothing that lives is in it, as far as the last collection knows.
type heap struct{ allocated, idle uint64 }

func readHeap() heap {
	s := []metrics.Sample{{Name: allocated}, {Name: liveObjects}, {Name: objects}, {Name: unusedInUse}, {Name: freeNotGiven}}
	metrics.Read(s)
	resident := s[2].Value.Uint64() + s[3].Value.Uint64() + s[4].Value.Uint64()
	return heap{s[0].Value.Uint64(), resident - min(resident, s[1].Value.Uint64())}
}

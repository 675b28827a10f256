package main

import (
	"runtime"
	"runtime/debug"
	"testing"
)

// kept is what the test holds on to, so that nothing of it is collected.
var kept [][]byte

// TestReadHeap checks that memory that was in use and is not any more is counted, and not what is
// in use or given back.
func TestReadHeap(t *testing.T) {
	debug.FreeOSMemory()
	const size, pieces = 64 << 10, 512
	start := readHeap()
	for range pieces {
		kept = append(kept, make([]byte, size))
	}
	debug.FreeOSMemory() // which learns that they live
	full := readHeap()
	if grown := full.allocated - start.allocated; grown < size*pieces {
		t.Errorf("allocated grew by %d bytes, want %d or more", grown, size*pieces)
	}
	if full.idle > start.idle+worthGiving {
		t.Errorf("idle is %d bytes with all in use, %d before", full.idle, start.idle)
	}
	kept = nil
	runtime.GC() // which gives little back
	if freed := readHeap(); freed.idle < full.idle+size*pieces/2 {
		t.Errorf("idle is %d bytes after %d were let go, %d before", freed.idle, size*pieces, full.idle)
	}
	debug.FreeOSMemory()
	if given := readHeap(); given.idle > start.idle+worthGiving {
		t.Errorf("idle is %d bytes after all was given back, %d at first", given.idle, start.idle)
	}
}

package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Copies is what the end of copies that copies prints.
type Copies struct {
	Messages uint64  `json:"messages"`
	ElapsedS float64 `json:"elapsed_s"`
}

// Of the file that both ends of copies map: how many messages were asked for, how many are copied
// and whether that is over, each on cache lines of its own; slots that ask and that answer; then
// the two buffers.
const (
	copiesAskedAt   = 0
	copiesDoneAt    = 256
	copiesOverAt    = 512
	copiesSlot      = 64
	copiesSlots     = 128 // as many as perftest has under way
	copiesAskAt     = 4096
	copiesAnswerAt  = copiesAskAt + copiesSlots*copiesSlot
	copiesBuffersAt = copiesAnswerAt + copiesSlots*copiesSlot
	// copiesPoll is how many answers a poll of perftest takes.
	copiesPoll = 16
	// copiesPiece is how much is copied at a time, as a router does: of 1 MiB and more, Go's copy
	// would go past the caches, which the router's does not.
	copiesPiece = 256 << 10
)

// CopiesBytes is how long the file has to be, of zeros, for messages of a size.
func CopiesBytes(size int) int {
	page := os.Getpagesize()
	return copiesBuffersAt + 2*((size+page-1)/page*page)
}

// copies copies messages by one thread, each of which another process asks for by a slot in shared
// memory and hears of by another one, as a router that does nothing else would: that process
// polls, and both have the buffers mapped.
func copies(ctx context.Context, s settings, streams Streams) error {
	if err := pin(s.cpu); err != nil {
		return err
	}
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	all, err := unix.Mmap(int(f.Fd()), 0, CopiesBytes(s.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("map %s: %w", s.path, err)
	}
	defer func() { _ = unix.Munmap(all) }()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	shared := sharedCopies{all, word(all, copiesAskedAt), word(all, copiesDoneAt), word(all, copiesOverAt)}
	if s.answer {
		return shared.ask(ctx, s.size)
	}
	c, err := shared.copy(ctx, s.size, s.duration)
	if err != nil {
		return err
	}
	return json.NewEncoder(streams.Out).Encode(c)
}

func word(all []byte, at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&all[at])) }

type sharedCopies struct {
	all               []byte
	asked, done, over *atomic.Uint32
}

func (c sharedCopies) slot(of int, n uint32) []byte {
	at := of + int(n%copiesSlots)*copiesSlot
	return c.all[at : at+copiesSlot]
}

// ask asks for messages and polls for answers until it is over.
func (c sharedCopies) ask(ctx context.Context, size int) error {
	clear(c.all[copiesBuffersAt : copiesBuffersAt+size]) // the pages are its own, too
	var request, answer [copiesSlot]byte
	var asked, seen uint32
	for looks := 1; c.over.Load() == 0; looks++ {
		for range min(c.done.Load()-seen, copiesPoll) {
			copy(answer[:], c.slot(copiesAnswerAt, seen))
			seen++
		}
		if asked-seen < copiesSlots {
			for ; asked-seen < copiesSlots; asked++ {
				copy(c.slot(copiesAskAt, asked), request[:])
			}
			c.asked.Store(asked)
		}
		if looks%spinPatience == 0 && ctx.Err() != nil {
			return fmt.Errorf("the other end of copies: %w", ctx.Err())
		}
	}
	return nil
}

// copy does what is asked for.
func (c sharedCopies) copy(ctx context.Context, size int, d time.Duration) (Copies, error) {
	defer c.over.Store(1)
	from := c.all[copiesBuffersAt : copiesBuffersAt+size]
	to := c.all[len(c.all)-(len(c.all)-copiesBuffersAt)/2:][:size]
	var request [copiesSlot]byte
	var done uint32
	var messages uint64
	start := time.Now()
	for time.Since(start) < d {
		asked, err := spinUntil(ctx, c.asked, func(v uint32) bool { return v != done })
		if err != nil {
			return Copies{}, err
		}
		n := min(asked-done, copiesPoll)
		for range n {
			copy(request[:], c.slot(copiesAskAt, done))
			for at := 0; at < size; at += copiesPiece {
				copy(to[at:], from[at:min(at+copiesPiece, size)])
			}
			copy(c.slot(copiesAnswerAt, done), request[:])
			done++
		}
		c.done.Store(done)
		messages += uint64(n)
	}
	return Copies{messages, time.Since(start).Seconds()}, nil
}

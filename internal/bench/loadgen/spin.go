package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Spins is what the end of spin that asks prints.
type Spins struct {
	RoundTrips uint32  `json:"round_trips"`
	ElapsedS   float64 `json:"elapsed_s"`
}

// Of the file that both ends of spin map: where the question and the answer are, each on cache
// lines of its own, and the question that ends it.
const (
	spinBytes    = 4096
	spinAnswerAt = spinBytes / 2
	spinOver     = math.MaxUint32
	// spinPatience is how many looks there are between two at the clock.
	spinPatience = 1 << 16
)

// spin sends a number to another process, and back, by memory that both look at without sleeping:
// nothing between two processes is faster. The file must be there, of
// spinBytes zeros.
func spin(ctx context.Context, s settings, streams Streams) error {
	if err := pin(s.cpu); err != nil {
		return err
	}
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	shared, err := unix.Mmap(int(f.Fd()), 0, spinBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("map %s: %w", s.path, err)
	}
	defer func() { _ = unix.Munmap(shared) }()
	question := (*atomic.Uint32)(unsafe.Pointer(&shared[0]))
	answer := (*atomic.Uint32)(unsafe.Pointer(&shared[spinAnswerAt]))
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	if s.answer {
		for last := uint32(0); last != spinOver; answer.Store(last) {
			if last, err = spinUntil(ctx, question, func(v uint32) bool { return v != last }); err != nil {
				return err
			}
		}
		return nil
	}
	start, n := time.Now(), uint32(0)
	for time.Since(start) < s.duration && n < spinOver-1 {
		n++
		question.Store(n)
		if _, err = spinUntil(ctx, answer, func(v uint32) bool { return v == n }); err != nil {
			return err
		}
	}
	r := Spins{n, time.Since(start).Seconds()}
	question.Store(spinOver)
	return json.NewEncoder(streams.Out).Encode(r)
}

// spinUntil looks at a number until it is what is wanted.
func spinUntil(ctx context.Context, at *atomic.Uint32, wanted func(uint32) bool) (uint32, error) {
	for looks := 1; ; looks++ {
		if v := at.Load(); wanted(v) {
			return v, nil
		}
		if looks%spinPatience == 0 && ctx.Err() != nil {
			return 0, fmt.Errorf("the other end of spin: %w", ctx.Err())
		}
	}
}

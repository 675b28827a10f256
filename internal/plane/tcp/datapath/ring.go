package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// followRing calls f with each record of a ring buffer until ctx ends.
func followRing(ctx context.Context, m *ebpf.Map, f func(record []byte)) error {
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return fmt.Errorf("open ring buffer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	defer func() {
		if stop() {
			_ = r.Close()
		}
	}()
	for {
		rec, err := r.Read()
		if errors.Is(err, ringbuf.ErrClosed) || errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read ring buffer: %w", err)
		}
		f(rec.RawSample)
	}
}

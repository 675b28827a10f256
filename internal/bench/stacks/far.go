package stacks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/delayline"
	"heddle.dev/heddle/internal/netns"
)

// The line of figure 5: 12 Mb/s with a round trip of 350 ms, a queue of one product of both, and
// losses that are no congestion.
const (
	farRate  = 12e6
	farTrip  = 350 * time.Millisecond
	farQueue = 525_000
	farLoss  = 0.005
	farPort  = 5005
)

// A run is measured after farWarmUp.
const (
	farWarmUp   = 6 * time.Second
	farDuration = 20 * time.Second
	farRuns     = 3
)

// Far is what a row did over the line.
type Far struct {
	Mode bench.Mode `json:"mode"`
	// BPS is what arrived, bits a second; the part that the line lost is of its own making and its
	// queue's.
	BPS  bench.Spread `json:"bps"`
	Lost bench.Spread `json:"lost"`
}

// FarLine says what the line was.
type FarLine struct {
	RateBPS   float64 `json:"rate_bps"`
	TripMS    float64 `json:"trip_ms"`
	Queue     int     `json:"queue_bytes"`
	Loss      float64 `json:"loss"`
	DurationS float64 `json:"duration_s"`
	Runs      int     `json:"runs"`
}

// runFar has a container of each row send over a line of its own, all at the same time, to a
// listener beyond the overlay: from n1's network namespace to one of the bench's.
func runFar(ctx context.Context, s *session.Session) (out []Far, err error) {
	name := s.Lab.Name + "-far"
	if err := netns.Create(name); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, netns.Delete(name)) }()
	wanted := modes(func(r Row) bool { return r.Far })
	rates, lost := make([][]float64, len(wanted)), make([][]float64, len(wanted))
	for run := range farRuns {
		s.Step(fmt.Sprintf("run %d: %.0f Mb/s, %s, loss %.1f %%", run+1, farRate/1e6, farTrip, 100*farLoss), run, farRuns, time.Duration(farRuns-run)*(farWarmUp+farDuration))
		var (
			wg   sync.WaitGroup
			errs = make([]error, len(wanted))
		)
		for i, mode := range wanted {
			wg.Go(func() {
				rate, part, err := farOnce(ctx, s.Lab, mode, i, netns.Path(name), uint64(run+1))
				if err != nil {
					errs[i] = fmt.Errorf("%s over the line, run %d: %w", mode, run+1, err)
					return
				}
				rates[i], lost[i] = append(rates[i], rate), append(lost[i], part)
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
	}
	for i, mode := range wanted {
		out = append(out, Far{mode, bench.SpreadOf(rates[i]), bench.SpreadOf(lost[i])})
	}
	return out, nil
}

// farOnce sends over line i.
func farOnce(ctx context.Context, l session.Lab, mode bench.Mode, i int, far string, seed uint64) (bps, lost float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, farWarmUp+farDuration+proc.ClientSlack)
	defer cancel()
	near := netip.AddrFrom4([4]byte{198, 18, byte(i), 1})
	there := delayline.Shape{Rate: farRate, Queue: farQueue, Delay: farTrip / 2, Loss: farLoss}
	line, err := delayline.Open(delayline.End{Netns: netns.Path(l.Name + "-n1"), Device: fmt.Sprintf("line%d", i), Addr: near},
		delayline.End{Netns: far, Device: fmt.Sprintf("line%d", i), Addr: near.Next()}, there, delayline.Shape{Delay: farTrip / 2}, seed)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, line.Close()) }()
	to := netip.AddrPortFrom(near.Next(), farPort)
	var listener net.Listener
	if err := netns.Do(far, func() (err error) {
		listener, err = net.Listen("tcp4", to.String())
		return err
	}); err != nil {
		return 0, 0, err
	}
	defer listener.Close()
	client := place{l}.Exec(ctx, mode, "n1/c1", "bash", "-c", fmt.Sprintf("exec cat /dev/zero > /dev/tcp/%s/%d", to.Addr(), to.Port()))
	if err := client.Start(); err != nil {
		return 0, 0, err
	}
	bps, err = receive(ctx, listener)
	// It has written into a connection that is gone, as it should.
	if ended := client.Wait(); ended != nil && !errors.As(ended, new(*exec.ExitError)) {
		err = errors.Join(err, ended)
	}
	counts, _ := line.Counts()
	return bps, float64(counts.Lost) / float64(max(counts.Lost+counts.Passed, 1)), err
}

// receive measures what comes by one connection, which it ends.
func receive(ctx context.Context, listener net.Listener) (bps float64, err error) {
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	conn, err := listener.Accept()
	if err != nil {
		return 0, fmt.Errorf("nobody connected over the line: %w", err)
	}
	defer conn.Close()
	var got atomic.Int64
	ended := make(chan error, 1)
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, err := conn.Read(b)
			got.Add(int64(n))
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	wait := func(d time.Duration) error {
		select {
		case err := <-ended:
			return fmt.Errorf("the connection ended early: %w", err)
		case <-time.After(d):
			return ctx.Err()
		}
	}
	if err := wait(farWarmUp); err != nil {
		return 0, err
	}
	before, began := got.Load(), time.Now()
	if err := wait(farDuration); err != nil {
		return 0, err
	}
	bps = float64(got.Load()-before) * 8 / time.Since(began).Seconds()
	return bps, conn.(*net.TCPConn).SetLinger(0) // a RST ends who sends
}

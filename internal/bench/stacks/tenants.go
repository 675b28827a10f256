package stacks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/netns"
)

// tenantCounts are how many containers of a node share one module at a time.
var tenantCounts = []int{1, 4, 14}

// tenantsMost are those of n1's containers that share a module at most.
var tenantsMost = tenantCounts[len(tenantCounts)-1]

// A run of tenants is measured after tenantsWarmUp.
const (
	tenantsWarmUp   = time.Second
	tenantsDuration = 3 * time.Second
)

// Tenants is what containers that share a module send together, and how evenly: Jain's index is 1
// if all have the same, and 1/n if one has all.
type Tenants struct {
	Mode    bench.Mode   `json:"mode"`
	Tenants int          `json:"tenants"`
	BPS     bench.Spread `json:"bps"`
	Jain    bench.Spread `json:"jain"`
}

// jain gives the index of fairness.
func jain(rates []float64) float64 {
	var sum, squares float64
	for _, r := range rates {
		sum += r
		squares += r * r
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(rates)) * squares)
}

// runTenants has containers of n1 send to n2, by one stack each of those that rows share.
func runTenants(ctx context.Context, s *session.Session) (all []Tenants, err error) {
	agents, err := s.Lab.Agents()
	if err != nil {
		return nil, err
	}
	to, err := s.Lab.IP(ctx, bench.Host, "n2/c1")
	if err != nil {
		return nil, err
	}
	for i, row := range Rows {
		if !row.Shared {
			continue
		}
		undo, err := relabel(ctx, agents[0], i)
		if err == nil {
			var of []Tenants
			of, err = tenantsOf(ctx, s, row.Mode, to)
			all = append(all, of...)
		}
		if err = errors.Join(err, undo(context.WithoutCancel(ctx))); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// tenantsOf measures one stack, which all containers of n1 have.
func tenantsOf(ctx context.Context, s *session.Session, mode bench.Mode, to netip.Addr) (all []Tenants, err error) {
	for _, n := range tenantCounts {
		var sums, indices []float64
		for run := range s.Runs {
			s.Step(fmt.Sprintf("run %d: %d tenants of %s", run+1, n, mode), run, s.Runs, 0)
			rates, err := tenantsOnce(ctx, s.Lab, to, n)
			if err != nil {
				return nil, fmt.Errorf("%d tenants of %s: %w", n, mode, err)
			}
			sum := 0.0
			for _, r := range rates {
				sum += r
			}
			sums, indices = append(sums, sum), append(indices, jain(rates))
		}
		all = append(all, Tenants{mode, n, bench.SpreadOf(sums), bench.SpreadOf(indices)})
	}
	return all, nil
}

// relabel gives so many containers of n1 the profile of a row; undo gives those
// without one none again, and the others their own.
func relabel(ctx context.Context, agent *api.Client, row int) (undo func(context.Context) error, err error) {
	set := func(ctx context.Context, c int, value string) error {
		return setLabel(ctx, agent, fmt.Sprintf("n1/c%d", c), value)
	}
	for c := 1; c <= tenantsMost; c++ {
		err = errors.Join(err, set(ctx, c, rowLabel(row)))
	}
	return func(ctx context.Context) (err error) {
		for c := 1; c <= tenantsMost; c++ {
			value := ""
			if c > 2 {
				value = rowLabel((c - 3) / 2)
			}
			err = errors.Join(err, set(ctx, c, value))
		}
		return err
	}, err
}

// tenantsOnce gives what came of each of n containers, bits a second.
func tenantsOnce(ctx context.Context, l session.Lab, to netip.Addr, n int) (rates []float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, tenantsWarmUp+tenantsDuration+proc.ClientSlack)
	defer cancel()
	var listener net.Listener
	if err := netns.Do(netns.Path(l.Name+"-n2"), func() (err error) {
		listener, err = net.Listen("tcp4", netip.AddrPortFrom(to, farPort).String())
		return err
	}); err != nil {
		return nil, err
	}
	defer listener.Close()
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	var senders sync.WaitGroup
	defer senders.Wait()
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			err = errors.Join(err, c.(*net.TCPConn).SetLinger(0), c.Close()) // a RST ends who sends
		}
	}()
	got := make([]atomic.Int64, n)
	for i := range n {
		client := l.Exec(ctx, bench.Heddle, fmt.Sprintf("n1/c%d", i+1), "bash", "-c", fmt.Sprintf("exec cat /dev/zero > /dev/tcp/%s/%d", to, farPort))
		if err := client.Start(); err != nil {
			return nil, err
		}
		senders.Go(func() { _ = client.Wait() }) // it ends because its connection does
		conn, err := listener.Accept()
		if err != nil {
			return nil, fmt.Errorf("tenant %d did not connect: %w", i+1, err)
		}
		conns = append(conns, conn)
		go func() {
			b := make([]byte, 1<<18)
			for {
				k, err := conn.Read(b)
				got[i].Add(int64(k))
				if err != nil {
					return
				}
			}
		}()
	}
	if err := proc.Pause(ctx, tenantsWarmUp); err != nil {
		return nil, err
	}
	before, began := make([]int64, n), time.Now()
	for i := range got {
		before[i] = got[i].Load()
	}
	if err := proc.Pause(ctx, tenantsDuration); err != nil {
		return nil, err
	}
	for i := range got {
		rates = append(rates, float64(got[i].Load()-before[i])*8/time.Since(began).Seconds())
	}
	return rates, nil
}

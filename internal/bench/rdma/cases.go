package rdma

import (
	"context"
	"fmt"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/model"
)

// Pairs are the numbers of queue pairs of figure 11 of FreeFlow, NSDI 2019.
// Buffers of 512 are 8 MiB together, which a copy has to get from beyond a processor's own caches.
var Pairs = []int{1, 16, 64, 512}

// pairBytes is what their messages have.
const pairBytes = 8 << 10

// pairs are the cases of many queue pairs that are not there for their size.
func pairs(scope bench.Scope) (cases []Case) {
	for _, n := range Pairs {
		if n != 1 && n != 64 {
			cases = append(cases, Case{Program: "ib_write_bw", Scope: scope, Bytes: pairBytes, QPs: n})
		}
	}
	return cases
}

// Caps are those of its figure 13, in bits a second.
var Caps = []int64{100e6, 1e9, 10e9}

// capped are the cases with a cap. At the lowest one, what is under way has to pass within the run.
func capped(scope bench.Scope) (cases []Case) {
	for _, bps := range Caps {
		c := Case{Program: "ib_write_bw", Scope: scope, Bytes: 64 << 10, QPs: 1, CapBPS: bps}
		if bps < 1e9 {
			c.Bytes = 8 << 10
		}
		cases = append(cases, c)
	}
	return cases
}

// apps are the cases of programs for sockets and for MPI, with what is compared: figures 14 to 16.
func apps(scope bench.Scope) (cases []Case) {
	for _, bytes := range []int{64, 64 << 10} {
		for _, program := range []string{"netpipe", "netpipe-overlay", "netpipe-host"} {
			cases = append(cases, Case{Program: program, Scope: scope, Bytes: bytes})
		}
	}
	for _, program := range []string{"train", "train-overlay", "shuffle", "shuffle-overlay"} {
		cases = append(cases, Case{Program: program, Scope: scope, Bytes: 8 << 20})
	}
	return cases
}

func capText(bps int64) string {
	if bps < 1e9 {
		return fmt.Sprintf("%d Mb/s", bps/1e6)
	}
	return fmt.Sprintf("%d Gb/s", bps/1e9)
}

// limit has the client's container capped as a case wants it, until lift.
func (r *runner) limit(ctx context.Context, c Case) (lift func() error, err error) {
	lift = func() error { return nil }
	if c.CapBPS == 0 {
		return lift, nil
	}
	client, _ := c.Scope.Ends()
	set := func(ctx context.Context, l model.Limits) error {
		_, err := r.agents[0].SetLimits(ctx, client, api.LimitsChange{Limits: l})
		return err
	}
	if err := set(ctx, model.Limits{Egress: model.Rate(c.CapBPS)}); err != nil {
		return lift, fmt.Errorf("cap %s: %w", client, err)
	}
	// Also when the run is over because of an interrupt.
	return func() error { return set(context.WithoutCancel(ctx), model.Limits{}) }, nil
}

package tcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/tcp/lockwait"
)

// FaultPassStuck: a pass over the node's sockets waits for the lock of one. What the others want of
// it is done without it, as far as that is possible.
const FaultPassStuck api.FaultReason = "pass_stuck"

// withoutPass says, by the name of a pass, what becomes of its work while it is stuck.
var withoutPass = map[string]string{
	"cut":               "connections that are forbidden are ended one by one",
	"cut_leaving":       "connections of endpoints that migrate are ended one by one",
	"cut_clear":         "connections from before encryption are ended one by one",
	"cut_firewall":      "connections that the nodes' firewalls forbid are ended one by one",
	"end_over_quota":    "listeners above the limit of ports are ended one by one",
	"list":              "lists of connections may lack some",
	"follow_profile":    "live connections keep the stack profile they have; new ones have theirs",
	"give_up":           "direct connects on a path that is blocked end at their own time",
	"cut_plain":         "forbidden connections of a container's processes that are not intercepted are left to their packets",
	"cut_leaving_plain": "so are those of a container that migrates",
}

// passesChanged is told that a pass has got stuck or come back. It does not wait.
func (p *Plane) passesChanged() {
	select {
	case p.passes <- struct{}{}:
	default: // it is noted
	}
}

// followPasses keeps the fault until ctx ends, and has done again what could not be done.
func (p *Plane) followPasses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.passes:
		}
		stuck := p.datapath.Stuck()
		if len(stuck) == 0 {
			p.cfg.Faults.Clear(FaultPassStuck, "")
		} else if err := p.stuckError(stuck); p.cfg.Faults.Set(FaultPassStuck, "", err) {
			p.log.Error("a pass over the node's sockets waits for the lock of one", "reason", FaultPassStuck, "err", err)
		}
		if p.changedStacks.Load() && p.cfg.StacksChanged != nil {
			p.cfg.StacksChanged()
		}
	}
}

// stuckError says what waits, for whom, what that costs, and what to do.
func (p *Plane) stuckError(stuck []lockwait.Stuck) error {
	var waits, costs []string
	seen := make(map[string]bool)
	for _, s := range stuck {
		waits = append(waits, fmt.Sprintf("%s since %s", s.Name, s.Since.UTC().Format(time.RFC3339)))
		pass, _, _ := strings.Cut(s.Name, " of ")
		if cost := withoutPass[pass]; cost != "" && !seen[pass] {
			seen[pass] = true
			costs = append(costs, cost)
		}
	}
	whose := "of a socket"
	addrs, err := p.datapath.Locked()
	if err != nil {
		p.log.Warn("cannot tell whose socket is locked", "err", err)
	}
	for i, a := range addrs {
		if whose += ", "; i == 0 {
			whose = "of a socket of the endpoint at "
		}
		whose += a.String()
	}
	return fmt.Errorf("waits for the lock %s: %s; %s: end the program that is in a call on it with memory that does not come (userfaultfd, FUSE, a network file system)",
		whose, strings.Join(waits, ", "), strings.Join(costs, "; "))
}

// unlessStuck gives err unless it says that a pass is stuck, which the fault names.
func unlessStuck(err error) error {
	if errors.Is(err, lockwait.ErrStuck) {
		return nil
	}
	return err
}

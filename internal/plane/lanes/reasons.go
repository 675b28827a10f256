package lanes

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// reasons are why a connection got no lanes, and goes on by TCP.
type reasons struct {
	notChosen trap.Reason // the profile of an end does not say shared-memory
	elsewhere trap.Reason // the other end is no endpoint of this node
	limited   trap.Reason // an end has a cap, which nobody could hold
	socket    trap.Reason // not an established connection of the endpoint's
	full      trap.Reason // an end has as many connections with lanes as it may
	busy      trap.Reason // too many questions at a time
	failed    trap.Reason // what else failed
}

func newReasons() reasons {
	quiet := func(name string) trap.Reason { return trap.Reason{Name: name, Errno: unix.EOPNOTSUPP, Quiet: true} }
	return reasons{
		notChosen: quiet("memory_not_chosen"), elsewhere: quiet("memory_elsewhere"), limited: quiet("memory_limited"), socket: quiet("memory_socket"),
		full: quiet("memory_full"), busy: quiet("memory_busy"),
		failed: trap.Reason{Name: "memory_failed", Errno: unix.EOPNOTSUPP},
	}
}

func (r *reasons) all() []*trap.Reason {
	return []*trap.Reason{&r.notChosen, &r.elsewhere, &r.limited, &r.socket, &r.full, &r.busy, &r.failed}
}

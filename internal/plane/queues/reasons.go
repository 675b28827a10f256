package queues

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// reasons are why a process or a connection got no queues, and goes on by system calls, or has none
// any more.
type reasons struct {
	notChosen trap.Reason // the endpoint's profile does not say queues
	socket    trap.Reason // not an established connection of the node's TCP
	gone      trap.Reason // there is no service just now
	full      trap.Reason // no region, or no stream, is free
	busy      trap.Reason // too many questions at a time
	failed    trap.Reason // what else failed
	hangs     trap.Reason // the service did not answer and was killed
}

func newReasons() reasons {
	quiet := func(name string, errno unix.Errno) trap.Reason {
		return trap.Reason{Name: name, Errno: errno, Quiet: true}
	}
	return reasons{
		notChosen: quiet("queues_not_chosen", unix.EOPNOTSUPP), socket: quiet("queues_socket", unix.EOPNOTSUPP),
		gone: quiet("queues_gone", unix.EAGAIN), full: quiet("queues_full", unix.EOPNOTSUPP), busy: quiet("queues_busy", unix.EAGAIN),
		failed: trap.Reason{Name: "queues_failed", Errno: unix.EOPNOTSUPP},
		hangs:  trap.Reason{Name: "queues_hangs", Errno: unix.EAGAIN},
	}
}

func (r *reasons) all() []*trap.Reason {
	return []*trap.Reason{&r.notChosen, &r.socket, &r.gone, &r.full, &r.busy, &r.failed, &r.hangs}
}

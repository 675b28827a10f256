package stacks

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// reasons are why a call was not answered as the module would have it.
type reasons struct {
	refused   trap.Reason // there is no module
	untrapped trap.Reason // the container was started without the annotation: the kernel runs its TCP
	ended     trap.Reason // the module ended before it answered
	memory    trap.Reason // the caller's memory could not be read or written
	queue     trap.Reason // the program has connected its socket itself
	spare     trap.Reason // a socket that was not bound or connected cannot be used again
	queueFull trap.Reason // a listener's queue took no more
	failed    trap.Reason // what else failed
	notKept   trap.Reason // the fd keeper did not take a socket
	hangs     trap.Reason // a module did not answer and was killed
}

func newReasons() reasons {
	return reasons{
		untrapped: trap.Reason{Name: "stack_not_trapped", Errno: unix.ENETDOWN},
		refused:   trap.Reason{Name: "stack_no_module", Errno: unix.ENETDOWN},
		ended:     trap.Reason{Name: "stack_module_ended", Errno: unix.ECONNRESET},
		memory:    trap.Reason{Name: "stack_memory", Errno: unix.EFAULT, Quiet: true},
		queue:     trap.Reason{Name: "stack_queue", Errno: unix.EINVAL, Quiet: true},
		spare:     trap.Reason{Name: "stack_spare_full", Errno: unix.ECONNABORTED, Quiet: true},
		queueFull: trap.Reason{Name: "stack_queue_full", Errno: unix.ECONNABORTED, Quiet: true},
		failed:    trap.Reason{Name: "stack_failed", Errno: unix.ENETDOWN, Passes: true},
		notKept:   trap.Reason{Name: "stack_not_kept", Errno: unix.ENETDOWN},
		hangs:     trap.Reason{Name: "stack_module_hangs", Errno: unix.ENETDOWN},
	}
}

func (r *reasons) all() []*trap.Reason {
	return []*trap.Reason{&r.refused, &r.untrapped, &r.ended, &r.memory, &r.queue, &r.spare, &r.queueFull, &r.failed, &r.notKept, &r.hangs}
}

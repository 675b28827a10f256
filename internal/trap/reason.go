package trap

import (
	"errors"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Reason says why a trapped call was not answered as its handler would, or a listener not served,
// and counts how often. The server has some; each handler has its own.
type Reason struct {
	// Name is the metric label.
	Name string
	// Errno is what the caller's system call returns.
	Errno unix.Errno
	// Passes says that the caller is told the errno of the cause instead, where that means the same
	// to the caller as it does to the agent.
	Passes bool
	// Quiet says that the log need not have it: it is the container's own doing.
	Quiet bool

	count atomic.Uint64
}

// Count gives how often Add was called.
func (r *Reason) Count() uint64 { return r.count.Load() }

// Add counts the reason once more.
func (r *Reason) Add() { r.count.Add(1) }

// Because gives err, which must not be nil, with the reason.
func (r *Reason) Because(err error) error { return &Failure{r, err} }

// Failure is an error with its reason.
type Failure struct {
	Reason *Reason
	Err    error
}

func (f *Failure) Error() string { return f.Err.Error() }

// Unwrap gives the cause.
func (f *Failure) Unwrap() error { return f.Err }

// errno is what the caller is told of a failure that err caused.
func (r *Reason) errno(err error) unix.Errno {
	var cause unix.Errno
	if r.Passes && errors.As(err, &cause) {
		switch cause {
		case unix.ENOMEM, unix.ENOBUFS, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.EACCES:
			return cause
		}
	}
	return r.Errno
}

// reasons are the server's own.
type reasons struct {
	unknown      Reason // no endpoint for the listener's metadata, or removed since
	callerGone   Reason // killed or interrupted between receipt and answer: nobody to answer
	callerNofile Reason // the caller's RLIMIT_NOFILE
	agentNofile  Reason // the agent's own, or the system's, file table is full
	answer       Reason // the kernel refused the answer
	receive      Reason // the listener broke; its loop ended
	handoff      Reason // malformed hand-off from a runtime
	tooMany      Reason // Config.MaxListeners
	keep         Reason // the fd keeper did not take a listener
	resume       Reason // a kept listener could not be resumed
	netns        Reason // the caller's network namespace cannot be told
	otherNetns   Reason // the caller is in another network namespace than its endpoint: it keeps to its own
	noEndpoint   Reason // the caller's network namespace has no endpoint: it keeps to its own
	noAgent      Reason // no agent ran: the caller keeps to its own
	noAnswer     Reason // no agent ran: a library is to ask again
}

// newReasons is the one table from what went wrong to what the caller's system call returns.
// Handlers add to it.
func newReasons() *reasons {
	return &reasons{
		unknown:      Reason{Name: "refuse_unknown_endpoint", Errno: unix.ENETDOWN},
		callerGone:   Reason{Name: "caller_gone", Quiet: true},
		callerNofile: Reason{Name: "caller_nofile", Errno: unix.EMFILE, Quiet: true}, // raised in the caller's context, by its own limit
		agentNofile:  Reason{Name: "agent_nofile", Errno: unix.ENFILE},               // the node is out of descriptors, not the caller
		answer:       Reason{Name: "answer", Errno: unix.ENETDOWN, Passes: true},
		receive:      Reason{Name: "receive", Errno: unix.ENETDOWN},
		handoff:      Reason{Name: "handoff", Errno: unix.ENETDOWN},
		tooMany:      Reason{Name: "too_many_listeners", Errno: unix.ENETDOWN},
		keep:         Reason{Name: "park", Errno: unix.ENETDOWN},
		resume:       Reason{Name: "resume", Errno: unix.ENETDOWN},
		netns:        Reason{Name: "caller_netns", Errno: unix.ENETDOWN},
		otherNetns:   Reason{Name: "foreign_netns", Errno: unix.ENETDOWN},
		noEndpoint:   Reason{Name: "no_endpoint", Errno: unix.ENETDOWN, Quiet: true},
		noAgent:      Reason{Name: "no_agent", Errno: unix.ENETDOWN, Quiet: true},
		noAnswer:     Reason{Name: "no_agent_asked", Errno: unix.EAGAIN, Quiet: true},
	}
}

// all lists them.
func (r *reasons) all() []*Reason {
	return []*Reason{&r.unknown, &r.callerGone, &r.callerNofile, &r.agentNofile, &r.answer, &r.receive, &r.handoff, &r.tooMany,
		&r.keep, &r.resume, &r.netns, &r.otherNetns, &r.noEndpoint, &r.noAgent, &r.noAnswer}
}

// ofAnswer gives the reason why the kernel did not take an answer.
func (r *reasons) ofAnswer(err error) *Reason {
	switch {
	case gone(err):
		return &r.callerGone
	case errors.Is(err, unix.EMFILE):
		return &r.callerNofile
	case errors.Is(err, unix.ENFILE):
		return &r.agentNofile
	}
	return &r.answer
}

// of gives the reason of an error of a handler.
func (r *reasons) of(err error) *Reason {
	if f := (*Failure)(nil); errors.As(err, &f) {
		return f.Reason
	}
	return &r.answer
}

// gone reports whether an answer failed because nobody waits for it: the caller is dead (ENOENT),
// was interrupted while it took the descriptor (ESRCH), or another reader has answered
// (EINPROGRESS).
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINPROGRESS)
}

package intercept

import (
	"errors"

	"golang.org/x/sys/unix"
)

// failure says why a trapped call was not answered with a socket, or a listener not served.
type failure uint8

const (
	failNone         failure = iota
	failUnknown              // no endpoint for the listener's metadata, or removed since
	failCallerGone           // killed or interrupted between receipt and answer: nobody to answer
	failCallerNofile         // the caller's RLIMIT_NOFILE
	failAgentNofile          // the agent's own, or the system's, file table is full
	failMake                 // SocketMaker
	failOwner                // the caller's owner cannot be told, or given to the socket
	failAnswer               // the kernel refused the answer
	failReceive              // the listener broke; its loop ended
	failHandoff              // malformed hand-off from a runtime
	failTooMany              // Config.MaxListeners
	failKeep                 // the keeper did not take a listener
	failResume               // a kept listener could not be resumed
	failNetns                // the caller's network namespace cannot be told
	failForeignNetns         // the caller is in another network namespace than its endpoint: it keeps to its own
	failQuota                // the endpoint has as many sockets as it may
	failIoctl                // an ioctl of sockets could not be made for the caller
	failNoEndpoint           // the caller's network namespace has no endpoint: it keeps to its own
	failLinger               // a program kept the prefiller waiting in close(): its endpoint gets no more batches
	numFailures
)

// failureNames are the metric labels.
var failureNames = [numFailures]string{
	failNone: "none", failUnknown: "refuse_unknown_endpoint", failCallerGone: "caller_gone",
	failCallerNofile: "caller_nofile", failAgentNofile: "agent_nofile", failMake: "make_socket",
	failOwner: "caller_owner", failAnswer: "answer", failReceive: "receive", failHandoff: "handoff",
	failTooMany: "too_many_listeners", failKeep: "park", failResume: "resume",
	failNetns: "caller_netns", failForeignNetns: "foreign_netns",
	failIoctl: "ioctl", failQuota: "socket_quota", failNoEndpoint: "no_endpoint",
	failLinger: "lingering_close",
}

// String gives the metric label.
func (f failure) String() string { return failureNames[f] }

// errnoOf is the one table from what went wrong to what the caller's socket() returns. err is the cause;
// its errno is passed on only where it means the same to the caller as it does to the agent.
func errnoOf(f failure, err error) unix.Errno {
	var cause unix.Errno
	errors.As(err, &cause)
	switch f {
	case failCallerNofile:
		return unix.EMFILE
	case failAgentNofile, failQuota:
		return unix.ENFILE // the node is out of descriptors, or the container of sockets; not the caller
	case failMake, failAnswer:
		switch cause {
		case unix.ENOMEM, unix.ENOBUFS, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.EACCES:
			return cause
		}
	}
	return unix.ENETDOWN
}

// makeFailure names why the agent could not make or prepare a socket.
func makeFailure(err error) failure {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return failAgentNofile
	}
	return failMake
}

// injectFailure names why the kernel did not take a socket for a caller.
func injectFailure(err error) failure {
	switch {
	case gone(err):
		return failCallerGone
	case errors.Is(err, unix.EMFILE):
		return failCallerNofile // raised in the caller's context, by its own limit
	case errors.Is(err, unix.ENFILE):
		return failAgentNofile
	}
	return failAnswer
}

// gone reports whether an answer failed because nobody waits for it: the caller is dead (ENOENT), was
// interrupted while it took the descriptor (ESRCH), or another reader has answered (EINPROGRESS).
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINPROGRESS)
}

package runtime

import (
	"fmt"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// Numbers of Linux that more than one architecture has alike.
const (
	solSocket  = 1
	solIP      = 0
	solTCP     = 6
	solIPv6    = 41
	msgOOB     = 1
	eNoSys     = 38
	eOpNotSupp = 95
)

// Options of SOL_SOCKET that a socket pair has not, or has otherwise than TCP.
var (
	stackBothOptions = []uint64{9 /* SO_KEEPALIVE */, 13 /* SO_LINGER */, 15 /* SO_REUSEPORT */}
	// A pair has to have a least send buffer.
	stackSetOptions = append([]uint64{7 /* SO_SNDBUF */}, stackBothOptions...)
	stackGetOptions = append([]uint64{4 /* SO_ERROR */, 30 /* SO_ACCEPTCONN */, 38 /* SO_PROTOCOL */, 39 /* SO_DOMAIN */}, stackBothOptions...)
)

// stackTraps are the calls of a socket whose TCP a module may run (package plane/stacks), beside
// socket(): the filter cannot tell whose sockets they are for.
var stackTraps = []trap{
	{syscall: "bind", calls: []callSet{anyCall()}},
	{syscall: "listen", calls: []callSet{anyCall()}},
	{syscall: "connect", calls: []callSet{anyCall()}},
	{syscall: "accept", calls: []callSet{anyCall()}},
	{syscall: "accept4", calls: []callSet{anyCall()}},
	{syscall: "getsockname", calls: []callSet{anyCall()}},
	{syscall: "getpeername", calls: []callSet{anyCall()}},
	{syscall: "shutdown", calls: []callSet{anyCall()}},
	{syscall: "setsockopt", calls: stackOptions(stackSetOptions)},
	{syscall: "getsockopt", calls: stackOptions(stackGetOptions)},
	// A socket pair would take urgent data as its own kind.
	{syscall: "sendto", calls: []callSet{urgent(3)}, answer: notSupported},
	{syscall: "sendmsg", calls: []callSet{urgent(2)}, answer: notSupported},
	{syscall: "sendmmsg", calls: []callSet{urgent(3)}, answer: notSupported},
}

var notSupported = object{"action": actErrno, "errnoRet": number(eOpNotSupp)}

// stackOptions are the calls about options of TCP and IP, and about those of SOL_SOCKET.
func stackOptions(ofSocket []uint64) (calls []callSet) {
	for _, level := range []uint64{solIP, solTCP, solIPv6} {
		b := anyCall()
		b[1] = point(level)
		calls = append(calls, b)
	}
	for _, name := range ofSocket {
		b := anyCall()
		b[1], b[2] = point(solSocket), point(name)
		calls = append(calls, b)
	}
	return calls
}

// urgent are the calls with MSG_OOB in the flags, which are argument at.
func urgent(at int) callSet {
	b := anyCall()
	b[at] = masked(msgOOB, msgOOB)
	return b
}

// addStackTraps adds to what is trapped in a container what a stack module needs, if the container
// asks for it.
func addStackTraps(config object, calls []trap) ([]trap, error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return nil, err
	}
	switch v := annotations[model.AnnotationStack]; v {
	case nil, "false":
		return calls, nil
	case "true":
		return slices.Concat(calls, stackTraps), nil
	default:
		return nil, fmt.Errorf("annotations.%s: %v: want \"true\" or \"false\"", model.AnnotationStack, v)
	}
}

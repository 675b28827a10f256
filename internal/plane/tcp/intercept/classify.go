package intercept

import "heddle.dev/heddle/internal/trap"

// request is a trapped call that asks for a TCP socket.
type request struct {
	trap.TCPSocket
	batch int // how many sockets are wanted in a batch (batch.go); 0: one socket, as it is
}

// parse reads a trapped call. It returns false for what is not for TCP.
func parse(d *trap.Data) (request, bool) {
	s, ok := trap.ParseTCPSocket(d)
	if !ok {
		return request{}, false
	}
	return request{s, batchWanted(d, s.MPTCP)}, true
}

// key tells a request from others that ask for something else; it is never 0.
func (r request) key() uint64 { return 1<<32 | uint64(r.batch)<<16 | r.Key() }

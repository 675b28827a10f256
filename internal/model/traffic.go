package model

// Traffic is what an endpoint's TCP sockets did since the endpoint was made, or its datapath
// loaded. Closed connections stay counted. Sockets that are not intercepted are not in it; bytes of
// RDMA that was copied on one node are.
type Traffic struct {
	Endpoint EndpointID `json:"endpoint_id"`
	Name     string     `json:"endpoint"`
	Opened   uint64     `json:"opened"`    // connections made by connect()
	Accepted uint64     `json:"accepted"`  // connections taken by a listener, whether or not accept() was called
	Refused  uint64     `json:"refused"`   // connects that ended in ECONNREFUSED
	TimedOut uint64     `json:"timed_out"` // connects that ended in ETIMEDOUT
	Failed   uint64     `json:"failed"`    // connects that ended otherwise: unreachable, given up by the program
	Closed   uint64     `json:"closed"`    // of those opened and accepted
	Broken   uint64     `json:"broken"`    // of those closed, by an error: reset by the peer, timeout
	// Live are the connections that are established or closing, by path.
	Live map[Path]uint64 `json:"live"`
	// Sockets are those that programs hold now, connected or not, and connections that wait for
	// accept().
	Sockets uint64 `json:"sockets"`
	// Ports are the node's ephemeral ports that these keep from all others by bind() or listen().
	Ports         uint64 `json:"ports"`
	BytesSent     uint64 `json:"bytes_sent"`     // payload acknowledged by peers
	BytesReceived uint64 `json:"bytes_received"` // payload received in order
	Retransmits   uint64 `json:"retransmits"`    // segments
}

// counts are the fields that only grow.
func (t *Traffic) counts() []*uint64 {
	return []*uint64{&t.Opened, &t.Accepted, &t.Refused, &t.TimedOut, &t.Failed, &t.Closed, &t.Broken,
		&t.BytesSent, &t.BytesReceived, &t.Retransmits}
}

// Add adds what another endpoint did.
func (t *Traffic) Add(other Traffic) {
	theirs := other.counts()
	for i, n := range t.counts() {
		*n += *theirs[i]
	}
	t.Sockets += other.Sockets
	t.Ports += other.Ports
	for path, n := range other.Live {
		t.live(path, n)
	}
}

// AddLive adds a connection that has not ended. Listeners and sockets that are still connecting are
// none.
func (t *Traffic) AddLive(c Connection) {
	switch c.State {
	case "LISTEN", "SYN_SENT", "SYN_RECV", "NEW_SYN_RECV", "CLOSE":
		return
	}
	t.live(c.Path, 1)
	t.BytesSent += c.BytesSent
	t.BytesReceived += c.BytesReceived
	t.Retransmits += uint64(c.Retransmits)
}

func (t *Traffic) live(path Path, n uint64) {
	if t.Live == nil {
		t.Live = make(map[Path]uint64)
	}
	t.Live[path] += n
}

// RaiseTo makes no count less than in earlier, which was reported before: a count that falls would
// be taken for a restart.
func (t *Traffic) RaiseTo(earlier Traffic) {
	before := earlier.counts()
	for i, n := range t.counts() {
		*n = max(*n, *before[i])
	}
}

// LiveTotal is the number of live connections on all paths.
func (t Traffic) LiveTotal() uint64 {
	var sum uint64
	for _, n := range t.Live {
		sum += n
	}
	return sum
}

package differ

import "encoding/json"

// Request is what the Hub asks of a worker; one packet each way.
type Request struct {
	Kind    string           `json:"kind"` // "step", "sample", "interrupt", "reset"
	Child   bool             `json:"child,omitempty"`
	Index   int              `json:"index"` // of the step in its program; its data are made from it
	Step    Step             `json:"step,omitzero"`
	LimitMS int              `json:"limit_ms,omitempty"` // how long a call has before it counts as blocked
	Hosts   map[string]Addrs `json:"hosts,omitempty"`    // by symbol
	Ports   map[string]int   `json:"ports,omitempty"`
}

// Result is what a call gave: a number, or the name of an errno, and what it wrote.
type Result struct {
	Ret   int    `json:"ret"`
	Errno string `json:"errno,omitempty"`
	Out   string `json:"out,omitempty"`
}

// Done is a call that was pending and has ended.
type Done struct {
	Index  int    `json:"index"`
	Result Result `json:"result"`
}

// Reply is a worker's answer.
type Reply struct {
	Mistake string         `json:"mistake,omitempty"` // the worker could not do as asked
	Pending bool           `json:"pending,omitempty"` // the call blocks
	Result  Result         `json:"result,omitzero"`
	Done    []Done         `json:"done,omitempty"`
	Slots   map[int]string `json:"slots,omitempty"` // what is ready, by slot
	Child   map[int]string `json:"child,omitempty"` // the same of the child's slots
	Moving  bool           `json:"moving,omitempty"`
}

// Hello is the first packet of a worker.
type Hello struct {
	Pool string `json:"pool"`
}

// Marshal encodes a packet.
func Marshal(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err) // only types of this file
	}
	return raw
}

// MaxPacket bounds a packet.
const MaxPacket = 128 << 10

package model

// Reason says why a packet was dropped, a call refused, a connection ended or not sent by a plane's
// best path. Each plane declares its own (plane.Declaration). Each is a counter, a metric label and
// a line of `heddle status`.
type Reason struct {
	Name string // metric label
	Kind Kind
	Help string // one sentence for operators
	// Remedy is what an operator does about it, as the tables of docs/reasons/ have it; empty:
	// nothing.
	Remedy string
}

// Kind groups reasons by what happened.
type Kind string

// Kinds.
const (
	KindPath     Kind = "path"     // a connection took this path: no fault
	KindFallback Kind = "fallback" // a connection went over the overlay instead of direct
	KindDrop     Kind = "drop"     // a packet was dropped
	KindRefusal  Kind = "refusal"  // a system call was refused
	KindCut      Kind = "cut"      // a live connection was ended
	KindMend     Kind = "mend"     // the agent put right what it found on the node
	KindLost     Kind = "lost"     // something that is to be told was lost
)

// Kinds lists them, in the order in which they are shown.
var Kinds = []Kind{KindPath, KindFallback, KindDrop, KindRefusal, KindCut, KindMend, KindLost}

package store

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Holder is the agent that holds a node's name. Its record is in the store as long as the agent is, and a moment longer
// (HoldTime).
type Holder struct {
	Node string `json:"node"`
	// Instance tells this node from another that calls itself the same: 32 hexadecimal digits, which the agent keeps
	// in its state directory.
	Instance string `json:"instance"`
	// Underlay is where the agent is.
	Underlay netip.Addr `json:"underlay"`
	// Since is when it took the name.
	Since time.Time `json:"since"`
}

// HoldTime is how long a name stays held after its agent was last heard of.
const HoldTime = 10 * time.Second

// instanceDigits is the length of an instance.
const instanceDigits = 32

// NameHeldError says that another agent holds a node's name.
type NameHeldError struct{ Holder Holder }

// Error implements error.
func (e *NameHeldError) Error() string {
	return fmt.Sprintf("node name %s is held by the agent at %s since %s: choose another with --node, end that agent (the name is free %s "+
		"after it was last heard of), or take the name from it with --take-over",
		e.Holder.Node, e.Holder.Underlay, e.Holder.Since.Format(time.RFC3339), HoldTime)
}

// CheckHolder reports a *NameHeldError if want may not have the name that have holds: the same node may take its own
// name back at once.
func CheckHolder(have, want Holder, takeOver bool) error {
	if have.Instance == want.Instance || takeOver {
		return nil
	}
	return &NameHeldError{Holder: have}
}

// EncodeHolder gives the value stored for h, or why it is no valid holder.
func EncodeHolder(h Holder) ([]byte, error) {
	if err := validateHolder(h); err != nil {
		return nil, err
	}
	return encode(h)
}

// ParseHolder reads the value stored for the holder of a node's name.
func ParseHolder(node string, value []byte) (Holder, error) {
	var h Holder
	if err := decode(value, &h); err != nil {
		return Holder{}, fmt.Errorf("holder of %s: %w", node, err)
	}
	if h.Node != node {
		return Holder{}, fmt.Errorf("holder of %s: its value says node %q", node, h.Node)
	}
	return h, validateHolder(h)
}

func validateHolder(h Holder) error {
	if err := model.ValidateName("node", h.Node); err != nil {
		return err
	}
	if len(h.Instance) != instanceDigits || !isHex(h.Instance) {
		return fmt.Errorf("holder of %s: instance %.40q: want %d hexadecimal digits", h.Node, h.Instance, instanceDigits)
	}
	if err := validateAddr(h.Underlay); err != nil {
		return fmt.Errorf("holder of %s: underlay: %w", h.Node, err)
	}
	if h.Since.IsZero() {
		return errors.New("holder: since: missing")
	}
	return nil
}

func isHex(s string) bool {
	for _, r := range s {
		if (r < '0' || r > '9') && (r < 'a' || r > 'f') {
			return false
		}
	}
	return true
}

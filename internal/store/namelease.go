package store

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// NameLease says which agent owns the lease of a node's name. It is in the store as long as the
// agent is there, and a moment longer (HoldTime).
type NameLease struct {
	Node string `json:"node"`
	// Instance tells this node from another that calls itself the same: 32 hexadecimal digits,
	// which the agent keeps in its state directory.
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
type NameHeldError struct{ Lease NameLease }

// Error implements error.
func (e *NameHeldError) Error() string {
	return fmt.Sprintf("node name %s is held by the agent at %s since %s: choose another with --node, end that agent (the name is free %s "+
		"after it was last heard of), or take the name from it with --take-over",
		e.Lease.Node, e.Lease.Underlay, e.Lease.Since.Format(time.RFC3339), HoldTime)
}

// CheckNameLease reports a *NameHeldError if want may not have the name that have holds: the same
// node may take its own name back at once.
func CheckNameLease(have, want NameLease, takeOver bool) error {
	if have.Instance == want.Instance || takeOver {
		return nil
	}
	return &NameHeldError{Lease: have}
}

// EncodeNameLease gives the value stored for h, or why it is no valid lease.
func EncodeNameLease(h NameLease) ([]byte, error) {
	if err := validateNameLease(h); err != nil {
		return nil, err
	}
	return encode(h)
}

// ParseNameLease reads the value stored for the lease of a node's name.
func ParseNameLease(node string, value []byte) (NameLease, error) {
	var h NameLease
	if err := decode(value, &h); err != nil {
		return NameLease{}, fmt.Errorf("name lease of %s: %w", node, err)
	}
	if h.Node != node {
		return NameLease{}, fmt.Errorf("name lease of %s: its value says node %q", node, h.Node)
	}
	return h, validateNameLease(h)
}

func validateNameLease(h NameLease) error {
	if err := model.ValidateName("node", h.Node); err != nil {
		return err
	}
	if len(h.Instance) != instanceDigits || !isHex(h.Instance) {
		return fmt.Errorf("name lease of %s: instance %.40q: want %d hexadecimal digits", h.Node, h.Instance, instanceDigits)
	}
	if err := validateAddr(h.Underlay); err != nil {
		return fmt.Errorf("name lease of %s: underlay: %w", h.Node, err)
	}
	if h.Since.IsZero() {
		return errors.New("name lease: since: missing")
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

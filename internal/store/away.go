package store

import (
	"errors"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Away notes that a node's agent holds no name any more: it does not run, or does not reach the store.
type Away struct {
	Node string `json:"node"`
	// Since is when that was noticed.
	Since time.Time `json:"since"`
	// Seen is when another node last found that the node answers, though its agent is away; zero: never.
	Seen time.Time `json:"seen,omitzero"`
}

// Last is when the node was last known to be there.
func (a Away) Last() time.Time {
	if a.Seen.After(a.Since) {
		return a.Seen
	}
	return a.Since
}

// NodeLiveError says that a node is not to be forgotten, because its agent lives.
type NodeLiveError struct{ Lease NameLease }

// Error implements error.
func (e *NodeLiveError) Error() string {
	return fmt.Sprintf("node %s is live: its agent at %s holds the name since %s; stop that first (the name is free %s after it was last heard of)",
		e.Lease.Node, e.Lease.Underlay, e.Lease.Since.Format(time.RFC3339), HoldTime)
}

// NodeSeenError says that a node that was to be forgotten for its age has been heard of.
type NodeSeenError struct{ Away Away }

// Error implements error.
func (e *NodeSeenError) Error() string {
	return fmt.Sprintf("node %s was heard of at %s", e.Away.Node, e.Away.Last().Format(time.RFC3339))
}

// EncodeAway gives the value stored for a, or why it is no valid one.
func EncodeAway(a Away) ([]byte, error) {
	if err := validateAway(a); err != nil {
		return nil, err
	}
	return encode(a)
}

// ParseAway reads the value stored for a node that is away.
func ParseAway(node string, value []byte) (Away, error) {
	var a Away
	if err := decode(value, &a); err != nil {
		return Away{}, fmt.Errorf("absence of %s: %w", node, err)
	}
	if a.Node != node {
		return Away{}, fmt.Errorf("absence of %s: its value says node %q", node, a.Node)
	}
	return a, validateAway(a)
}

func validateAway(a Away) error {
	if err := model.ValidateName("node", a.Node); err != nil {
		return err
	}
	if a.Since.IsZero() {
		return errors.New("absence: since: missing")
	}
	return nil
}

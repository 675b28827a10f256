package store

import (
	"errors"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/model"
)

// OfflineRecord notes that a node's agent holds no name any more: it does not run, or does not
// reach the store.
type OfflineRecord struct {
	Node string `json:"node"`
	// Since is when that was noticed.
	Since time.Time `json:"since"`
	// Seen is when another node last found that the node answers, though its agent is gone; zero:
	// never.
	Seen time.Time `json:"seen,omitzero"`
}

// Last is when the node was last known to be there.
func (a OfflineRecord) Last() time.Time {
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
type NodeSeenError struct{ Record OfflineRecord }

// Error implements error.
func (e *NodeSeenError) Error() string {
	return fmt.Sprintf("node %s was heard of at %s", e.Record.Node, e.Record.Last().Format(time.RFC3339))
}

// EncodeOfflineRecord gives the value stored for a, or why it is no valid one.
func EncodeOfflineRecord(a OfflineRecord) ([]byte, error) {
	if err := validateOfflineRecord(a); err != nil {
		return nil, err
	}
	return encode(a)
}

// ParseOfflineRecord reads the value stored for a node without an agent.
func ParseOfflineRecord(node string, value []byte) (OfflineRecord, error) {
	var a OfflineRecord
	if err := decode(value, &a); err != nil {
		return OfflineRecord{}, fmt.Errorf("offline record of %s: %w", node, err)
	}
	if a.Node != node {
		return OfflineRecord{}, fmt.Errorf("offline record of %s: its value says node %q", node, a.Node)
	}
	return a, validateOfflineRecord(a)
}

func validateOfflineRecord(a OfflineRecord) error {
	if err := model.ValidateName("node", a.Node); err != nil {
		return err
	}
	if a.Since.IsZero() {
		return errors.New("offline record: since: missing")
	}
	return nil
}

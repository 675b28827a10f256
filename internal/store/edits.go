package store

import (
	"bytes"
	"fmt"
)

// Written is one key's value that an edit leads to; nil to delete the key.
type Written struct {
	Key   string
	Value []byte
}

// plan collects what an edit of documents writes.
type plan struct {
	source   string // whose documents alone are deleted; empty: anybody's
	named    map[string]bool
	writes   []Written
	outcomes []PolicyOutcome
	size     int // of the writes, in bytes
}

// change takes one change in, and reports whether something is written; a nil value deletes.
func (p *plan) change(kind, name, key string, value []byte, have map[string][]byte) (changed bool, err error) {
	if p.named[key] {
		return false, fmt.Errorf("%s %s is named twice", kind, name)
	}
	if p.named == nil {
		p.named = make(map[string]bool)
	}
	p.named[key] = true
	old, there := have[name]
	o := PolicyOutcome{Kind: kind, Name: name, Change: "created"}
	switch {
	case value == nil && !there:
		return false, &UnknownPolicyError{kind, name}
	case value == nil && p.source != "" && sourceOf(old) != p.source:
		o.Change = "unchanged"
	case value == nil:
		o.Change = "deleted"
	case there && bytes.Equal(old, value):
		o.Change = "unchanged"
	case there:
		o.Change = "changed"
	}
	p.outcomes = append(p.outcomes, o)
	if o.Change == "unchanged" {
		return false, nil
	}
	p.writes = append(p.writes, Written{key, value})
	p.size += len(key) + len(value)
	return true, nil
}

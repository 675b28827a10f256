package fdkeep

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Storage keeps descriptors under names while this process does not run: a service manager's. A
// name is kept for one descriptor. Names are of letters, digits and '-'.
type Storage interface {
	Store(name string, fd int) error
	// Remove forgets a name; one that holds nothing is no error.
	Remove(name string) error
	// Kept gives what an earlier process stored. The descriptors are the caller's.
	Kept() map[string]int
}

// The parts of an entry in a storage; a hash of the key follows.
const (
	listenerPart = "listener-"
	pagePart     = "page-"
	labelPart    = "label-" // a memfd with the key and the metadata
)

var parts = []string{listenerPart, pagePart, labelPart}

// Mirrored is a Client whose entries are in a storage, too. So they outlive the agent and the
// keeper that end together, by the kernel's memory killer or an operator's hand.
type Mirrored struct {
	*Client
	storage Storage

	mu     sync.Mutex
	stored map[string]uint64 // key -> inode of the descriptor
}

// label is what labelPart holds, as JSON.
type label struct {
	Key  string `json:"key"`
	Meta []byte `json:"meta"`
}

// Mirror makes what the keeper and the storage have equal: what the keeper has lost it gets from
// the storage, and the other way round. A keeper must answer.
func Mirror(c *Client, s Storage) (*Mirrored, error) {
	d := &Mirrored{Client: c, storage: s, stored: map[string]uint64{}}
	held, err := c.TakeAll()
	if err != nil {
		return nil, err
	}
	byKey := map[string]Kept{}
	for _, p := range held {
		defer closeAll([]int{p.FD, p.Page})
		byKey[p.Key] = p
	}
	var errs []error
	for hash, p := range kept(s) {
		if p.Key == "" { // its listener has ended
			errs = append(errs, d.forget(hash))
			continue
		}
		if _, there := byKey[p.Key]; !there {
			errs = append(errs, c.Put(p.Key, p.Meta, p.FD, p.Page))
		}
		d.stored[p.Key], err = inode(p.FD)
		errs = append(errs, err)
		closeAll([]int{p.FD, p.Page})
	}
	for _, p := range held {
		errs = append(errs, d.store(p))
	}
	return d, errors.Join(errs...)
}

// kept puts the parts that a storage has together, by hash. An entry that lacks one has no key, and
// no descriptors.
func kept(s Storage) map[string]Kept {
	all := s.Kept()
	out := map[string]Kept{}
	for name := range all {
		_, hash, ok := strings.Cut(name, "-")
		if _, done := out[hash]; done || !ok {
			continue
		}
		var p Kept
		fd, listener := all[listenerPart+hash]
		page, paged := all[pagePart+hash]
		text, labelled := all[labelPart+hash]
		if listener && paged && labelled {
			if l, err := readLabel(text); err == nil && hashOf(l.Key) == hash {
				p = Kept{Key: l.Key, Meta: l.Meta, FD: fd, Page: page}
			}
		}
		out[hash] = p
		for _, part := range parts {
			if fd, ok := all[part+hash]; ok && (p.Key == "" || part == labelPart) {
				closeAll([]int{fd})
			}
		}
	}
	return out
}

// Put implements Client's, twice.
func (d *Mirrored) Put(key string, meta []byte, fd, page int) error {
	if err := d.Client.Put(key, meta, fd, page); err != nil {
		return err
	}
	return d.store(Kept{Key: key, Meta: meta, FD: fd, Page: page})
}

// Drop implements Client's, twice.
func (d *Mirrored) Drop(key string) error {
	d.mu.Lock()
	_, ok := d.stored[key]
	delete(d.stored, key)
	d.mu.Unlock()
	var err error
	if ok {
		err = d.forget(hashOf(key))
	}
	return errors.Join(d.Client.Drop(key), err)
}

// store gives the storage an entry unless it has it.
func (d *Mirrored) store(p Kept) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ino, err := inode(p.FD)
	if err != nil {
		return err
	}
	hash := hashOf(p.Key)
	if before, ok := d.stored[p.Key]; ok {
		if before == ino {
			return nil
		}
		if err := d.forget(hash); err != nil {
			return err
		}
	}
	text, err := writeLabel(label{p.Key, p.Meta})
	if err != nil {
		return err
	}
	defer closeAll([]int{text})
	// A page that is the listener once more, as the hand-off socket's is, would not keep a service
	// manager from letting go.
	page := p.Page
	if same, err := inode(page); err != nil || same == ino {
		if page, err = unix.MemfdCreate("heddle-no-page", unix.MFD_CLOEXEC); err != nil {
			return fmt.Errorf("store %q: %w", p.Key, err)
		}
		defer closeAll([]int{page})
	}
	// The listener last: an entry without it counts as ended.
	err = errors.Join(d.storage.Store(labelPart+hash, text), d.storage.Store(pagePart+hash, page), d.storage.Store(listenerPart+hash, p.FD))
	if err != nil {
		return fmt.Errorf("store %q: %w", p.Key, err)
	}
	d.stored[p.Key] = ino
	return nil
}

func (d *Mirrored) forget(hash string) error {
	var errs []error
	for _, part := range parts {
		errs = append(errs, d.storage.Remove(part+hash))
	}
	return errors.Join(errs...)
}

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:16])
}

// inode tells a descriptor's file from another of the same kind; files without one of their own are
// alike.
func inode(fd int) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("look at descriptor: %w", err)
	}
	return st.Ino, nil
}

// writeLabel makes a memfd.
func writeLabel(l label) (int, error) {
	raw, err := json.Marshal(l)
	if err != nil {
		return -1, fmt.Errorf("label: %w", err)
	}
	fd, err := unix.MemfdCreate("heddle-label", unix.MFD_CLOEXEC)
	if err == nil {
		if _, err = unix.Pwrite(fd, raw, 0); err != nil {
			closeAll([]int{fd})
		}
	}
	if err != nil {
		return -1, fmt.Errorf("label: %w", err)
	}
	return fd, nil
}

func readLabel(fd int) (label, error) {
	raw := make([]byte, maxMessageBytes)
	n, err := unix.Pread(fd, raw, 0)
	if err != nil {
		return label{}, fmt.Errorf("label: %w", err)
	}
	return parseLabel(raw[:n])
}

func parseLabel(raw []byte) (l label, err error) {
	if err := json.Unmarshal(raw, &l); err != nil {
		return label{}, fmt.Errorf("label: %w", err)
	}
	if l.Key == "" || len(l.Key) > MaxKeyBytes || len(l.Meta) > MaxMetaBytes {
		return label{}, fmt.Errorf("label: key of %d and metadata of %d bytes", len(l.Key), len(l.Meta))
	}
	return l, nil
}

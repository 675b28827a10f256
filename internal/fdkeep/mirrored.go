package fdkeep

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
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

// MaxStored is how many entries a storage is given: so many have room in FileDescriptorStoreMax= of
// the agent's unit. systemd passes on what it keeps with all names in one environment string. The
// kernel starts no program with a string of 128 KiB, so names that were longer in sum would keep
// every later agent from being started, and systemd says nothing when it is given too much.
const MaxStored = 16384 / len(names{})

// names are what an entry's parts are called in a storage, a letter and a number: of the listener,
// of its page, and of a memfd with the key and the metadata.
type names [3]string

var (
	parts = names{"l", "p", "t"}
	// longParts were used by earlier agents, with 32 digits behind each: some 1,100 entries were as
	// many as the kernel could bear.
	longParts = names{"listener-", "page-", "label-"}
)

// numbers is how many there are, of three digits at most to base 36: many more than MaxStored, so
// that a number is not used again soon.
const numbers = 36 * 36 * 36

func (n names) listener() string { return n[0] }
func (n names) page() string     { return n[1] }
func (n names) label() string    { return n[2] }

// long says that an earlier agent gave the names.
func (n names) long() bool { return strings.Contains(n.listener(), "-") }

// namesOf gives the names of the entry that one of them belongs to.
func namesOf(name string) (n names, ok bool) {
	for _, of := range []names{longParts, parts} { // a number has no '-'
		for _, part := range of {
			if id, found := strings.CutPrefix(name, part); found {
				return of.with(id), true
			}
		}
	}
	return n, false
}

func (n names) with(id string) names {
	for i := range n {
		n[i] += id
	}
	return n
}

// Mirrored is a Client whose entries are in a storage, too. So they outlive the agent and the
// keeper that end together, by the kernel's memory killer or an operator's hand. Those that came
// when MaxStored others were there do not, until the next agent or until they are put again.
type Mirrored struct {
	*Client
	storage Storage
	report  func(alone int)

	mu     sync.Mutex // guards the rest
	stored map[string]place
	alone  map[string]bool // keys of those that only the keeper has, because the storage is full
	used   map[names]bool  // those of stored
	next   uint64          // number
}

// place is where an entry is in the storage.
type place struct {
	ino   uint64 // of the descriptor
	names names
}

// label is what is stored beside a listener and its page, as JSON.
type label struct {
	Key  string `json:"key"`
	Meta []byte `json:"meta"`
}

// Mirror makes what the keeper and the storage have equal: what the keeper has lost it gets from
// the storage, and the other way round. A keeper must answer. report is called with the number of
// entries for which the storage has no room whenever it changes, by one goroutine at a time.
func Mirror(c *Client, s Storage, report func(alone int)) (*Mirrored, error) {
	d := newMirrored(c, s, report)
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
	// The names that stay come first: those that replace long ones are others.
	entries := kept(s)
	for n, p := range entries {
		switch {
		case p.Key == "": // its listener has ended
			errs = append(errs, d.forget(n))
		case !n.long():
			ino, err := inode(p.FD)
			errs = append(errs, err)
			d.stored[p.Key], d.used[n] = place{ino, n}, true
		}
	}
	for n, p := range entries {
		if p.Key == "" {
			continue
		}
		if _, there := byKey[p.Key]; !there {
			errs = append(errs, c.Put(p.Key, p.Meta, p.FD, p.Page))
		}
		if n.long() {
			errs = append(errs, d.forget(n), d.store(p))
		}
		closeAll([]int{p.FD, p.Page})
	}
	for _, p := range held {
		errs = append(errs, d.store(p))
	}
	return d, errors.Join(errs...)
}

func newMirrored(c *Client, s Storage, report func(alone int)) *Mirrored {
	return &Mirrored{Client: c, storage: s, report: report, stored: map[string]place{}, alone: map[string]bool{}, used: map[names]bool{}}
}

// kept puts the parts that a storage has together, by their names. An entry that lacks one has no
// key, and no descriptors.
func kept(s Storage) map[names]Kept {
	all := s.Kept()
	out := map[names]Kept{}
	for name := range all {
		n, ok := namesOf(name)
		if _, done := out[n]; done || !ok {
			continue
		}
		var p Kept
		fd, listener := all[n.listener()]
		page, paged := all[n.page()]
		text, labelled := all[n.label()]
		if listener && paged && labelled {
			if l, err := readLabel(text); err == nil {
				p = Kept{Key: l.Key, Meta: l.Meta, FD: fd, Page: page}
			}
		}
		out[n] = p
		for _, part := range n {
			if fd, ok := all[part]; ok && (p.Key == "" || part == n.label()) {
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
	err := d.remove(key)
	d.onlyKeeper(key, false)
	d.mu.Unlock()
	return errors.Join(d.Client.Drop(key), err)
}

// store gives the storage an entry unless it has it, or has no room.
func (d *Mirrored) store(p Kept) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ino, err := inode(p.FD)
	if err != nil {
		return err
	}
	if before, ok := d.stored[p.Key]; ok && before.ino == ino {
		return nil
	}
	if err := d.remove(p.Key); err != nil {
		return err
	}
	full := len(d.stored) >= MaxStored
	if d.onlyKeeper(p.Key, full); full {
		return nil
	}
	n := d.free()
	if err := d.write(n, ino, p); err != nil {
		return fmt.Errorf("store %q: %w", p.Key, err)
	}
	d.stored[p.Key], d.used[n] = place{ino, n}, true
	return nil
}

// onlyKeeper notes whether an entry is the keeper's alone for want of room. The caller holds mu.
func (d *Mirrored) onlyKeeper(key string, alone bool) {
	if d.alone[key] == alone {
		return
	}
	if alone {
		d.alone[key] = true
	} else {
		delete(d.alone, key)
	}
	d.report(len(d.alone))
}

// free gives names that no entry has. The caller holds mu.
func (d *Mirrored) free() names {
	for {
		n := parts.with(strconv.FormatUint(d.next, 36))
		d.next = (d.next + 1) % numbers
		if !d.used[n] {
			return n
		}
	}
}

// write gives the storage the parts of an entry.
func (d *Mirrored) write(n names, ino uint64, p Kept) error {
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
			return err
		}
		defer closeAll([]int{page})
	}
	// The listener last: an entry without it counts as ended.
	return errors.Join(d.storage.Store(n.label(), text), d.storage.Store(n.page(), page), d.storage.Store(n.listener(), p.FD))
}

// remove takes an entry out of the storage if it is there. The caller holds mu.
func (d *Mirrored) remove(key string) error {
	at, ok := d.stored[key]
	if !ok {
		return nil
	}
	delete(d.stored, key)
	delete(d.used, at.names)
	return d.forget(at.names)
}

func (d *Mirrored) forget(n names) error {
	var errs []error
	for _, name := range n { // the listener first: what is left without it counts as ended
		errs = append(errs, d.storage.Remove(name))
	}
	return errors.Join(errs...)
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

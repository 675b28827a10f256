package congestion

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/stack"
)

// PinPrefix is what the names of pins begin with: the congestion control's follows.
const PinPrefix = "link_congestion_"

// State says what has become of a congestion control on this node.
type State struct {
	Registered bool
	// Err is why the kernel has it not, or has another version of it.
	Err error
}

// Registry is what one node has registered. A pinned link keeps each registered while no agent
// runs. Its methods may be called by any goroutine.
type Registry struct {
	dir string

	mu      sync.Mutex
	entries map[string]*entry // by name
}

// entry is one congestion control.
type entry struct {
	sum   string
	link  link.Link // nil: not registered
	tried string    // the sum that err is about
	err   error
}

// Open gives the registry whose pins are in dir, on a BPF file system.
func Open(dir string) *Registry {
	return &Registry{dir: dir, entries: make(map[string]*entry)}
}

// Close gives up what the registry has open. What is registered stays.
func (r *Registry) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, e := range r.entries {
		if e.link != nil {
			errs = append(errs, e.link.Close())
		}
	}
	clear(r.entries)
	return errors.Join(errs...)
}

// Check has the kernel verify an object without registering it, and gives the congestion control's
// name.
func Check(elf []byte) (string, error) {
	o, err := read(elf)
	if err != nil {
		return "", err
	}
	c, err := o.load(stack.Sum(elf))
	if err != nil {
		return o.name, err
	}
	c.Close()
	return o.name, nil
}

// Register registers one object, in the place of another version of it. To do it again costs
// nothing. An object that the kernel refuses is not tried twice.
func (r *Registry) Register(o *stack.Object) State {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entry(o.Name)
	if e.tried != o.SHA256 || e.err == nil || errors.Is(e.err, unix.EEXIST) {
		e.err = r.register(o, e)
		e.tried = o.SHA256
	}
	return State{Registered: e.link != nil && e.sum == o.SHA256, Err: e.err}
}

// Verify has the kernel verify an object that no socket is to have yet, once.
func (r *Registry) Verify(o *stack.Object) State {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entry(o.Name)
	if e.tried != o.SHA256 {
		_, e.err = Check(o.Object)
		e.tried = o.SHA256
	}
	return State{Registered: e.link != nil && e.sum == o.SHA256, Err: e.err}
}

func (r *Registry) entry(name string) *entry {
	if r.entries[name] == nil {
		r.entries[name] = &entry{}
	}
	return r.entries[name]
}

func (r *Registry) pin(name string) string { return filepath.Join(r.dir, PinPrefix+name) }

// register brings the kernel to an object. The caller holds mu.
func (r *Registry) register(o *stack.Object, e *entry) error {
	if e.link != nil && e.sum == o.SHA256 {
		return nil
	}
	if err := r.adopt(o.Name, e); err != nil {
		return err
	}
	if e.link != nil {
		if have, err := mapOf(e.link); err != nil || have == mapName(o.SHA256) {
			e.sum = o.SHA256
			return err
		}
	}
	if e.link == nil {
		shared, err := find(mapName(o.SHA256))
		if err != nil {
			return err
		}
		if shared != nil {
			return r.keep(o, e, shared)
		}
	}
	read, err := read(o.Object)
	if err == nil && read.name != o.Name {
		err = fmt.Errorf("the object's name is %s", read.name)
	}
	if err != nil {
		return err
	}
	c, err := read.load(o.SHA256)
	if err != nil {
		return err
	}
	defer c.Close() // link and pin keep what they need
	if e.link != nil {
		if err := replace(e.link, c.Maps[read.ops]); err != nil {
			return err
		}
		e.sum = o.SHA256
		return nil
	}
	l, err := link.AttachStructOps(link.StructOpsOptions{Map: c.Maps[read.ops]})
	if errors.Is(err, unix.EEXIST) {
		// Another node's agent may just have done it.
		if shared, _ := find(mapName(o.SHA256)); shared != nil {
			return r.keep(o, e, shared)
		}
		return fmt.Errorf("this kernel has a congestion control %s already, which is another: give yours another name: %w", o.Name, err)
	}
	if err != nil {
		return fmt.Errorf("register with the kernel: %w", err)
	}
	return r.keep(o, e, l)
}

// keep pins a link, so that it outlives the agent.
func (r *Registry) keep(o *stack.Object, e *entry, l link.Link) error {
	if err := l.Pin(r.pin(o.Name)); err != nil {
		return errors.Join(fmt.Errorf("pin congestion control %s: %w", o.Name, err), l.Close())
	}
	e.link, e.sum = l, o.SHA256
	return nil
}

// adopt takes over what an earlier agent left under a name.
func (r *Registry) adopt(name string, e *entry) error {
	if e.link != nil {
		return nil
	}
	l, err := link.LoadPinnedLink(r.pin(name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned congestion control %s: %w", name, err)
	}
	e.link = l
	return nil
}

// Keep unregisters what is not in keep, also what earlier agents left. Connections that have it go
// on with it.
func (r *Registry) Keep(keep map[string]bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	var errs []error
	for _, pin := range entries {
		name, ours := strings.CutPrefix(pin.Name(), PinPrefix)
		if !ours || keep[name] {
			continue
		}
		errs = append(errs, os.Remove(filepath.Join(r.dir, pin.Name())))
		if e := r.entries[name]; e != nil && e.link != nil {
			errs = append(errs, e.link.Close())
			e.link, e.sum = nil, ""
		}
	}
	return errors.Join(errs...)
}

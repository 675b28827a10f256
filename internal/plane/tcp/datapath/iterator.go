package datapath

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/lockwait"
)

// iterate runs an iterator over the TCP sockets of the calling thread's network namespace and gives
// what the program wrote. What it wrote before an error is given with it. It waits for the lock of
// each socket; if it would for long it is lockwait.ErrStuck, and until the pass comes back, under
// that name, others are at once.
func (d *Datapath) iterate(name string, program *ebpf.Program) (written []byte, err error) {
	open := func() (*os.File, error) { return openIterator(program, nil) }
	if model.ProtectLocks.On() {
		written, err = d.locks.Do(name, open, nil)
	} else {
		written, err = readHere(open)
	}
	if err != nil {
		return written, fmt.Errorf("pass %s: %w", name, err)
	}
	return written, nil
}

// iterateIn is iterate in the network namespace of a container: one that is stuck there says
// nothing of others.
func (d *Datapath) iterateIn(name string, program *ebpf.Program) ([]byte, error) {
	var netns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &netns); err != nil {
		return nil, fmt.Errorf("pass %s: network namespace: %w", name, err)
	}
	return d.iterate(fmt.Sprintf("%s of net:[%d]", name, netns.Ino), program)
}

// iterateUnlocked runs an iterator over the tags (bpf/iter/unlocked.bpf.c), which waits for no
// lock.
func (d *Datapath) iterateUnlocked(program *ebpf.Program) ([]byte, error) {
	return readHere(func() (*os.File, error) { return openIterator(program, d.objs.TagBySock) })
}

// openIterator gives the file whose content a program writes while it is read: for each TCP socket
// or, with a map, for each of its values.
func openIterator(program *ebpf.Program, of *ebpf.Map) (*os.File, error) {
	it, err := link.AttachIter(link.IterOptions{Program: program, Map: of})
	if err != nil {
		return nil, fmt.Errorf("attach iterator: %w", err)
	}
	r, err := it.Open()
	if err = errors.Join(err, it.Close()); err != nil {
		return nil, fmt.Errorf("open iterator: %w", err)
	}
	file, ok := r.(*os.File)
	if !ok {
		return nil, errors.Join(fmt.Errorf("open iterator: it is no file, but %T", r), r.Close())
	}
	return file, nil
}

// readHere reads an iterator to its end in the calling thread.
func readHere(open func() (*os.File, error)) (written []byte, err error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	err = lockwait.ReadAll(r.Read, func(part []byte) error {
		written = append(written, part...)
		return nil
	})
	if err != nil {
		return written, fmt.Errorf("read iterator: %w", err)
	}
	return written, nil
}

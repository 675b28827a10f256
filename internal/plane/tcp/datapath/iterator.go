package datapath

import (
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// iterate runs an iterator over the TCP sockets of the calling thread's network namespace and gives
// what the program wrote. What it wrote before an error is given with it.
func iterate(program *ebpf.Program) (written []byte, err error) {
	it, err := link.AttachIter(link.IterOptions{Program: program})
	if err != nil {
		return nil, fmt.Errorf("attach iterator: %w", err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	r, err := it.Open()
	if err != nil {
		return nil, fmt.Errorf("open iterator: %w", err)
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if written, err = readIterator(r); err != nil {
		return written, fmt.Errorf("read iterator: %w", err)
	}
	return written, nil
}

// iteratorPauses bounds how often an iterator may pause: no node has a thousand million sockets.
const iteratorPauses = 1000

// readIterator reads to the end. An iterator that has seen a million sockets, and had nothing to
// say of them, pauses with EAGAIN, and goes on from there when it is read again. What was read
// before an error is given with it.
func readIterator(r io.Reader) (all []byte, err error) {
	for range iteratorPauses {
		var part []byte
		part, err = io.ReadAll(r)
		all = append(all, part...)
		if !errors.Is(err, unix.EAGAIN) {
			return all, err
		}
	}
	return all, err
}

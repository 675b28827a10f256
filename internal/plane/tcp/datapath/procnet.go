package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// procFiles are the iterators that are files (bpf/iter/proc.bpf.c).
func (d *Datapath) procFiles() map[string]*ebpf.Program {
	return map[string]*ebpf.Program{"tcp": d.objs.ProcTcp, "tcp6": d.objs.ProcTcp6}
}

// ProcFile gives the file whose content is what a container should have as /proc/net/<name>: "tcp"
// or "tcp6".
func (d *Datapath) ProcFile(name string) string {
	return filepath.Join(d.cfg.PinDir, linkPin+"proc_"+name)
}

// attachProc brings the files to this object's programs. Containers have them mounted, so those of
// an earlier agent stay.
func (d *Datapath) attachProc() error {
	for name, program := range d.procFiles() {
		l, err := d.attachProcFile(d.ProcFile(name), program)
		if err != nil {
			return fmt.Errorf("/proc/net/%s of containers: %w", name, err)
		}
		d.links = append(d.links, l)
		if err := os.Chmod(d.ProcFile(name), 0o644); err != nil { // for every user of a container
			return err
		}
	}
	return nil
}

func (d *Datapath) attachProcFile(pin string, program *ebpf.Program) (link.Link, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		if err := l.Update(program); err != nil {
			return nil, errors.Join(fmt.Errorf("update pinned link: %w", err), l.Close())
		}
		return l, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load pinned link: %w", err)
	}
	it, err := link.AttachIter(link.IterOptions{Program: program, Map: d.objs.TagBySock})
	if err != nil {
		return nil, fmt.Errorf("attach socket iterator: %w", err)
	}
	if err := it.Pin(pin); err != nil {
		return nil, errors.Join(fmt.Errorf("pin link: %w", err), it.Close())
	}
	return it, nil
}

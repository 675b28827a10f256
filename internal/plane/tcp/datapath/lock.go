package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// ErrNoLock is why there is no second lock on what containers do with sockets of the node: the kernel loads no
// programs for security hooks, or never calls them. The first lock holds without it.
var ErrNoLock = errors.New("no BPF programs on security hooks")

// lockHooks are the programs of bpf/lsm.bpf.c. A link to a security hook cannot be updated in place, so each agent
// attaches its own, and then takes over the pin: for a moment both hold, never none.
func lockHooks(objs *lockObjects) map[string]*ebpf.Program {
	return map[string]*ebpf.Program{"lock_setsockopt": objs.LockSetsockopt, "lock_ioctl": objs.LockIoctl}
}

// loadLockOver loads the second lock over the tags of tagBySock. ErrNoLock if the kernel will not have it.
func loadLockOver(tagBySock *ebpf.Map) (*lockObjects, error) {
	if err := callsBPF("/sys/kernel/security/lsm"); err != nil {
		return nil, err
	}
	spec, err := loadLockObject()
	if err != nil {
		return nil, err
	}
	objs := &lockObjects{}
	replace := map[string]*ebpf.Map{"tag_by_sock": tagBySock}
	if err := spec.LoadAndAssign(objs, &ebpf.CollectionOptions{MapReplacements: replace}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLock, probeErr("load", err))
	}
	return objs, nil
}

func loadLockObject() (*ebpf.CollectionSpec, error) {
	spec, err := loadLock()
	if err != nil {
		return nil, fmt.Errorf("read BPF object of the second lock: %w", err)
	}
	return spec, nil
}

// callsBPF reads the kernel's list of security modules. One that is not there to be read says nothing.
func callsBPF(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	modules := strings.Split(strings.TrimSpace(string(raw)), ",")
	if !slices.Contains(modules, "bpf") {
		return fmt.Errorf("%w: the kernel was booted with the security modules %s, bpf not among them", ErrNoLock, strings.Join(modules, ","))
	}
	return nil
}

// attachLock puts the second lock in force, if the kernel will have it. Its absence is found by Features.
func (d *Datapath) attachLock() error {
	objs, err := loadLockOver(d.objs.TagBySock)
	if errors.Is(err, ErrNoLock) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = objs.Close() }() // the links hold the programs
	for name, prog := range lockHooks(objs) {
		if err := d.attachLockHook(name, prog); err != nil {
			return fmt.Errorf("attach %s: %w", name, err)
		}
	}
	return nil
}

func (d *Datapath) attachLockHook(name string, prog *ebpf.Program) error {
	l, err := link.AttachLSM(link.LSMOptions{Program: prog})
	if err != nil {
		return err
	}
	d.links = append(d.links, l)
	pin := filepath.Join(d.cfg.PinDir, linkPin+name)
	if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the pin of an earlier agent: %w", err)
	}
	if err := l.Pin(pin); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// probeLSM loads the second lock as an agent would.
func probeLSM() error {
	tags, err := ebpf.NewMap(tagMapSpec())
	if err != nil {
		return probeErr("socket storage", err)
	}
	defer func() { _ = tags.Close() }() // nothing was written
	objs, err := loadLockOver(tags)
	if err != nil {
		return err
	}
	return objs.Close()
}

// tagMapSpec is tag_by_sock alone.
func tagMapSpec() *ebpf.MapSpec {
	spec, err := loadLockObject()
	if err != nil {
		return &ebpf.MapSpec{}
	}
	return spec.Maps["tag_by_sock"]
}

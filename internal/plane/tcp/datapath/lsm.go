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

// ErrNoLSM is why there is no second check, on LSM hooks, of what containers do with sockets of the
// node: the kernel loads no programs for them, attaches none (arm64 before Linux 6.4), or never
// calls them. The first check holds without it.
var ErrNoLSM = errors.New("no BPF programs on security hooks")

// lsmHooks are the programs of bpf/lsm.bpf.c, by the names of their pins, which are older than
// theirs. A link to a security hook cannot be updated in place, so each agent attaches its own, and
// then takes over the pin: for a moment both hold, never none.
func lsmHooks(objs *lsmObjects) map[string]*ebpf.Program {
	return map[string]*ebpf.Program{"lock_setsockopt": objs.LsmSetsockopt, "lock_ioctl": objs.LsmIoctl}
}

// loadLSMOver loads the programs over the tags of tagBySock. ErrNoLSM if the kernel will not have
// it.
func loadLSMOver(tagBySock *ebpf.Map) (*lsmObjects, error) {
	if err := callsBPF("/sys/kernel/security/lsm"); err != nil {
		return nil, err
	}
	spec, err := loadLSMObject()
	if err != nil {
		return nil, err
	}
	objs := &lsmObjects{}
	replace := map[string]*ebpf.Map{"tag_by_sock": tagBySock}
	if err := spec.LoadAndAssign(objs, &ebpf.CollectionOptions{MapReplacements: replace}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLSM, probeErr("load", err))
	}
	return objs, nil
}

func loadLSMObject() (*ebpf.CollectionSpec, error) {
	spec, err := loadLsm()
	if err != nil {
		return nil, fmt.Errorf("read BPF object of the LSM hooks: %w", err)
	}
	return spec, nil
}

// callsBPF reads the kernel's list of security modules. One that is not there to be read says
// nothing.
func callsBPF(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	modules := strings.Split(strings.TrimSpace(string(raw)), ",")
	if !slices.Contains(modules, "bpf") {
		return fmt.Errorf("%w: the kernel was booted with the security modules %s, bpf not among them", ErrNoLSM, strings.Join(modules, ","))
	}
	return nil
}

// attachLSM attaches the LSM hooks, if the kernel will have it. Its absence is found by Features.
func (d *Datapath) attachLSM() error {
	objs, err := loadLSMOver(d.objs.TagBySock)
	if errors.Is(err, ErrNoLSM) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = objs.Close() }() // the links hold the programs
	for name, prog := range lsmHooks(objs) {
		if err := d.attachLSMHook(name, prog); errors.Is(err, ErrNoLSM) {
			return nil
		} else if err != nil {
			return fmt.Errorf("attach %s: %w", name, err)
		}
	}
	return nil
}

// attachToLSM attaches a program. ErrNoLSM if the kernel does not do that on its architecture.
func attachToLSM(prog *ebpf.Program) (link.Link, error) {
	l, err := link.AttachLSM(link.LSMOptions{Program: prog})
	if errors.Is(err, link.ErrNotSupported) {
		return nil, fmt.Errorf("%w: %w", ErrNoLSM, err)
	}
	return l, err
}

func (d *Datapath) attachLSMHook(name string, prog *ebpf.Program) error {
	l, err := attachToLSM(prog)
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

// probeLSM loads and attaches the LSM hooks as an agent would; they have no socket to look at.
func probeLSM() error {
	tags, err := ebpf.NewMap(tagMapSpec())
	if err != nil {
		return probeErr("socket storage", err)
	}
	defer func() { _ = tags.Close() }() // nothing was written
	objs, err := loadLSMOver(tags)
	if err != nil {
		return err
	}
	defer func() { _ = objs.Close() }()
	for _, prog := range lsmHooks(objs) {
		l, err := attachToLSM(prog)
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
	}
	return nil
}

// tagMapSpec is tag_by_sock alone.
func tagMapSpec() *ebpf.MapSpec {
	spec, err := loadLSMObject()
	if err != nil {
		return &ebpf.MapSpec{}
	}
	return spec.Maps["tag_by_sock"]
}

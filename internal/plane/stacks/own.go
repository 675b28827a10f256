package stacks

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/stack"
)

// Modules of the operator's own: programs in a folder of the node's (--stack-modules) that speak
// the protocol. They are started, watched and replaced as Heddle's are, but confined
// (process.Confined): what they are for comes by descriptors.

// DefaultOwnModules is the folder with them.
const DefaultOwnModules = "/etc/heddle/stack-modules"

const (
	// ownFolder has a folder for each, in the agent's state directory.
	ownFolder = "modules"
	// firstUser is the first of the users that own modules run as, countUsers how many there are.
	// Neither people nor services have them; those of netstack's tenants come behind.
	firstUser  = 0x6f000000
	countUsers = 1 << 24
)

// OwnArguments are those that agents start own modules with.
var OwnArguments = process.ConfinedArguments

// userOf gives the user that an own module runs as: the same one whoever asks.
func userOf(name string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // it does not fail
	return firstUser + h.Sum32()%countUsers
}

// program is that of a stack, without a path if it is an own one: find has that.
func (p *Plane) program(kind stack.Kind) process.Program {
	name, own := kind.Module()
	if !own {
		return program(kind, p.cfg.Self, p.cfg.StateDir)
	}
	return ownProgram(name, filepath.Join(p.cfg.StateDir, ownFolder), "/proc/self/exe")
}

// ownProgram is an own module whose socket and log are in dir; by is heddled.
func ownProgram(name, dir, by string) process.Program {
	confined := &process.Confined{User: userOf(name), Dir: filepath.Join(dir, name), By: by}
	return process.Program{Name: name, Socket: confined.Socket(), Log: filepath.Join(dir, name+".log"), OwnNetns: true, Confined: confined}
}

// find gives the path of the program that runs a stack.
func (p *Plane) find(kind stack.Kind) (string, error) {
	name, own := kind.Module()
	if !own {
		return FindProgram(kind, p.cfg.Self)
	}
	path := filepath.Join(p.cfg.OwnModules, name)
	switch err := process.OnlyRoots(path); {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("no module %s on this node: install the program as %s (--stack-modules)", name, path)
	case err != nil:
		return "", fmt.Errorf("module %s: %w", name, err)
	}
	return path, nil
}

// TryOwn fails unless agents would take the own module at path, and it starts and answers; by is
// heddled.
func TryOwn(path, by string) error {
	name := filepath.Base(path)
	if err := stack.ValidateModule(name); err != nil {
		return err
	}
	if err := process.OnlyRoots(path); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "heddle-module")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	p := ownProgram(name, dir, by)
	p.Path = path
	l, err := process.Reach(p, dialConfined(p.Confined))
	if err != nil {
		return err
	}
	defer l.Close()
	if p.Confined.IsProcess(l.PID) {
		_ = unix.Kill(l.PID, unix.SIGKILL) // or it has ended
	}
	return nil
}

// lookEvery is how often it is looked for modules that profiles name and the node has not.
const lookEvery = 2 * time.Second

// lacks notes whether the node lacks an own module that a profile names.
func (p *Plane) lacks(kind stack.Kind, err error) {
	if _, own := kind.Module(); !own {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.lacking, kind)
	} else if len(p.lacking) < stack.MaxProfiles {
		p.lacking[kind] = true
	}
}

// lookForOwn says so when a module has been installed that was lacking.
func (p *Plane) lookForOwn(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		p.mu.Lock()
		all := slices.Collect(maps.Keys(p.lacking))
		p.mu.Unlock()
		for _, kind := range all {
			if _, err := p.find(kind); err == nil {
				p.lacks(kind, nil)
				p.cfg.StacksChanged()
			}
		}
	}
}

// reach connects to the module, or starts one.
func (p *Plane) reach(m *module) (*link, error) {
	program := p.program(m.kind)
	if program.Confined != nil {
		var err error
		if program.Path, err = p.find(m.kind); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(filepath.Join(p.cfg.StateDir, ownFolder), 0o700); err != nil {
			return nil, err
		}
	}
	return process.Reach(program, p.dial(m))
}

// dial gives what connects to a module.
func (p *Plane) dial(m *module) func(string) (*link, error) {
	if confined := p.program(m.kind).Confined; confined != nil {
		return dialConfined(confined)
	}
	return dial
}

// dialConfined is dial for an own module, which may have put a link to somebody else there.
func dialConfined(confined *process.Confined) func(string) (*link, error) {
	return func(path string) (*link, error) {
		l, err := dial(path)
		if err == nil {
			if err = confined.IsPeer(l.UnixConn); err != nil {
				l.Close()
				return nil, err
			}
		}
		return l, err
	}
}

// kill ends the module's process, unless it has just ended.
func (p *Plane) kill(m *module, l *link) {
	if confined := p.program(m.kind).Confined; confined == nil || confined.IsProcess(l.PID) {
		_ = unix.Kill(l.PID, unix.SIGKILL)
	}
}

// adoptOwn has those kept that an agent before has started: they may have tenants that there are no
// more.
func (p *Plane) adoptOwn() {
	found, err := os.ReadDir(filepath.Join(p.cfg.StateDir, ownFolder))
	if err != nil {
		return // none has run here
	}
	for _, e := range found {
		if e.IsDir() && stack.ValidateModule(e.Name()) == nil {
			p.moduleOf(stack.ModuleKind(e.Name()))
		}
	}
}

// isScript reports whether a program is run by another one, which its first line names.
func isScript(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [2]byte
	n, _ := f.Read(head[:]) // what is shorter is none
	return n == 2 && string(head[:]) == "#!"
}

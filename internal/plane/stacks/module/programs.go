package module

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/stack"
)

// programs are the modules' by what they run, and their files in an agent's state directory.
var programs = map[stack.Kind]struct{ name, socket, log string }{
	stack.Smoltcp:  {"heddle-stack", "stack.sock", "stack.log"},
	stack.Netstack: {"heddle-netstack", "netstack.sock", "netstack.log"},
}

// Kinds are the stacks that modules of Heddle's run; others are the operator's own.
var Kinds = []stack.Kind{stack.Smoltcp, stack.Netstack}

// StateFiles gives the modules' files in an agent's state directory.
func StateFiles() (files []string) {
	for _, kind := range Kinds {
		files = append(files, programs[kind].socket, programs[kind].log)
	}
	return append(files, ownFolder)
}

func program(kind stack.Kind, self, stateDir string) process.Program {
	// It has the network that it is given by devices, and no other. Names of its Unix sockets are
	// nobody's.
	f := programs[kind]
	return process.Program{Name: f.name, Self: self, Socket: filepath.Join(stateDir, f.socket), Log: filepath.Join(stateDir, f.log), OwnNetns: true}
}

// Arguments are those that the agent with this state directory starts a module with.
func Arguments(kind stack.Kind, stateDir string) []string {
	return program(kind, "", stateDir).Arguments()
}

// FindProgram gives a module's path, looking beside the program self first.
func FindProgram(kind stack.Kind, self string) (string, error) { return program(kind, self, "").Find() }

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

// Programs finds, starts and reaches the modules of a node.
type Programs struct {
	Self     string // the agent's program, beside which Heddle's modules are looked for
	StateDir string // the agent's state directory
	Own      string // the folder with the operator's own modules
}

// program is that of a stack, without a path if it is an own one: Find has that.
func (p Programs) program(kind stack.Kind) process.Program {
	name, own := kind.Module()
	if !own {
		return program(kind, p.Self, p.StateDir)
	}
	return ownProgram(name, filepath.Join(p.StateDir, ownFolder), "/proc/self/exe")
}

// ownProgram is an own module whose socket and log are in dir; by is heddled.
func ownProgram(name, dir, by string) process.Program {
	confined := &process.Confined{User: userOf(name), Dir: filepath.Join(dir, name), By: by}
	return process.Program{Name: name, Socket: confined.Socket(), Log: filepath.Join(dir, name+".log"), OwnNetns: true, Confined: confined}
}

// Find gives the path of the program that runs a stack.
func (p Programs) Find(kind stack.Kind) (string, error) {
	name, own := kind.Module()
	if !own {
		return FindProgram(kind, p.Self)
	}
	path := filepath.Join(p.Own, name)
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

// reach connects to a module, or starts one.
func (p Programs) reach(kind stack.Kind) (*Link, error) {
	program := p.program(kind)
	if program.Confined != nil {
		var err error
		if program.Path, err = p.Find(kind); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(filepath.Join(p.StateDir, ownFolder), 0o700); err != nil {
			return nil, err
		}
	}
	return process.Reach(program, p.dial(kind))
}

// adopt connects to a module if one runs; nil if none does.
func (p Programs) adopt(kind stack.Kind) (*Link, error) {
	return process.Adopt(p.program(kind).Socket, p.dial(kind))
}

// dial gives what connects to a module.
func (p Programs) dial(kind stack.Kind) func(string) (*Link, error) {
	if confined := p.program(kind).Confined; confined != nil {
		return dialConfined(confined)
	}
	return Dial
}

// dialConfined is Dial for an own module, which may have put a link to somebody else there.
func dialConfined(confined *process.Confined) func(string) (*Link, error) {
	return func(path string) (*Link, error) {
		l, err := Dial(path)
		if err == nil {
			if err = confined.IsPeer(l.UnixConn); err != nil {
				l.Close()
				return nil, err
			}
		}
		return l, err
	}
}

// kill ends a module's process, unless it has just ended.
func (p Programs) kill(kind stack.Kind, pid int) {
	if confined := p.program(kind).Confined; confined == nil || confined.IsProcess(pid) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// Ran gives the own modules that an agent has started here: they may have tenants that there are
// no more.
func (p Programs) Ran() (kinds []stack.Kind) {
	found, err := os.ReadDir(filepath.Join(p.StateDir, ownFolder))
	if err != nil {
		return nil // none has run here
	}
	for _, e := range found {
		if e.IsDir() && stack.ValidateModule(e.Name()) == nil {
			kinds = append(kinds, stack.ModuleKind(e.Name()))
		}
	}
	return kinds
}

package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/stack"
)

// stackModules looks whether each stack module could run: its program is there, and it can be given
// packets by a device.
func stackModules() []finding {
	return []finding{stackModule("stack_module", stack.Smoltcp), stackModule("stack_netstack", stack.Netstack)}
}

// ownModules looks whether those of the operator's own would run.
func ownModules() finding {
	self, err := os.Executable()
	if err != nil {
		return finding{name: "stack_own_modules", err: err}
	}
	heddled, err := process.Program{Name: "heddled", Self: self}.Find()
	return ownStackModules(module.DefaultOwnModules, heddled, err)
}

// ownStackModules starts each module of the operator's own that is in the folder, as an agent
// would: by heddled, unless that is missing.
func ownStackModules(folder, heddled string, missing error) finding {
	f := finding{name: "stack_own_modules", detail: "none in " + folder}
	found, err := os.ReadDir(folder)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && len(found) == 0:
		return f
	case err != nil || missing != nil:
		f.err = errors.Join(err, missing)
		return f
	}
	var names, wrong []string
	for _, e := range found {
		names = append(names, e.Name())
		if err := module.TryOwn(filepath.Join(folder, e.Name()), heddled); err != nil {
			wrong = append(wrong, e.Name()+": "+strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	f.detail = strings.Join(names, ", ") + " in " + folder
	if wrong != nil {
		f.err = errors.New(strings.Join(wrong, "; "))
	}
	return f
}

func stackModule(name string, kind stack.Kind) finding {
	f := finding{name: name}
	self, err := os.Executable()
	if err == nil {
		f.detail, err = module.FindProgram(kind, self)
	}
	if _, serr := os.Stat("/dev/net/tun"); serr != nil {
		err = errors.Join(err, fmt.Errorf("TUN devices: %w", serr))
	}
	f.err = err
	return f
}

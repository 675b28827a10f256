package doctor

import (
	"errors"
	"fmt"
	"os"

	"heddle.dev/heddle/internal/plane/stacks"
	"heddle.dev/heddle/internal/stack"
)

// stackModules looks whether each stack module could run: its program is there, and it can be given
// packets by a device.
func stackModules() []finding {
	return []finding{stackModule("stack_module", stack.Smoltcp), stackModule("stack_netstack", stack.Netstack)}
}

func stackModule(name string, kind stack.Kind) finding {
	f := finding{name: name}
	self, err := os.Executable()
	if err == nil {
		f.detail, err = stacks.FindProgram(kind, self)
	}
	if _, serr := os.Stat("/dev/net/tun"); serr != nil {
		err = errors.Join(err, fmt.Errorf("TUN devices: %w", serr))
	}
	f.err = err
	return f
}

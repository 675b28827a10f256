package doctor

import (
	"errors"
	"fmt"
	"os"

	"heddle.dev/heddle/internal/plane/stacks"
)

// stackModule looks whether a stack module could run: its program is there, and it can be given
// packets by a device.
func stackModule() finding {
	f := finding{name: "stack_module"}
	self, err := os.Executable()
	if err == nil {
		f.detail, err = stacks.FindProgram(self)
	}
	if _, serr := os.Stat("/dev/net/tun"); serr != nil {
		err = errors.Join(err, fmt.Errorf("TUN devices: %w", serr))
	}
	f.err = err
	return f
}

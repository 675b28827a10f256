package fdkeep

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"
)

// inheritedFD is where a program that ListenBy starts has the socket.
const inheritedFD = 3

// listenTime bounds how long such a program may take.
const listenTime = 10 * time.Second

// ListenBy calls listen() on a Unix socket in another process, exe with args, which must call
// ListenInherited, and waits until it has ended: a connection's SO_PEERCRED and SO_PEERPIDFD are
// those of who called listen().
func ListenBy(socket *os.File, exe string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), listenTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Dir, cmd.ExtraFiles = "/", []*os.File{socket}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", exe, err, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}

// ListenInherited is what a program does that ListenBy has started.
func ListenInherited() error {
	if err := unix.Listen(inheritedFD, 8); err != nil {
		return fmt.Errorf("listen on descriptor %d: %w", inheritedFD, err)
	}
	return nil
}

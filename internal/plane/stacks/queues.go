package stacks

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// Connected says of the program's end of a pair, a socket of endpoint id, whether it is a
// connection that a module runs and that can be sent by: the plane of queues has it sent by in its
// program's place. abort ends it by RST, by the connection to the module that there is by then: it
// is another one once a module's host has lost some tenant.
func (p *Plane) Connected(ctx context.Context, id model.EndpointID, fd int) (abort func(context.Context) error, ok bool, err error) {
	raw, noted, err := p.cfg.StackModules.Note(fd)
	t, n := p.tenantOf(id), socket.ParseNote(raw)
	if err != nil || !noted || t == nil || !t.owns(&n) || n.ID == 0 {
		return nil, false, err
	}
	l := t.module.Current()
	if l == nil {
		return nil, false, nil
	}
	info, err := l.Info(ctx, t.number(), n.ID)
	if errors.Is(err, unix.ENOENT) {
		return nil, false, nil
	}
	if err != nil || info.Kind != protocol.KindConnection || info.State != tcpEstablished && info.State != tcpCloseWait {
		return nil, false, err
	}
	process := l.PID
	return func(ctx context.Context) error {
		now, err := t.module.Await(ctx)
		if err != nil {
			return fmt.Errorf("reset a connection of a module: %w", err)
		}
		if now.PID != process {
			return nil // the connection has ended with its module
		}
		err = now.CloseSocket(ctx, t.number(), n.ID, protocol.Abort)
		if errors.Is(err, unix.ENOENT) {
			return nil // it has ended
		}
		return err
	}, true, nil
}

package stacks

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// Connected says of the program's end of a pair, a socket of endpoint id, whether it is a
// connection that a module runs and that can be sent by: the plane of queues has it sent by in its
// program's place. abort ends it by RST.
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
	return func(ctx context.Context) error {
		return l.CloseSocket(ctx, t.number(), n.ID, protocol.Abort)
	}, true, nil
}

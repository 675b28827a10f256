package verbs

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// Port is where each endpoint with verbs takes connections of the others' queue pairs. A program of
// it cannot bind it.
const Port = 4791

// connectTime bounds a connect for the router, which asks again.
const connectTime = 10 * time.Second

// acceptPause is after an accept that failed for want of descriptors or memory.
const acceptPause = 10 * time.Millisecond

// connect answers a CONNECT: with a socket that is connected as a program of the endpoint would be,
// or why there is none.
func (p *Plane) connect(ctx context.Context, l *link, asked heard) {
	id, known := p.numbered(l, asked.Endpoint)
	var file *os.File
	err := error(unix.ENETDOWN) // the endpoint is gone
	if known {
		ctx, cancel := context.WithTimeout(ctx, connectTime)
		defer cancel()
		file, err = p.cfg.Sockets.ConnectRDMA(ctx, id, netip.AddrPortFrom(asked.to, Port))
	}
	if file != nil {
		defer file.Close() // the router has its own
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.tellCard(l, asked.Endpoint, asked.to)
	}
	p.send(l, connectedMessage(asked.Head, errnoOf(err)), file)
}

// errnoOf gives what connect() would have said.
func errnoOf(err error) unix.Errno {
	var errno unix.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return errno
	case errors.Is(err, context.DeadlineExceeded):
		return unix.ETIMEDOUT
	case errors.Is(err, model.ErrSocketQuota):
		return unix.EMFILE
	}
	return unix.EIO
}

// accept gives the router what connects to an endpoint, until the listener is closed. What comes
// while no router runs is closed.
func (p *Plane) accept(ep *endpoint, listener net.Listener) {
	for {
		conn, err := listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			p.cfg.Log.Warn("connection for verbs not accepted", "endpoint", ep.Name, "err", err)
			time.Sleep(acceptPause)
		default:
			if err := p.accepted(ep, conn.(*net.TCPConn)); err != nil {
				p.cfg.Log.Warn("connection for verbs not handed over", "endpoint", ep.Name, "err", err)
			}
		}
	}
}

func (p *Plane) accepted(ep *endpoint, conn *net.TCPConn) error {
	defer conn.Close()
	file, err := conn.File()
	if err != nil {
		return err
	}
	defer file.Close()
	from, to := conn.RemoteAddr().(*net.TCPAddr).AddrPort(), conn.LocalAddr().(*net.TCPAddr).AddrPort()
	p.mu.Lock()
	defer p.mu.Unlock()
	if ep.router != nil && p.endpoints[ep.ID] == ep {
		p.tellCard(ep.router, ep.number, from.Addr())
		p.send(ep.router, acceptedMessage(ep.number, from.Addr(), to.Addr()), file)
	}
	return nil
}

package tcp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// Sockets that another plane has in the name of an endpoint: as if a program of it had called
// socket(), connect() and bind(). They pass the same hooks, because these go by who made a socket,
// and that is the agent for all of them.

// connectPoll bounds a wait for a connection, in milliseconds, after which ctx is looked at.
const connectPoll = 100

// ConnectAs connects a socket of endpoint id. The error is an errno of connect(), or ctx's.
func (p *Plane) ConnectAs(ctx context.Context, id model.EndpointID, to netip.AddrPort) (*os.File, error) {
	fd, err := p.socketOf(id, to.Addr().Is6())
	if err != nil {
		return nil, err
	}
	return connect(ctx, fd, to)
}

// ConnectRDMA is ConnectAs for a connection of which flows say that it is RDMA's.
func (p *Plane) ConnectRDMA(ctx context.Context, id model.EndpointID, to netip.AddrPort) (*os.File, error) {
	fd, err := p.socketOfRDMA(id, to.Addr().Is6())
	if err != nil {
		return nil, err
	}
	return connect(ctx, fd, to)
}

// connect connects a socket, which is closed if that fails.
func connect(ctx context.Context, fd int, to netip.AddrPort) (_ *os.File, err error) {
	file := os.NewFile(uintptr(fd), to.String())
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	err = unix.Connect(fd, sockaddr(to))
	for err == unix.EINPROGRESS {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		ready, pollErr := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, connectPoll)
		if pollErr != nil && pollErr != unix.EINTR {
			return nil, fmt.Errorf("poll: %w", pollErr)
		}
		if ready == 0 || pollErr != nil {
			continue
		}
		errno, optErr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if optErr != nil {
			return nil, fmt.Errorf("get SO_ERROR: %w", optErr)
		}
		if err = nil; errno != 0 {
			err = unix.Errno(errno)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return file, nil
}

// ListenRDMA listens at a port of endpoint id, in all families that it has. What it accepts has the
// peers' addresses as programs of the endpoint would see them; flows say that it is RDMA's.
func (p *Plane) ListenRDMA(id model.EndpointID, port uint16, ipv6 bool) (net.Listener, error) {
	fd, err := p.socketOfRDMA(id, ipv6)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), fmt.Sprintf("port %d", port))
	defer file.Close()
	at := netip.AddrPortFrom(netip.IPv4Unspecified(), port)
	if ipv6 {
		at = netip.AddrPortFrom(netip.IPv6Unspecified(), port)
	}
	// Connections of an earlier listener may be in TIME_WAIT.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return nil, fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(at)); err != nil {
		return nil, fmt.Errorf("bind to port %d: %w", port, err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, fmt.Errorf("listen at port %d: %w", port, err)
	}
	return net.FileListener(file)
}

// SocketAs makes a socket of endpoint id, as socket() does, that never waits.
func (p *Plane) SocketAs(id model.EndpointID, ipv6 bool) (*os.File, error) {
	fd, err := p.socketOf(id, ipv6)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "socket"), nil
}

// socketOf makes a socket of endpoint id that is counted as one of its, non-blocking.
func (p *Plane) socketOf(id model.EndpointID, ipv6 bool) (fd int, err error) {
	family := unix.AF_INET
	if ipv6 {
		family = unix.AF_INET6
	}
	s := sockets{p.datapath, p.nodePorts}
	if fd, err = s.MakeSocket(id, family); err != nil {
		return -1, err
	}
	if err = unix.SetNonblock(fd, true); err == nil {
		err = s.Admit(fd, model.Caller{AnyOwner: true})
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// socketOfRDMA is socketOf for the verbs plane.
func (p *Plane) socketOfRDMA(id model.EndpointID, ipv6 bool) (fd int, err error) {
	if fd, err = p.socketOf(id, ipv6); err != nil {
		return -1, err
	}
	if err = p.datapath.TagRDMA(fd); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

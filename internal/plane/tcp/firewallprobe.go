package tcp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// firewallProbesAtOnce is how many probes of the firewalls are under way at most: each is a socket.
const firewallProbesAtOnce = 256

// firewallProbe is one that was sent.
type firewallProbe struct {
	datapath.FirewallProbe
	fd int // -1: it was answered at once
}

// probeFirewalls connects from the own stack of the container at netns, as a process that is not
// intercepted would, to where each of keys leads. The SYNs are marked, and are answered where they
// arrive (bpf/tc/firewall.h): no program sees them.
func (p *Plane) probeFirewalls(ctx context.Context, netns string, keys []datapath.FirewallKey) (map[datapath.FirewallKey]firewallAnswer, error) {
	var sent []firewallProbe
	err := netcfg.InContainer(netns, func() error {
		for _, k := range keys {
			one, err := p.sendFirewallProbe(k)
			if err != nil {
				return err
			}
			sent = append(sent, one)
		}
		return nil
	})
	fds := make([]unix.PollFd, len(sent))
	for i, s := range sent {
		fds[i] = unix.PollFd{Fd: int32(s.fd), Events: unix.POLLOUT}
	}
	await(ctx, fds)
	answers := make(map[datapath.FirewallKey]firewallAnswer)
	for _, s := range sent {
		if s.fd >= 0 {
			_ = unix.Close(s.fd)
		}
		left, passed, errEnd := p.datapath.EndFirewallProbe(s.FirewallProbe)
		err = errors.Join(err, errEnd)
		switch {
		case passed:
			answers[s.FirewallKey] = firewallPassed
		case left && ctx.Err() == nil:
			answers[s.FirewallKey] = firewallForbids
		}
	}
	return answers, err
}

// sendFirewallProbe begins a connect in the calling thread's network namespace.
func (p *Plane) sendFirewallProbe(k datapath.FirewallKey) (_ firewallProbe, err error) {
	from, family := k.Src, unix.AF_INET
	if k.Dst.Addr().Is6() {
		from, family = model.Overlay6(p.cfg.Prefix6, k.Src), unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return firewallProbe{}, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return firewallProbe{}, fmt.Errorf("set SO_LINGER: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))); err != nil {
		return firewallProbe{}, fmt.Errorf("bind to %s: %w", from, err)
	}
	bound, err := boundPort(fd)
	if err != nil {
		return firewallProbe{}, err
	}
	if err := p.datapath.TagFirewallProbe(fd, k); err != nil {
		return firewallProbe{}, err
	}
	one := firewallProbe{datapath.FirewallProbe{FirewallKey: k, Port: bound}, fd}
	if err := p.datapath.ExpectFirewallProbe(one.FirewallProbe); err != nil {
		return firewallProbe{}, err
	}
	if err := unix.Connect(fd, sockaddr(k.Dst)); err != nil && err != unix.EINPROGRESS {
		// Without a route in the container, say: it has not left, so nothing is known.
		_ = unix.Close(fd)
		one.fd = -1
	}
	return one, nil
}

// boundPort gives the port that a socket is bound to.
func boundPort(fd int) (uint16, error) {
	at, err := unix.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("get the port of a probe: %w", err)
	}
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return uint16(at.Port), nil
	case *unix.SockaddrInet6:
		return uint16(at.Port), nil
	}
	return 0, fmt.Errorf("get the port of a probe: %T", at)
}

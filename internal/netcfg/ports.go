package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// ErrPortTaken says that a process of the node has the port, ErrNotLocal that the node does not
// have the address.
var (
	ErrPortTaken = errors.New("a process of the node has this port")
	ErrNotLocal  = errors.New("the node does not have this address")
)

// CheckPort reports whether a port of the node may be published: ErrNotLocal, ErrPortTaken or nil.
// containers are prefixes of addresses at which containers of the node listen.
func CheckPort(p model.PublishedPort, containers []netip.Prefix) error {
	if a := p.HostAddr; a.IsValid() && !a.IsUnspecified() {
		have, err := NodeAddrs()
		if err != nil {
			return err
		}
		if !slices.Contains(have, a) {
			return ErrNotLocal
		}
	}
	if p.Protocol == model.PortUDP {
		return checkDatagrams(p)
	}
	listeners, err := ListenersIn(model.PortRange{First: p.HostPort, Last: p.HostPort})
	if err != nil {
		return err
	}
	for _, l := range listeners {
		a := l.Addr()
		both := a == netip.IPv6Unspecified() // it may take IPv4, too
		contained := slices.ContainsFunc(containers, func(p netip.Prefix) bool { return p.Contains(a) })
		if !contained && (both || p.ReachedBy(a)) {
			return ErrPortTaken
		}
	}
	return nil
}

// checkDatagrams looks whether a socket for datagrams can be bound. Containers have theirs in their
// own namespaces.
func checkDatagrams(p model.PublishedPort) error {
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		at := p.HostAddr
		if !at.IsValid() {
			at = all
		}
		if at.Is4() != all.Is4() {
			continue
		}
		network := "udp4"
		if at.Is6() {
			network = "udp6"
		}
		s, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, p.HostPort)))
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			return ErrPortTaken
		case errors.Is(err, unix.EAFNOSUPPORT):
			continue
		case err != nil:
			return fmt.Errorf("look whether a port is free: %w", err)
		}
		if err := s.Close(); err != nil {
			return fmt.Errorf("look whether a port is free: %w", err)
		}
	}
	return nil
}

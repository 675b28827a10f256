package model

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxPublishedPorts bounds the published ports of an endpoint: they stand in its record.
const MaxPublishedPorts = 512

// Protocols of published ports.
const (
	PortTCP = "tcp"
	PortUDP = "udp"
)

// PublishedPort is a port of a node that leads to one of an endpoint's.
type PublishedPort struct {
	// HostAddr is the address of the node: an unspecified one for all of its family, the zero Addr
	// for all.
	HostAddr netip.Addr `json:"host_addr,omitzero"`
	// HostPort is the node's port.
	HostPort uint16 `json:"host_port"`
	// Port is the container's.
	Port uint16 `json:"port"`
	// Protocol is PortTCP or PortUDP.
	Protocol string `json:"protocol"`
}

// PortRequest asks for a published port. HostPort 0 leaves the choice to the agent.
type PortRequest struct {
	PublishedPort
	// HostPortEnd, if it is not 0, is the last of the ports from HostPort on of which the agent may
	// choose.
	HostPortEnd uint16 `json:"host_port_end,omitempty"`
}

// Validate checks a published port's form.
func (p PublishedPort) Validate() error {
	if p.HostPort == 0 {
		return fmt.Errorf("%s: host_port: want 1..65535", p)
	}
	return PortRequest{PublishedPort: p}.Validate()
}

// Validate checks a request's form.
func (r PortRequest) Validate() error {
	a := r.HostAddr
	switch {
	case r.Protocol != PortTCP && r.Protocol != PortUDP:
		return fmt.Errorf("%s: protocol %.20q: want tcp or udp", r, r.Protocol)
	case r.Port == 0:
		return fmt.Errorf("%s: port: want 1..65535", r)
	case r.HostPortEnd != 0 && (r.HostPort == 0 || r.HostPortEnd < r.HostPort):
		return fmt.Errorf("%s: host_port_end %d: want the last port of a range from host_port on", r, r.HostPortEnd)
	case a.IsValid() && (a.Is4In6() || a.Zone() != "" || a.IsMulticast() || a.IsLinkLocalUnicast() || a == netip.IPv6Loopback()):
		return fmt.Errorf("%s: host_addr: containers are not reached at %s", r, a)
	case a.IsLoopback() && a != Loopback4:
		return fmt.Errorf("%s: host_addr: of loopback addresses, 127.0.0.1 alone", r)
	}
	return nil
}

// Loopback4 is 127.0.0.1.
var Loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// ValidatePorts checks the published ports of an endpoint.
func ValidatePorts(ports []PublishedPort) error {
	if len(ports) > MaxPublishedPorts {
		return fmt.Errorf("%d ports, at most %d are taken", len(ports), MaxPublishedPorts)
	}
	for i, p := range ports {
		if err := p.Validate(); err != nil {
			return err
		}
		if j := slices.IndexFunc(ports[:i], p.Overlaps); j >= 0 {
			return fmt.Errorf("%s: its port is that of %s", p, ports[j])
		}
	}
	return nil
}

// Overlaps reports whether one packet could be for both p and q.
func (p PublishedPort) Overlaps(q PublishedPort) bool {
	return p.Protocol == q.Protocol && p.HostPort == q.HostPort && overlaps(p.HostAddr, q.HostAddr)
}

func overlaps(a, b netip.Addr) bool {
	if !a.IsValid() || !b.IsValid() || a == b {
		return true
	}
	return a.Is4() == b.Is4() && (a.IsUnspecified() || b.IsUnspecified())
}

// ReachedBy reports whether what is for a, an address of the node or an unspecified one, may be for
// p.
func (p PublishedPort) ReachedBy(a netip.Addr) bool { return overlaps(p.HostAddr, a) }

// Meets reports whether p is what r asks for.
func (r PortRequest) Meets(p PublishedPort) bool {
	inRange := r.HostPort == 0 || p.HostPort >= r.HostPort && p.HostPort <= max(r.HostPort, r.HostPortEnd)
	return inRange && r.HostAddr == p.HostAddr && r.Port == p.Port && r.Protocol == p.Protocol
}

// String is the form of `docker ps`: "192.0.2.1:8080->80/tcp", with * for every address.
func (p PublishedPort) String() string {
	host := "*"
	if p.HostAddr.IsValid() {
		host = p.HostAddr.String()
		if p.HostAddr.Is6() {
			host = "[" + host + "]"
		}
	}
	return fmt.Sprintf("%s:%d->%d/%s", host, p.HostPort, p.Port, p.Protocol)
}

// ParsePort reads "[IP:][HOSTPORT[-LAST]]:PORT[/tcp|/udp]", as `docker run -p` does; an IPv6
// address stands in brackets.
func ParsePort(text string) (r PortRequest, err error) {
	bad := func(why string) (PortRequest, error) {
		return PortRequest{}, fmt.Errorf("port %.80q: %s; write [IP:]HOSTPORT:PORT[/tcp|/udp]", text, why)
	}
	rest, protocol, named := strings.Cut(text, "/")
	if r.Protocol = protocol; !named {
		r.Protocol = PortTCP
	}
	at := strings.LastIndexByte(rest, ':')
	if at < 0 {
		return bad("one port")
	}
	if r.Port, err = parsePort(rest[at+1:]); err != nil {
		return bad(err.Error())
	}
	host := rest[:at]
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		addr := strings.TrimSuffix(strings.TrimPrefix(host[:i], "["), "]")
		if r.HostAddr, err = netip.ParseAddr(addr); err != nil {
			return bad(fmt.Sprintf("%q is no IP address", addr))
		}
		host = host[i+1:]
	}
	first, last, isRange := strings.Cut(host, "-")
	if first != "" {
		if r.HostPort, err = parsePort(first); err != nil {
			return bad(err.Error())
		}
	}
	if isRange {
		if r.HostPortEnd, err = parsePort(last); err != nil {
			return bad(err.Error())
		}
	}
	return r, r.Validate()
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is no port of 1..65535", text)
	}
	return uint16(n), nil
}

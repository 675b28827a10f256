package model

import (
	"fmt"
	"net/netip"
	"strings"
)

// Limits of services, of one node: what the datapath's maps have room for.
const (
	MaxServices         = 65536
	MaxBackends         = 524288 // of all services together
	MaxBackendsOfOne    = 32768
	MaxAffinity         = 86400 // seconds, as in Kubernetes
	thisNetworkFirst    = 0
	multicastFirstLeast = 224
)

// ServiceAddr is an address and a port, of TCP unless UDP is set. As text it is ADDRESS:PORT, and
// of UDP ADDRESS:PORT/udp.
type ServiceAddr struct {
	netip.AddrPort
	UDP bool
}

const udpSuffix = "/udp"

// String gives the text.
func (a ServiceAddr) String() string {
	if a.UDP {
		return a.AddrPort.String() + udpSuffix
	}
	return a.AddrPort.String()
}

// Compare orders by address and port; TCP comes before UDP.
func (a ServiceAddr) Compare(b ServiceAddr) int {
	if c := a.AddrPort.Compare(b.AddrPort); c != 0 || a.UDP == b.UDP {
		return c
	}
	if b.UDP {
		return -1
	}
	return 1
}

// MarshalText implements encoding.TextMarshaler.
func (a ServiceAddr) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *ServiceAddr) UnmarshalText(text []byte) error {
	at, udp := strings.CutSuffix(string(text), udpSuffix)
	if udp && at == "" {
		return fmt.Errorf("%q is no ADDRESS:PORT/udp", text)
	}
	a.UDP = udp
	return a.AddrPort.UnmarshalText([]byte(at))
}

// Service is an address and a port that stand for backends. A connect of an intercepted socket goes
// to one of them; for what containers' own stacks send, and others translate, policy is asked about
// them.
type Service struct {
	// Addr is what programs connect to, or send to. It is nobody's address.
	Addr ServiceAddr `json:"addr"`
	// Backends are of Addr's family, each as likely. Without any, connects are refused.
	Backends []netip.AddrPort `json:"backends"`
	// Affinity is for how many seconds after its last connect an endpoint keeps its backend; 0:
	// each connect picks anew.
	Affinity uint32 `json:"affinity_s,omitempty"`
}

// ServiceError says what is wrong with a service.
type ServiceError struct{ Field, Message string }

// Error implements error.
func (e *ServiceError) Error() string { return e.Field + ": " + e.Message }

// Validate reports the first thing that is wrong: a *ServiceError.
func (s Service) Validate() error {
	if err := validTarget(s.Addr.AddrPort); err != "" {
		return &ServiceError{"addr", err}
	}
	if len(s.Backends) > MaxBackendsOfOne {
		return &ServiceError{"backends", fmt.Sprintf("%d of them, at most %d are taken", len(s.Backends), MaxBackendsOfOne)}
	}
	if s.Affinity > MaxAffinity {
		return &ServiceError{"affinity_s", fmt.Sprintf("%d seconds, at most %d are taken", s.Affinity, MaxAffinity)}
	}
	seen := make(map[netip.AddrPort]bool, len(s.Backends))
	for i, b := range s.Backends {
		field := fmt.Sprintf("backends[%d]", i)
		switch err := validTarget(b); {
		case err != "":
			return &ServiceError{field, err}
		case b.Addr().Is4() != s.Addr.Addr().Is4():
			return &ServiceError{field, fmt.Sprintf("%s is of another family than %s", b, s.Addr)}
		case seen[b]:
			return &ServiceError{field, fmt.Sprintf("%s is there twice", b)}
		}
		seen[b] = true
	}
	return nil
}

// validTarget says why connects cannot be sent to an address and port; "" if they can. Loopback is
// each container's own.
func validTarget(a netip.AddrPort) string {
	ip := a.Addr()
	switch {
	case !a.IsValid() || a.Port() == 0:
		return fmt.Sprintf("%s is no ADDRESS:PORT", a)
	case ip.Is4In6() || ip.Zone() != "":
		return fmt.Sprintf("%s: write IPv4 as such, and no zone", a)
	case ip.IsUnspecified(), ip.IsLoopback(), ip.IsMulticast(), ip.IsLinkLocalUnicast(),
		ip.Is4() && (ip.As4()[0] == thisNetworkFirst || ip.As4()[0] >= multicastFirstLeast):
		return fmt.Sprintf("%s: want an address of one host, no loopback, link-local, multicast or reserved one", a)
	}
	return ""
}

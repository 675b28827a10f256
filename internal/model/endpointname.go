package model

import (
	"fmt"
	"strings"
)

// MaxEndpointName bounds an endpoint's name, in bytes.
const MaxEndpointName = 200

// EndpointByNetns, where a container's runtime names its endpoint, says that it is the endpoint of
// the network namespace the container is in. No endpoint can have this name.
const EndpointByNetns = "@netns"

// EndpointNone, in the same place, is that of a container which is not intercepted: it gets no
// sockets of the node, but a socket of the node that came into its hands must show it, and change,
// nothing of the node.
const EndpointNone = "@none"

// DefaultDevice is the name of an endpoint's device in its container unless another is asked for.
const DefaultDevice = "eth0"

// ContainerDevice gives the name of the endpoint's device in its container.
func (e Endpoint) ContainerDevice() string {
	if e.Device == "" {
		return DefaultDevice
	}
	return e.Device
}

// ValidateEndpointName checks an endpoint's name: one or more parts joined by '/', each of letters,
// digits, '_', '.', ':' and '-', beginning with a letter or digit.
func ValidateEndpointName(name string) error {
	if name == "" || len(name) > MaxEndpointName {
		return fmt.Errorf("name is %d bytes long, want 1 to %d", len(name), MaxEndpointName)
	}
	for part := range strings.SplitSeq(name, "/") {
		if !validNamePart(part) {
			return fmt.Errorf("%.200q is no endpoint name: want parts joined by '/', each a letter or digit followed by letters, digits, '_', '.', ':' or '-'", name)
		}
	}
	return nil
}

func validNamePart(s string) bool {
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.:-", rune(c))) {
			return false
		}
	}
	return s != ""
}

// maxDeviceName is IFNAMSIZ without the terminating NUL.
const maxDeviceName = 15

// ValidateDevice checks the name of an endpoint's device, "" for the default: what the kernel takes
// for a new device, and no name that means something else in /proc/sys/net.
func ValidateDevice(name string) error {
	switch {
	case name == "":
		return nil
	case len(name) > maxDeviceName:
		return fmt.Errorf("%.40q: want at most %d bytes", name, maxDeviceName)
	case name == "." || name == ".." || name == "lo" || name == "all" || name == "default":
		return fmt.Errorf("%q: the name has another meaning", name)
	}
	for i := range len(name) {
		if c := name[i]; c <= ' ' || c > '~' || strings.IndexByte("/:%", c) >= 0 {
			return fmt.Errorf("%q: want printable characters without '/', ':', '%%' and spaces", name)
		}
	}
	return nil
}

// Validate checks the form of an attachment's names.
func (a CNIAttachment) Validate() error {
	if len(a.Network) > MaxEndpointName || !validNamePart(a.Network) {
		return fmt.Errorf("network %.40q: want a letter or digit followed by letters, digits, '_', '.' or '-'", a.Network)
	}
	if len(a.ContainerID) > MaxEndpointName || !validNamePart(a.ContainerID) {
		return fmt.Errorf("container_id %.40q: want a letter or digit followed by letters, digits, '_', '.' or '-'", a.ContainerID)
	}
	return nil
}

// maxAdoptedPrefixes bounds the prefixes of an adopted network.
const maxAdoptedPrefixes = 16

// Validate checks the form of an adopted network's prefixes.
func (c Adopted) Validate() error {
	if len(c.Prefixes) > maxAdoptedPrefixes {
		return fmt.Errorf("%d prefixes, at most %d are taken", len(c.Prefixes), maxAdoptedPrefixes)
	}
	for _, p := range c.Prefixes {
		a := p.Addr()
		if !p.IsValid() || !a.Is4() || p != p.Masked() || p.Bits() < 8 || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() {
			return fmt.Errorf("prefix %s: want an IPv4 NETWORK-ADDRESS/LENGTH of unicast addresses, /8 or longer", p)
		}
	}
	return nil
}

// AnnotationSocketPool says "true" of a container whose programs may have several sockets at a
// time: what libheddle-pool.so, which heddle-runtime preloads there, asks for.
const AnnotationSocketPool = "io.heddle.socket-pool"

// AnnotationStack says "true" of a container whose TCP a stack module may run, if a stack profile
// says so: more of its calls are trapped.
const AnnotationStack = "io.heddle.stack"

// AnnotationGuest says "true" of a container whose connections within its node may go through
// shared memory, if a stack profile says so: heddle-runtime preloads libheddle-guest.so there.
const AnnotationGuest = "io.heddle.guest"

// AnnotationVerbs says "true" of a container that is to have its endpoint's RDMA device:
// docs/howto/rdma.md.
const AnnotationVerbs = "io.heddle.verbs"

// AnnotationVerbsSpin says VerbsEndpoint.SpinMicros of such a container's endpoint.
const AnnotationVerbsSpin = "io.heddle.verbs-spin-us"

package netstack

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// errMalformed is the error of bytes that break the rules of docs/protocols/stack-module.md.
var errMalformed = errors.New("malformed message of the agent")

const (
	bindFlags = protocol.ReuseAddress | protocol.ReusePort | protocol.V6Only
	skipMax   = 1 << 20
)

// parse reads a message of the agent's, which came with so many descriptors: its head, and a
// pointer to the struct that its type has.
func parse(b []byte, descriptors int) (head protocol.Head, body any, err error) {
	if head, err = protocol.ParseHead(b[:min(len(b), 32)]); err != nil || head.Error != 0 {
		return head, nil, errMalformed
	}
	if body, err = parseBody(head.Type, b); err != nil {
		return head, nil, err
	}
	if !isAbout(head, head.Type) || !mayHave(head.Type, descriptors) {
		return head, nil, errMalformed
	}
	return head, body, nil
}

func parseBody(kind uint32, b []byte) (any, error) {
	switch kind {
	case protocol.TypeHello:
		return whole(b, func(m *protocol.Hello) bool { return m.Features == 0 && m.Name == [32]uint8{} })
	case protocol.TypeTenant:
		return whole(b, func(m *protocol.Tenant) bool {
			return m.Reserved == 0 && m.Limits.Reserved == 0 && m.Offloads <= 1 && known(&m.Options)
		})
	case protocol.TypeBind:
		return whole(b, func(m *protocol.Bind) bool {
			return m.Reserved == 0 && m.Flags&^bindFlags == 0 && clean(m.Address)
		})
	case protocol.TypeListen:
		return whole(b, func(m *protocol.Listen) bool {
			return m.Flags&^bindFlags == 0 && known(&m.Options) && clean(m.Address)
		})
	case protocol.TypeConnect:
		return whole(b, func(m *protocol.Connect) bool {
			return m.Reserved == 0 && m.Skip > 0 && m.Skip <= skipMax && known(&m.Options) && clean(m.Remote)
		})
	case protocol.TypeSet:
		return whole(b, func(m *protocol.Set) bool { return known(&m.Options) })
	case protocol.TypeClose:
		return whole(b, func(m *protocol.Close) bool { return m.Reserved == 0 && m.Flags&^protocol.Abort == 0 })
	case protocol.TypeBegin, protocol.TypeEnd, protocol.TypeTenantGone, protocol.TypeTaken, protocol.TypeInfo, protocol.TypeStats, protocol.TypeList, protocol.TypeTellSent:
		return whole(b, func(*protocol.Plain) bool { return true })
	}
	return nil, fmt.Errorf("%w: type %d", errMalformed, kind)
}

func whole[M protocol.Message](b []byte, good func(*M) bool) (any, error) {
	m, err := protocol.Parse[M](b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if !good(&m) {
		return nil, fmt.Errorf("%w: %T", errMalformed, m)
	}
	return &m, nil
}

func known(o *protocol.Options) bool {
	return o.Mask&^uint32(protocol.SetAll) == 0 && o.Reserved == [3]uint32{}
}
func clean(a protocol.Address) bool { return a.Reserved == [3]uint16{} }

// isAbout reports whether a message names the tenant and socket that its type asks for.
func isAbout(h protocol.Head, kind uint32) bool {
	switch kind {
	case protocol.TypeHello, protocol.TypeBegin, protocol.TypeEnd, protocol.TypeTellSent:
		return h.Tenant == 0 && h.ID == 0
	case protocol.TypeStats:
		return h.ID == 0
	case protocol.TypeTenant, protocol.TypeTenantGone, protocol.TypeList:
		return h.Tenant != 0 && h.ID == 0
	case protocol.TypeBind, protocol.TypeListen, protocol.TypeConnect:
		// These make an id, which has to be one of the agent's.
		return h.Tenant != 0 && h.ID != 0 && h.ID&protocol.IDOfModule == 0
	}
	return h.Tenant != 0 && h.ID != 0
}

func mayHave(kind uint32, descriptors int) bool {
	switch kind {
	case protocol.TypeConnect:
		return descriptors == 1
	case protocol.TypeTenant:
		return descriptors <= 1
	}
	return descriptors == 0
}

// answerTo gives the head of the answer to a request.
func answerTo(h protocol.Head, err error) protocol.Head {
	var errno unix.Errno
	if err != nil && !errors.As(err, &errno) {
		errno = unix.EIO
	}
	return protocol.Head{Type: h.Type | protocol.Answer, Tag: h.Tag, Tenant: h.Tenant, ID: h.ID, Error: int32(errno)}
}

// plain gives an answer without anything else: done, or why not.
func plain(h protocol.Head, err error) []byte {
	return protocol.Append(nil, &protocol.Plain{Head: answerTo(h, err)})
}

// addressOf gives the form that an address has in messages; that of nothing is 0.0.0.0:0.
func addressOf(a netip.AddrPort) protocol.Address {
	if !a.IsValid() {
		a = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	return protocol.AddressOf(a)
}

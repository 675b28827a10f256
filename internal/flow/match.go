package flow

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"heddle.dev/heddle/internal/model"
)

// PeerMatch chooses ends of flows: by address, by a prefix of addresses or by the endpoint's name.
type PeerMatch struct {
	// Prefix holds the address; the zero Prefix: Name is asked.
	Prefix netip.Prefix
	// Name is a glob: * stands for any characters, also none and slashes, ? for one.
	Name string
}

// String gives what parsePeer reads.
func (m PeerMatch) String() string {
	switch {
	case !m.Prefix.IsValid():
		return m.Name
	case m.Prefix.IsSingleIP():
		return m.Prefix.Addr().String()
	}
	return m.Prefix.String()
}

func (m PeerMatch) matches(p Peer) bool {
	if m.Prefix.IsValid() {
		return m.Prefix.Contains(p.Addr)
	}
	return p.Endpoint != "" && glob(m.Name, p.Endpoint)
}

func parsePeer(key, value string) (PeerMatch, error) {
	if a, err := netip.ParseAddr(value); err == nil {
		if a.Zone() != "" {
			return PeerMatch{}, &FieldError{Field: key, Message: fmt.Sprintf("%s has a zone", short(value)), Remedy: "give the address without it"}
		}
		a = a.Unmap()
		return PeerMatch{Prefix: netip.PrefixFrom(a, a.BitLen())}, nil
	}
	if p, err := netip.ParsePrefix(value); err == nil {
		if p != p.Masked() {
			return PeerMatch{}, &FieldError{Field: key, Message: fmt.Sprintf("%s has bits behind the prefix", p), Remedy: fmt.Sprintf("did you mean %s?", p.Masked())}
		}
		if p.Addr().Is4In6() {
			return PeerMatch{}, &FieldError{Field: key, Message: fmt.Sprintf("%s is an IPv4 prefix in IPv6's form", p), Remedy: "write it as 10.0.0.0/8"}
		}
		return PeerMatch{Prefix: p}, nil
	}
	if numeric.MatchString(value) || !isText(value) {
		return PeerMatch{}, &FieldError{Field: key, Message: fmt.Sprintf("%s is neither an address, nor a prefix, nor a name", short(value)),
			Remedy: "write n1/c1, web-*, 10.244.0.2 or 10.244.0.0/16"}
	}
	return PeerMatch{Name: value}, nil
}

// numeric is what wants to be an address, and is none, if netip does not take it.
var numeric = regexp.MustCompile(`^([0-9]+\.)+[0-9]+(/[0-9]*)?$|^[0-9a-fA-F]*:[0-9a-fA-F:.]*(/[0-9]*)?$`)

// isText reports whether s can be part of a name.
func isText(s string) bool {
	for _, c := range s {
		if c == utf8.RuneError || unicode.IsSpace(c) || !unicode.IsPrint(c) {
			return false
		}
	}
	return true
}

// LabelMatch chooses ends that have a label.
type LabelMatch struct {
	Key, Value string
	// Any: whatever its value.
	Any bool
}

// String gives what parseLabel reads.
func (l LabelMatch) String() string {
	if l.Any {
		return l.Key
	}
	return l.Key + "=" + l.Value
}

func (l LabelMatch) matches(labels map[string]string) bool {
	v, ok := labels[l.Key]
	return ok && (l.Any || v == l.Value)
}

func parseLabel(key, value string) (LabelMatch, error) {
	k, v, withValue := strings.Cut(value, "=")
	if k == "" || !isText(k) {
		return LabelMatch{}, &FieldError{Field: key, Message: short(value) + " is no label", Remedy: "write KEY=VALUE, or KEY for any value"}
	}
	return LabelMatch{Key: k, Value: v, Any: !withValue}, nil
}

// PortRange is a range of destination ports, inclusive.
type PortRange struct{ First, Last uint16 }

// String gives "80" or "8000-8999".
func (p PortRange) String() string {
	if p.First == p.Last {
		return itoa(p.First)
	}
	return itoa(p.First) + "-" + itoa(p.Last)
}

func parsePorts(key, value string) (PortRange, error) {
	first, last, isRange := strings.Cut(value, "-")
	if !isRange {
		last = first
	}
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if errA != nil || errB != nil || a == 0 {
		return PortRange{}, &FieldError{Field: key, Message: short(value) + " is no port", Remedy: "write 80, or 8000-8999"}
	}
	if a > b {
		return PortRange{}, &FieldError{Field: key, Message: fmt.Sprintf("%s: no port is in it", short(value)), Remedy: fmt.Sprintf("did you mean %d-%d?", b, a)}
	}
	return PortRange{uint16(a), uint16(b)}, nil
}

func itoa(port uint16) string { return strconv.Itoa(int(port)) }

var word = regexp.MustCompile(`^[a-z0-9_-]+$`)

// parsePath takes any word: which paths there are, planes know.
func parsePath(key, value string) (model.Path, error) {
	if !word.MatchString(value) {
		return "", &FieldError{Field: key, Message: short(value) + " is no path", Remedy: "use direct, local, loopback, overlay, node, outside, ..."}
	}
	return model.Path(value), nil
}

var reasonGlob = regexp.MustCompile(`^[a-z0-9_*?]+$`)

func parseReason(key, value string) (string, error) {
	if !reasonGlob.MatchString(value) {
		return "", &FieldError{Field: key, Message: short(value) + " is no reason", Remedy: "`heddle status --all` lists them; * and ? stand for any characters, as in fallback_*"}
	}
	return value, nil
}

// glob reports whether s is what pattern says, in time of the product of their lengths at most.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

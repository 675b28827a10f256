package generate

import (
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// Exclusion is a known difference: programs with a step that may show it are generated without that step. To test
// what became equal, take the entry out.
type Exclusion struct {
	Name string
	Row  string // part of its row in docs/differences.md
	// Excludes looks at a step and at what the steps kept before it did.
	Excludes func(h history, s differ.Step) bool
}

// Exclusions is all that is not generated though the generator could.
var Exclusions = []Exclusion{
	{"bind conflicts", "0.0.0.0:p and 127.0.0.1:p conflict", func(h history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Port != "0" && h.boundElsewhere(s)
	}},
	{"127.0.0.0/8", "127.0.0.1:p and 127.0.0.2:p are two addresses", func(h history, s differ.Step) bool {
		return s.Addr != nil && s.Addr.Host == "lo5"
	}},
	{"listen without bind", "listen() without bind()", func(h history, s differ.Step) bool {
		return s.Op == "listen" && !slices.ContainsFunc(h.before, func(e differ.Step) bool { return e.At == s.At && e.Fd == s.Fd && h.binds(e) })
	}},
	{"v4-mapped wildcard", "`getsockname` after bind to ::ffff:0.0.0.0", func(h history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Form == "mapped" && s.Addr.Host == "any"
	}},
	{"unassigned address", "unassigned address of another node's prefix", func(h history, s differ.Step) bool {
		return s.Op == "connect" && s.Addr.Host == "nobody"
	}},
	{"bound socket to a closed port of its own", "a blocking connect of a **bound** socket to a closed port", func(h history, s differ.Step) bool {
		return s.Op == "connect" && h.own(s) && h.did("bind", s)
	}},
	{"name after a failed connect", "`getsockname` after a non-blocking connect that failed", func(h history, s differ.Step) bool {
		return s.Op == "connect" && h.nonblocking(s) && !h.listens(*s.Addr)
	}},
	{"binding what is no address of the container", "an address assigned to the container later can be bound", func(h history, s differ.Step) bool {
		return s.Op == "bind" && (s.Addr.Host == "multicast" || s.Addr.Host == "broadcast")
	}},
	{"bind of a socket that has a name", "a bind() that fails changes nothing", func(h history, s differ.Step) bool {
		return s.Op == "bind" && (h.did("bind", s) || h.did("connect", s) || h.did("listen", s) || h.accepted(s))
	}},
	{"bind with AF_UNSPEC", "bind() with AF_UNSPEC", func(h history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Form == "unspec"
	}},
	{"hops", "| IP_TTL, IP_MINTTL", func(h history, s differ.Step) bool {
		return s.Op == "setsockopt" && ofHops[option2(s)]
	}},
	{"SO_DONTROUTE", "| SO_DONTROUTE |", func(h history, s differ.Step) bool {
		return s.Op == "setsockopt" && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_DONTROUTE}
	}},
	{"negative lengths", "getsockopt with a negative length", func(h history, s differ.Step) bool {
		return s.Op == "getsockopt" && s.Arg(2) < 0
	}},
	{"buffers and segments of a path", "SO_SNDBUF, SO_RCVBUF", func(h history, s differ.Step) bool {
		return s.Op == "getsockopt" && ofPath[option2(s)]
	}},
	{"options of the socket level", "SO_MARK, SO_BINDTODEVICE", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_SOCKET && (slices.Contains([]int{0, 1, 25, 32, 33, 36, 50, 52, 62, 71}, s.Arg(1)) || s.Arg(1) < 0 || s.Arg(1) > 76)
	}},
	{"options of the IP level", "IP level: all but", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_IP && !slices.Contains([]int{1, 2, 8, 10, 12, 13, 14, 15, 21, 24, 51}, s.Arg(1))
	}},
	{"options of the IPv6 level", "IPv6 level: all but", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_IPV6 && !slices.Contains([]int{16, 23, 24, 33, 49, 51, 66, 67, 70, 72, 73, 78}, s.Arg(1))
	}},
	{"options of the TCP level", "TCP_MD5SIG(_EXT), TCP_REPAIR", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_TCP && (slices.Contains([]int{14, 19, 20, 21, 22, 27, 28, 29, 32}, s.Arg(1)) || s.Arg(1) <= 0 || s.Arg(1) > 37)
	}},
	{"options of unknown levels", "ENOPROTOOPT for levels other than", func(h history, s differ.Step) bool {
		return isOption(s) && !slices.Contains([]int{unix.SOL_SOCKET, unix.SOL_IP, unix.SOL_IPV6, unix.SOL_TCP}, s.Arg(0))
	}},
	{"TCP_FASTOPEN_CONNECT", "| TCP_FASTOPEN_CONNECT |", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_TCP && s.Arg(1) == unix.TCP_FASTOPEN_CONNECT
	}},
	{"IPV6_V6ONLY", "| IPV6_V6ONLY |", func(h history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_IPV6 && s.Arg(1) == unix.IPV6_V6ONLY
	}},
}

// ofPath are the options whose values follow from the path's segment size.
var ofPath = map[[2]int]bool{
	{unix.SOL_SOCKET, unix.SO_SNDBUF}: true, {unix.SOL_SOCKET, unix.SO_RCVBUF}: true, {unix.SOL_TCP, unix.TCP_MAXSEG}: true,
	{unix.SOL_TCP, unix.TCP_WINDOW_CLAMP}: true, {unix.SOL_IP, unix.IP_MTU}: true, {unix.SOL_IPV6, unix.IPV6_MTU}: true,
}

// ofHops are the options that count routers.
var ofHops = map[[2]int]bool{
	{unix.SOL_IP, unix.IP_TTL}: true, {unix.SOL_IP, unix.IP_MINTTL}: true, {unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS}: true, {unix.SOL_IPV6, 73}: true,
}

func isOption(s differ.Step) bool       { return s.Op == "getsockopt" || s.Op == "setsockopt" }
func option2(s differ.Step) (id [2]int) { return [2]int{s.Arg(0), s.Arg(1)} }

// history is what a program did before a step, as far as its text says.
type history struct {
	p      differ.Program
	before []differ.Step
}

// place gives where an actor is: actors of one place share its ports.
func (h history) place(at string) string {
	if at[0] == 'a' {
		return h.p.A
	}
	return h.p.B
}

// did reports whether the slot of a step, in the same container, was in such a call before: a child has the slots of
// its parent.
func (h history) did(op string, s differ.Step) bool {
	return slices.ContainsFunc(h.before, func(e differ.Step) bool { return e.Op == op && e.Fd == s.Fd && e.At[0] == s.At[0] })
}

// accepted reports whether the slot of a step may hold an accepted socket.
func (h history) accepted(s differ.Step) bool {
	return slices.ContainsFunc(h.before, func(e differ.Step) bool { return e.Op == "accept4" && e.To == s.Fd && e.At[0] == s.At[0] })
}

// boundElsewhere reports whether the port of a bind was bound before in the same place to another address.
func (h history) boundElsewhere(s differ.Step) bool {
	return slices.ContainsFunc(h.before, func(e differ.Step) bool {
		return e.Op == "bind" && e.Addr.Port == s.Addr.Port && h.place(e.At) == h.place(s.At) && (e.Addr.Host != s.Addr.Host || e.Addr.Form != s.Addr.Form)
	})
}

// own reports whether the address of a connect is in the caller's own container.
func (h history) own(s differ.Step) bool {
	switch s.Addr.Host {
	case "lo", "lo5", "any":
		return true
	case "a", "b":
		return h.place(s.At) == h.place(s.Addr.Host)
	}
	return false
}

// nonblocking reports whether the slot of a step may be non-blocking.
func (h history) nonblocking(s differ.Step) bool {
	return slices.ContainsFunc(h.before, func(e differ.Step) bool {
		return e.Op == "socket" && e.To == s.Fd && e.Arg(1)&nonblock != 0 || e.Op == "accept4" && e.Arg(0)&nonblock != 0 || e.Op == "fcntl" || e.Op == "ioctl"
	})
}

// family gives the address family of the TCP socket that was put into the slot of a step last, 0 if it is something else.
func (h history) family(s differ.Step) int {
	for _, e := range slices.Backward(h.before) {
		if e.Op == "socket" && e.At == s.At && e.To == s.Fd {
			if e.Arg(1)&^(nonblock|cloexec) != unix.SOCK_STREAM || e.Arg(2) != 0 && e.Arg(2) != unix.IPPROTO_TCP {
				return 0
			}
			return e.Arg(0)
		}
	}
	return 0
}

// binds reports whether a step is a bind that succeeds, unless the port is taken.
func (h history) binds(s differ.Step) bool {
	if s.Op != "bind" || s.Addr.Len != 0 || !slices.Contains([]string{"any", "lo", s.At[:1]}, s.Addr.Host) {
		return false
	}
	switch h.family(s) {
	case unix.AF_INET:
		return s.Addr.Form == "4"
	case unix.AF_INET6:
		return s.Addr.Form == "mapped" || s.Addr.Form == "6" && s.Addr.Host != s.At[:1]
	}
	return false
}

// listens reports whether a listener, made properly and not touched since, is where a connect goes.
func (h history) listens(to differ.Addr) bool {
	for i, l := range h.before {
		if l.Op != "listen" {
			continue
		}
		bound := func(e differ.Step) bool {
			return e.At == l.At && e.Fd == l.Fd && h.binds(e) && e.Addr.Port == to.Port && (e.Addr.Host == to.Host || e.Addr.Host == "any")
		}
		touched := func(e differ.Step) bool {
			return e.At[0] == l.At[0] && (e.Op == "close" || e.Op == "shutdown" || e.Op == "connect") && e.Fd == l.Fd
		}
		here := to.Host == "lo" || to.Host == "any" || to.Host == l.At[:1]
		if here && slices.ContainsFunc(h.before[:i], bound) && !slices.ContainsFunc(h.before[i+1:], touched) {
			return true
		}
	}
	return false
}

// Allowed reports whether no step of p may show a known difference.
func Allowed(p differ.Program) bool { return len(exclude(p)) == len(p.Steps) }

// exclude gives the steps of p that show no known difference, and nothing that is chance.
func exclude(p differ.Program) []differ.Step {
	var kept []differ.Step
	for _, s := range p.Steps {
		h := history{p, kept}
		if !chance(h, s) && !slices.ContainsFunc(Exclusions, func(e Exclusion) bool { return e.Excludes(h, s) }) {
			kept = append(kept, s)
		}
	}
	return kept
}

// oneSegment is how much reaches a reader at once on every path.
const oneSegment = 1000

// chance reports whether what a step brings about is chance in any mode: how much of data in several segments a reader
// gets who waits already, and which of two readers that wait gets it.
func chance(h history, s differ.Step) bool {
	waits := slices.ContainsFunc(h.before, func(e differ.Step) bool { return waiting(e) && e.At[0] != s.At[0] })
	if sends(s) && s.Arg(0) > oneSegment && waits {
		return true
	}
	return waiting(s) && slices.ContainsFunc(h.before, func(e differ.Step) bool { return waiting(e) && e.At[0] == s.At[0] })
}

func sends(s differ.Step) bool {
	return slices.Contains([]string{"write", "writev", "send", "sendmsg", "sendfile", "splice_to"}, s.Op)
}

// waiting reports whether a step may be a reader that waits.
func waiting(s differ.Step) bool {
	switch s.Op {
	case "read", "readv":
		return true
	case "recv", "recvfrom", "recvmsg", "recvmmsg":
		return s.Arg(1)&unix.MSG_DONTWAIT == 0
	case "splice_from":
		return true // the flag is about the pipe
	}
	return false
}

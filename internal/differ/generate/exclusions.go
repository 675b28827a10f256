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
	Excludes func(h *history, s differ.Step) bool
}

// Exclusions is all that is not generated though the generator could.
var Exclusions = []Exclusion{
	{"bind conflicts", "0.0.0.0:p and 127.0.0.1:p conflict", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Port != "0" && h.boundElsewhere(s)
	}},
	{"127.0.0.0/8", "127.0.0.1:p and 127.0.0.2:p are two addresses", func(h *history, s differ.Step) bool {
		return s.Addr != nil && s.Addr.Host == "lo5"
	}},
	{"listen without bind", "listen() without bind()", func(h *history, s differ.Step) bool {
		return s.Op == "listen" && h.socket(s) != nil && !h.socket(s).bound
	}},
	{"v4-mapped wildcard", "`getsockname` after bind to ::ffff:0.0.0.0", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Form == "mapped" && s.Addr.Host == "any"
	}},
	{"unassigned address", "unassigned address of another node's prefix", func(h *history, s differ.Step) bool {
		return s.Op == "connect" && s.Addr.Host == "nobody"
	}},
	{"bound socket to a closed port of its own", "a blocking connect of a **bound** socket to a closed port", func(h *history, s differ.Step) bool {
		return s.Op == "connect" && h.own(s) && h.socket(s) != nil && h.socket(s).named
	}},
	{"name after a failed connect", "`getsockname` after a connect that failed", func(h *history, s differ.Step) bool {
		return s.Op == "connect" && h.socket(s) != nil && (h.socket(s).nonblocking || h.socket(s).bound && h.socket(s).host == "any") && !h.listens(s)
	}},
	{"binding what is no address of the container", "an address assigned to the container later can be bound", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && (s.Addr.Host == "multicast" || s.Addr.Host == "broadcast")
	}},
	{"bind of a socket that has a name", "a bind() that fails changes nothing", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && h.socket(s) != nil && h.socket(s).named
	}},
	{"bind of another family", "bind() with AF_UNSPEC", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && (s.Addr.Form == "unspec" || s.Addr.Form == "unix" || s.Addr.Form == "junk")
	}},
	{"disconnect", "connect() with AF_UNSPEC", func(h *history, s differ.Step) bool {
		return s.Op == "connect" && s.Addr.Form == "unspec" && h.socket(s) != nil && h.socket(s).named
	}},
	{"port 0 of another node", "connect() to port 0", func(h *history, s differ.Step) bool {
		return s.Op == "connect" && s.Addr.Port == "0" && !h.own(s)
	}},
	{"hops", "| IP_TTL, IP_MINTTL", func(h *history, s differ.Step) bool {
		return s.Op == "setsockopt" && ofHops[option2(s)]
	}},
	{"SO_DONTROUTE", "| SO_DONTROUTE |", func(h *history, s differ.Step) bool {
		return s.Op == "setsockopt" && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_DONTROUTE}
	}},
	{"negative lengths", "getsockopt with a negative length", func(h *history, s differ.Step) bool {
		return s.Op == "getsockopt" && s.Arg(2) < 0
	}},
	{"buffers and segments of a path", "SO_SNDBUF, SO_RCVBUF", func(h *history, s differ.Step) bool {
		return s.Op == "getsockopt" && ofPath[option2(s)]
	}},
	{"options of the socket level", "SO_MARK, SO_BINDTODEVICE", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_SOCKET && (slices.Contains([]int{0, 1, 25, 32, 33, 36, 50, 52, 62, 71}, s.Arg(1)) || s.Arg(1) < 0 || s.Arg(1) > 76)
	}},
	{"options of the IP level", "IP level: all but", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_IP && !slices.Contains([]int{1, 2, 8, 10, 12, 13, 14, 15, 21, 24, 51}, s.Arg(1))
	}},
	{"options of the IPv6 level", "IPv6 level: all but", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_IPV6 && !slices.Contains([]int{16, 23, 24, 33, 49, 51, 66, 67, 70, 72, 73, 78}, s.Arg(1))
	}},
	{"options of the TCP level", "TCP_MD5SIG(_EXT), TCP_REPAIR", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_TCP && (slices.Contains([]int{14, 19, 20, 21, 22, 27, 28, 29, 32}, s.Arg(1)) || s.Arg(1) <= 0 || s.Arg(1) > 37)
	}},
	{"options of unknown levels", "ENOPROTOOPT for levels other than", func(h *history, s differ.Step) bool {
		return isOption(s) && !slices.Contains([]int{unix.SOL_SOCKET, unix.SOL_IP, unix.SOL_IPV6, unix.SOL_TCP}, s.Arg(0))
	}},
	{"TCP_FASTOPEN_CONNECT", "| TCP_FASTOPEN_CONNECT |", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_TCP && s.Arg(1) == unix.TCP_FASTOPEN_CONNECT
	}},
	{"IPV6_V6ONLY", "| IPV6_V6ONLY |", func(h *history, s differ.Step) bool {
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

// Allowed reports whether no step of p may show a known difference.
func Allowed(p differ.Program) bool { return len(exclude(p)) == len(p.Steps) }

// exclude gives the steps of p that show no known difference, and nothing that is chance.
func exclude(p differ.Program) []differ.Step {
	var kept []differ.Step
	for _, s := range p.Steps {
		h := replay(p, kept)
		if !chance(kept, s) && !slices.ContainsFunc(Exclusions, func(e Exclusion) bool { return e.Excludes(h, s) }) {
			kept = append(kept, s)
		}
	}
	return kept
}

// oneSegment is how much reaches a reader at once on every path.
const oneSegment = 1000

// chance reports whether what a step brings about is chance in any mode: how much of data in several segments a reader
// gets who waits already, and which of two readers that wait gets it.
func chance(before []differ.Step, s differ.Step) bool {
	waits := slices.ContainsFunc(before, func(e differ.Step) bool { return waiting(e) && e.At[0] != s.At[0] })
	if sends(s) && s.Arg(0) > oneSegment && waits {
		return true
	}
	return waiting(s) && slices.ContainsFunc(before, func(e differ.Step) bool { return waiting(e) && e.At[0] == s.At[0] })
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

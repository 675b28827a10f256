package generate

import (
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// Exclusion is a known difference: programs with a step that may show it are generated without that
// step. To test what became equal, take the entry out.
type Exclusion struct {
	Name string
	Row  string // part of its row in docs/differences/
	// Excludes looks at a step and at what the steps kept before it did.
	Excludes func(h *history, s differ.Step) bool
}

// Exclusions is all that is not generated though the generator could.
var Exclusions = []Exclusion{
	{"listen without bind, of a used socket", "listen() without bind() after a bind()", func(h *history, s differ.Step) bool {
		return s.Op == "listen" && h.socket(s) != nil && !h.socket(s).bound && (h.socket(s).named || h.socket(s).v6only)
	}},
	{"unassigned address", "unassigned address of another node's prefix", func(h *history, s differ.Step) bool {
		return connects(s) && s.Addr.Host == "nobody"
	}},
	{"bound socket to a closed port of its own", "a blocking connect of a **bound** socket to a closed port", func(h *history, s differ.Step) bool {
		return connects(s) && h.own(s) && h.socket(s) != nil && h.socket(s).named
	}},
	{"name after a failed connect", "`getsockname` after a connect that failed", func(h *history, s differ.Step) bool {
		return connects(s) && h.socket(s) != nil && (h.socket(s).nonblocking || s.Op == "sendto" && s.Arg(1)&unix.MSG_DONTWAIT != 0 || h.socket(s).family == unix.AF_INET6 && h.socket(s).bound && h.socket(s).host == "any") && !h.listens(s)
	}},
	{"listening again beside a connection", "0.0.0.0:p conflicts with a connection of the container", func(h *history, s differ.Step) bool {
		return s.Op == "listen" && h.socket(s) != nil && h.socket(s).reached && !h.socket(s).listening
	}},
	{"from ::1 to another IPv6 address", "a socket bound to ::1 connects to the own IPv6 address", func(h *history, s differ.Step) bool {
		return connects(s) && toIPv6(s) && h.socket(s) != nil && h.socket(s).lo6
	}},
	{"loopback between kinds of IPv6 sockets", "a socket bound to ::1 or, without V6ONLY, to [::] connects by ::1", func(h *history, s differ.Step) bool {
		return connects(s) && s.Addr.Form == "6" && !toIPv6(s) && h.socket(s) != nil && (h.socket(s).lo6 || h.socket(s).wild6) && h.hasV6Only()
	}},
	{"IPv6 after an IPv6 connect that was IPv4 underneath", "an IPv6 socket whose connect failed connects again", func(h *history, s differ.Step) bool {
		return connects(s) && toIPv6(s) && h.socket(s) != nil && h.socket(s).mapped
	}},
	{"bound to IPv4 after an IPv6 connect that was IPv6 underneath", "an IPv6 socket whose connect failed connects again", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && h.socket(s) != nil && h.socket(s).native && (s.Addr.Form == "mapped" || s.Addr.Host == "any")
	}},
	{"IPv6 after a connect to a v4-mapped address", "an IPv6 socket whose connect to a v4-mapped address failed", func(h *history, s differ.Step) bool {
		return connects(s) && s.Addr.Form == "6" && h.socket(s) != nil && h.socket(s).triedMapped
	}},
	{"the node's other addresses", "to an address of the node other than gateway", func(h *history, s differ.Step) bool {
		return connects(s) && s.Addr.Form == "6" && h.place(s.At) != differ.PlaceNode && slices.Contains([]string{"a", "b"}, s.Addr.Host) && h.place(s.Addr.Host) == differ.PlaceNode
	}},
	{"binding what is no address of the container", "an address assigned to the container later can be bound", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && (s.Addr.Host == "multicast" || s.Addr.Host == "broadcast")
	}},
	{"bind with AF_UNSPEC", "bind() with AF_UNSPEC", func(h *history, s differ.Step) bool {
		return s.Op == "bind" && s.Addr.Form == "unspec"
	}},
	{"multicast routing", "| multicast routing", func(h *history, s differ.Step) bool {
		return isOption(s) && (s.Arg(0) == unix.SOL_IP || s.Arg(0) == unix.SOL_IPV6) && s.Arg(1) >= 200 && s.Arg(1) <= 212
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
		return isOption(s) && ofPath[option2(s)]
	}},
	{"devices", "| SO_BINDTODEVICE, SO_BINDTOIFINDEX |", func(h *history, s differ.Step) bool {
		return s.Op == "setsockopt" && s.Arg(0) == unix.SOL_SOCKET && (s.Arg(1) == unix.SO_BINDTODEVICE || s.Arg(1) == unix.SO_BINDTOIFINDEX)
	}},
	{"options without effect", "SO_MARK, IP_TRANSPARENT", func(h *history, s differ.Step) bool {
		return s.Op == "setsockopt" && withoutEffect[option2(s)]
	}},
	{"programs on sockets", "| SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_EBPF |", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_SOCKET && (s.Arg(1) == unix.SO_ATTACH_FILTER || s.Arg(1) == unix.SO_ATTACH_BPF || s.Arg(1) == unix.SO_ATTACH_REUSEPORT_EBPF)
	}},
	{"raw sockets of TCP", "tcpdump and device counters in the container see TCP", func(h *history, s differ.Step) bool {
		return s.Op == "socket" && s.Arg(1)&^(nonblock|cloexec) == unix.SOCK_RAW && s.Arg(2) == unix.IPPROTO_TCP
	}},
	{"SO_MEMINFO", "| SO_MEMINFO |", func(h *history, s differ.Step) bool {
		return isOption(s) && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_MEMINFO}
	}},
	{"keys and repair", "| TCP_MD5SIG(_EXT), TCP_REPAIR", func(h *history, s differ.Step) bool {
		return isOption(s) && s.Arg(0) == unix.SOL_TCP && (slices.Contains([]int{14, 19, 20, 21, 22, 29, 32}, s.Arg(1)) || s.Arg(1) > 37)
	}},
	{"TCP_SAVED_SYN", "| TCP_SAVED_SYN |", func(h *history, s differ.Step) bool {
		return isOption(s) && option2(s) == [2]int{unix.SOL_TCP, unix.TCP_SAVED_SYN}
	}},
	{"options of the underlay", "| IP_OPTIONS; IPv6 extension headers", func(h *history, s differ.Step) bool {
		return isOption(s) && ofUnderlay(s.Arg(0), s.Arg(1))
	}},
}

// toIPv6 reports whether a connect is to an IPv6 address that is IPv6 underneath, or may be.
func toIPv6(s differ.Step) bool {
	return s.Addr.Form == "6" && s.Addr.Host != "lo" && s.Addr.Host != "any"
}

// ofPath are the options whose values follow from the path's segment size.
var ofPath = map[[2]int]bool{
	{unix.SOL_SOCKET, unix.SO_SNDBUF}: true, {unix.SOL_SOCKET, unix.SO_RCVBUF}: true, {unix.SOL_TCP, unix.TCP_MAXSEG}: true,
	{unix.SOL_TCP, unix.TCP_WINDOW_CLAMP}: true, {unix.SOL_IP, unix.IP_MTU}: true, {unix.SOL_IPV6, unix.IPV6_MTU}: true,
}

// withoutEffect are the options that Heddle keeps and the node's socket never gets.
var withoutEffect = map[[2]int]bool{
	{unix.SOL_SOCKET, unix.SO_MARK}:    true,
	{unix.SOL_IP, unix.IP_TRANSPARENT}: true, {unix.SOL_IPV6, unix.IPV6_TRANSPARENT}: true, {unix.SOL_IP, unix.IP_RECVERR}: true,
	{unix.SOL_IPV6, unix.IPV6_RECVERR}: true, {unix.SOL_IP, unix.IP_PKTINFO}: true, {unix.SOL_TCP, unix.TCP_SAVE_SYN}: true,
}

// ofUnderlay tells the options of the IP levels that reach the underlay or the node's devices: IP
// options and extension headers, IPsec policies, memberships, packet filters.
func ofUnderlay(level, name int) bool {
	switch level {
	case unix.SOL_IP:
		return name == unix.IP_OPTIONS || name == 16 || name == 17 || name >= 32 && name <= 49 && !ofGroups[name] || name >= 64 && name <= 99
	case unix.SOL_IPV6:
		return name == 1 || name >= 2 && name <= 9 || name >= 17 && name <= 22 || name >= 27 && name <= 35 || name >= 42 && name <= 48 && !ofGroups[name] ||
			name == 50 || name >= 54 && name <= 65 || name == 68 || name == 69
	}
	return false
}

// ofGroups are MCAST_JOIN_GROUP and MCAST_LEAVE_GROUP, which are answered without the devices.
var ofGroups = map[int]bool{42: true, 45: true}

// ofHops are the options that count routers.
var ofHops = map[[2]int]bool{
	{unix.SOL_IP, unix.IP_TTL}: true, {unix.SOL_IP, unix.IP_MINTTL}: true, {unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS}: true, {unix.SOL_IPV6, 73}: true,
}

func isOption(s differ.Step) bool       { return s.Op == "getsockopt" || s.Op == "setsockopt" }
func option2(s differ.Step) (id [2]int) { return [2]int{s.Arg(0), s.Arg(1)} }

// Allowed reports whether no step of p may show a known difference.
func (set *Set) Allowed(p differ.Program) bool { return len(set.exclude(p)) == len(p.Steps) }

// exclude gives the steps of p that show no known difference, and nothing that is chance.
func (set *Set) exclude(p differ.Program) []differ.Step {
	var kept []differ.Step
	for _, s := range p.Steps {
		h := replay(p, kept)
		if !chance(kept, s) && !slices.ContainsFunc(set.Exclusions, func(e Exclusion) bool { return e.Excludes(h, s) }) {
			kept = append(kept, s)
		}
	}
	return kept
}

// oneSegment is how much reaches a reader at once on every path.
const oneSegment = 1000

// chance reports whether what a step brings about is chance in any mode: how much of data in
// several segments a reader gets who waits already, and which of two readers that wait gets it.
func chance(before []differ.Step, s differ.Step) bool {
	waits := slices.ContainsFunc(before, func(e differ.Step) bool { return waiting(e) && e.At[0] != s.At[0] })
	if sends(s) && s.Arg(0) > oneSegment && waits {
		return true
	}
	// A process has one pipe, which a splice that waits keeps to itself.
	if s.Op == "splice_to" && slices.ContainsFunc(before, func(e differ.Step) bool { return e.Op == "splice_from" && e.At[0] == s.At[0] }) {
		return true
	}
	return waiting(s) && slices.ContainsFunc(before, func(e differ.Step) bool { return waiting(e) && e.At[0] == s.At[0] })
}

func sends(s differ.Step) bool {
	return slices.Contains([]string{"write", "writev", "send", "sendto", "sendmsg", "sendfile", "splice_to"}, s.Op)
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

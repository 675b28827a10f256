package generate

import (
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// Modules are programs for containers whose TCP a stack module runs: n1/c1 and n2/c1.
var Modules = &Set{
	layouts: []layout{
		{"n1/c1", "n1/c1", "", 5},
		{"n1/c1", "n1/c2", "", 3},
		{"n1/c1", "n1/c2", "b", 2},
		{"n1/c1", "n2/c1", "", 3},
		{"n1/c1", "n2/c2", "", 3},
		{"n1/c1", "n2/c2", "b", 2},
		{"n1/c1", differ.PlaceNode, "", 2},
		{"n1/c1", differ.PlaceOutside, "", 1},
	},
	Exclusions: append(moduleExclusions, elsewhere(Exclusions)...),
	Allowances: moduleAllowances,
}

// elsewhere are differences of sockets whose TCP is the kernel's, for those beside a module.
func elsewhere(all []Exclusion) []Exclusion {
	out := slices.Clone(all)
	for i, e := range out {
		out[i].Excludes = func(h *history, s differ.Step) bool {
			return !slices.Contains(moduleContainers, h.place(s.At)) && e.Excludes(h, s)
		}
	}
	return out
}

// moduleContainers have their TCP by a module.
var moduleContainers = []string{"n1/c1", "n2/c1"}

// moduleExclusions are the differences of stack modules that change what comes after them.
var moduleExclusions = []Exclusion{
	{"urgent data", "| MSG_OOB |", func(_ *history, s differ.Step) bool {
		switch s.Op {
		case "send", "sendto", "sendmsg", "recv", "recvfrom", "recvmsg", "recvmmsg":
			return s.Arg(1)&unix.MSG_OOB != 0
		case "ioctl":
			return s.Arg(0) == unix.SIOCATMARK
		}
		return isOption(s) && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_OOBINLINE}
	}},
	{"options that modules do not have", "options of other levels, and other options", func(h *history, s differ.Step) bool {
		return isOption(s) && !moduleOptions[option2(s)]
	}},
	{"reading and writing without a connection", "| a socket that was not connected: reading is", func(h *history, s differ.Step) bool {
		k := h.socket(s)
		return k != nil && !k.surelyConnected() && (transfers(s) || s.Op == "ioctl" && s.Arg(0) == unix.SIOCINQ)
	}},
	{"readiness without a connection", "| poll of a socket that was not connected", func(h *history, s differ.Step) bool {
		switch s.Op {
		case "poll":
			k := h.socket(s)
			return k != nil && !k.surelyConnected() && (!k.listening || s.Arg(0)&unix.POLLOUT != 0)
		case "epoll_ctl":
			k := h.slots[s.At][s.To]
			return k != nil && !k.surelyConnected() && (!k.listening || s.Arg(1)&unix.EPOLLOUT != 0)
		}
		return false
	}},
	{"writing to who has closed", "| the first write after RST is ECONNRESET", func(h *history, s differ.Step) bool {
		return h.ended && sends(s)
	}},
	{"flags of recv", "| MSG_TRUNC of recv", func(_ *history, s differ.Step) bool {
		return slices.Contains([]string{"recv", "recvfrom", "recvmsg", "recvmmsg"}, s.Op) && s.Arg(1)&(unix.MSG_TRUNC|unix.MSG_ERRQUEUE) != 0
	}},
	{"splice that does not wait", "| splice() into a pipe", func(_ *history, s differ.Step) bool {
		return s.Op == "splice_from"
	}},
	{"a listener that is closed under accept()", "| close() of a listener", func(h *history, s differ.Step) bool {
		k := h.socket(s)
		return s.Op == "close" && k != nil && k.listening && slices.ContainsFunc(h.before, func(e differ.Step) bool { return e.Op == "accept4" && e.At == s.At })
	}},
	{"SIOCOUTQ", "| SIOCOUTQ is 0", func(_ *history, s differ.Step) bool {
		return s.Op == "ioctl" && s.Arg(0) == unix.SIOCOUTQ
	}},
	{"numbers of descriptors beside accept()", "accept() that waits has the number", func(h *history, s differ.Step) bool {
		return h.waits[s.At[0]] && slices.Contains([]string{"socket", "accept4", "dup", "epoll_create", "socketpair", "recv_fd", "fcntl"}, s.Op)
	}},
	{"another connect after one that failed", "| a connect that failed, of a socket that does not wait", func(h *history, s differ.Step) bool {
		k := h.socket(s)
		return k != nil && k.failed && (connects(s) || s.Op == "listen" || s.Op == "bind" || transfers(s) || s.Op == "shutdown")
	}},
	{"edges", "| EPOLLET tells of EPOLLOUT", func(_ *history, s differ.Step) bool {
		return s.Op == "epoll_ctl" && uint32(s.Arg(1))&unix.EPOLLET != 0 && s.Arg(1)&unix.EPOLLOUT != 0
	}},
	{"shutdown of what has ended", "| shutdown() of a connection that is over", func(h *history, s differ.Step) bool {
		k := h.socket(s)
		return s.Op == "shutdown" && (h.ended || k != nil && !k.surelyConnected())
	}},
	{"listeners that are shut down", "| a listener that was shut down", func(h *history, s differ.Step) bool {
		k := h.socket(s)
		return s.Op == "shutdown" && k != nil && k.listening
	}},
	{"descriptors through TCP", "| sendmsg() with descriptors", func(h *history, s differ.Step) bool {
		return (s.Op == "send_fd" || s.Op == "recv_fd") && h.socket(s) != nil
	}},
	{"sendto with an address", "sendto() with an address", func(_ *history, s differ.Step) bool {
		return s.Op == "sendto" && !connects(s)
	}},
	{"reading nothing", "| reading 0 bytes", func(_ *history, s differ.Step) bool {
		return transfers(s) && !sends(s) && s.Arg(0) == 0
	}},
	{"addresses that modules do not have", "| 127.0.0.0/8 is one's own", func(_ *history, s differ.Step) bool {
		return s.Addr != nil && (slices.Contains([]string{"lo5", "broadcast", "multicast"}, s.Addr.Host) || connects(s) && s.Addr.Port == "0")
	}},
	{"congestion control", "| TCP_CONGESTION is the node's", func(_ *history, s differ.Step) bool {
		return s.Op == "getsockopt" && option2(s) == [2]int{unix.SOL_TCP, unix.TCP_CONGESTION}
	}},
	{"a SYN that does not arrive", "| shutdown() of a connection that is over", func(_ *history, s differ.Step) bool {
		return s.Op == "setsockopt" && ofHops[option2(s)] && strings.HasPrefix(s.Data, "01000000")
	}},
	{"disconnecting", "| connect(AF_UNSPEC)", func(_ *history, s differ.Step) bool {
		return connects(s) && s.Addr.Form == "unspec"
	}},
	{"negative lengths", "getsockopt with a negative length", func(_ *history, s differ.Step) bool {
		return s.Op == "getsockopt" && s.Arg(2) < 0
	}},
	{"readiness from a mark on", "| SO_RCVLOWAT:", func(_ *history, s differ.Step) bool {
		return s.Op == "setsockopt" && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_RCVLOWAT}
	}},
	{"the end after FIN", "not all have an effect", func(_ *history, s differ.Step) bool {
		return s.Op == "setsockopt" && option2(s) == [2]int{unix.SOL_TCP, unix.TCP_LINGER2} && negative(s.Data)
	}},
	{"reading all of what has ended", "| MSG_WAITALL of a connection", func(h *history, s differ.Step) bool {
		return h.ended && strings.HasPrefix(s.Op, "recv") && s.Op != "recv_fd" && s.Arg(1)&unix.MSG_WAITALL != 0
	}},
	{"connect with data", "| MSG_FASTOPEN", func(_ *history, s differ.Step) bool {
		return s.Op == "sendto" && connects(s)
	}},
}

// negative reports whether an option's value, as hexadecimal digits, is a number below 0.
func negative(data string) bool { return len(data) >= 8 && data[6] >= '8' }

// transfers reports whether a step reads or writes.
func transfers(s differ.Step) bool {
	return sends(s) || slices.Contains([]string{"read", "readv", "recv", "recvfrom", "recvmsg", "recvmmsg", "splice_from"}, s.Op)
}

// moduleOptions are those that programs on modules have as on the kernel's TCP.
var moduleOptions = map[[2]int]bool{
	{unix.SOL_SOCKET, unix.SO_REUSEADDR}: true, {unix.SOL_SOCKET, unix.SO_REUSEPORT}: true, {unix.SOL_SOCKET, unix.SO_TYPE}: true,
	{unix.SOL_SOCKET, unix.SO_ERROR}: true, {unix.SOL_SOCKET, unix.SO_KEEPALIVE}: true, {unix.SOL_SOCKET, unix.SO_BROADCAST}: true,
	{unix.SOL_SOCKET, unix.SO_LINGER}: true, {unix.SOL_SOCKET, unix.SO_ACCEPTCONN}: true, {unix.SOL_SOCKET, unix.SO_PROTOCOL}: true,
	{unix.SOL_SOCKET, unix.SO_DOMAIN}: true, {unix.SOL_SOCKET, unix.SO_PRIORITY}: true, {unix.SOL_SOCKET, unix.SO_COOKIE}: true,
	{unix.SOL_SOCKET, unix.SO_RCVLOWAT}: true, {unix.SOL_SOCKET, unix.SO_SNDLOWAT}: true,
	{unix.SOL_TCP, unix.TCP_NODELAY}: true, {unix.SOL_TCP, unix.TCP_CORK}: true, {unix.SOL_TCP, unix.TCP_KEEPIDLE}: true,
	{unix.SOL_TCP, unix.TCP_KEEPINTVL}: true, {unix.SOL_TCP, unix.TCP_KEEPCNT}: true, {unix.SOL_TCP, unix.TCP_SYNCNT}: true,
	{unix.SOL_TCP, unix.TCP_LINGER2}: true, {unix.SOL_TCP, unix.TCP_DEFER_ACCEPT}: true, {unix.SOL_TCP, unix.TCP_INFO}: true,
	{unix.SOL_TCP, unix.TCP_CONGESTION}: true, {unix.SOL_TCP, unix.TCP_USER_TIMEOUT}: true, {unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT}: true,
	{unix.SOL_IP, unix.IP_TOS}: true, {unix.SOL_IP, unix.IP_TTL}: true, {unix.SOL_IP, unix.IP_MTU_DISCOVER}: true,
	{unix.SOL_IP, unix.IP_RECVERR}: true, {unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT}: true,
	{unix.SOL_IPV6, unix.IPV6_V6ONLY}: true, {unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS}: true, {unix.SOL_IPV6, unix.IPV6_TCLASS}: true,
}

// nameLength finds how long the address is that came with data.
var nameLength = regexp.MustCompile(`((?:from|name) len) \d+`)

// moduleAllowances are the differences of stack modules that change nothing that comes after them.
var moduleAllowances = []Allowance{
	{"readiness without a connection", "| poll of a socket that was not connected", func(_ differ.Program, t *differ.Trace) {
		t.LevelStates(func(state string) string {
			switch {
			case state == "OUT 0 to read CLOSE":
				return "HUP|OUT 0 to read CLOSE"
			case strings.HasSuffix(state, " LISTEN"):
				if strings.HasPrefix(state, "IN") {
					return "IN LISTEN"
				}
				return "- LISTEN"
			}
			return state
		})
	}},
	{"names of peers", "recvfrom() and recvmsg() give no address", func(p differ.Program, t *differ.Trace) {
		t.LevelResults(p, func(s differ.Step, _, result string) string {
			if s.Op == "recvfrom" || s.Op == "recvmsg" || s.Op == "recvmmsg" {
				return nameLength.ReplaceAllString(result, "$1 0")
			}
			return result
		})
	}},
	{"who ended it", "| SO_ERROR after the peer's FIN and then its RST", func(p differ.Program, t *differ.Trace) {
		t.LevelResults(p, func(s differ.Step, state, result string) string {
			if s.Op == "getsockopt" && option2(s) == [2]int{unix.SOL_SOCKET, unix.SO_ERROR} && strings.HasSuffix(state, " CLOSE") {
				return strings.Replace(result, "0x20000000", "0x68000000", 1) // EPIPE, ECONNRESET
			}
			return result
		})
	}},
	{"names without a connection", "| `getsockname` after a connect that failed: the address it was tried from", func(p differ.Program, t *differ.Trace) {
		t.LevelResults(p, func(s differ.Step, state, result string) string {
			if s.Op == "getsockname" && (strings.HasSuffix(state, " CLOSE") || strings.HasSuffix(state, " SYN_SENT")) && strings.HasPrefix(result, "0 <") {
				_, length, _ := strings.Cut(result, ">")
				return "0 <some>" + length
			}
			return result
		})
	}},
}

package differ

import (
	"fmt"
	"slices"
	"strings"
)

// What integers are called where a program is printed. Numbers without a name are printed as
// numbers.
var (
	familyNames = map[int]string{0: "AF_UNSPEC", 1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6", 17: "AF_PACKET"}
	typeNames   = map[int]string{1: "SOCK_STREAM", 2: "SOCK_DGRAM", 3: "SOCK_RAW", 5: "SOCK_SEQPACKET"}
	typeFlags   = map[int]string{0o4000: "NONBLOCK", 0o2000000: "CLOEXEC"}
	levelNames  = map[int]string{0: "SOL_IP", 1: "SOL_SOCKET", 6: "SOL_TCP", 41: "SOL_IPV6"}
	howNames    = map[int]string{0: "SHUT_RD", 1: "SHUT_WR", 2: "SHUT_RDWR"}
	msgFlags    = map[int]string{1: "OOB", 2: "PEEK", 4: "DONTROUTE", 0x20: "TRUNC", 0x40: "DONTWAIT", 0x80: "EOR",
		0x100: "WAITALL", 0x2000: "ERRQUEUE", 0x4000: "NOSIGNAL", 0x8000: "MORE", 0x10000: "WAITFORONE", 0x20000000: "FASTOPEN",
		0x40000000: "CMSG_CLOEXEC", 0x4000000: "ZEROCOPY"}
	fcntlNames   = map[int]string{0: "F_DUPFD", 1: "F_GETFD", 2: "F_SETFD", 3: "F_GETFL", 4: "F_SETFL", 8: "F_SETOWN", 9: "F_GETOWN"}
	ioctlNames   = map[int]string{0x541B: "FIONREAD", 0x5421: "FIONBIO", 0x5411: "SIOCOUTQ", 0x8905: "SIOCATMARK", 0x894B: "SIOCOUTQNSD"}
	epollOps     = map[int]string{1: "ADD", 2: "DEL", 3: "MOD"}
	pollNames    = map[int]string{1: "IN", 2: "PRI", 4: "OUT", 8: "ERR", 0x10: "HUP", 0x20: "NVAL", 0x40: "RDNORM", 0x80: "RDBAND", 0x2000: "RDHUP"}
	epollExtra   = map[int]string{1 << 28: "EXCLUSIVE", 1 << 30: "ONESHOT", 1 << 31: "ET"}
	optionNames  = map[int]map[int]string{1: socketOptions, 0: ipOptions, 41: ipv6Options, 6: tcpOptions}
	socketNames_ = "DEBUG REUSEADDR TYPE ERROR DONTROUTE BROADCAST SNDBUF RCVBUF KEEPALIVE OOBINLINE NO_CHECK PRIORITY LINGER BSDCOMPAT " +
		"REUSEPORT PASSCRED PEERCRED RCVLOWAT SNDLOWAT RCVTIMEO SNDTIMEO - - - BINDTODEVICE ATTACH_FILTER DETACH_FILTER PEERNAME " +
		"TIMESTAMP ACCEPTCONN PEERSEC SNDBUFFORCE RCVBUFFORCE PASSSEC TIMESTAMPNS MARK TIMESTAMPING PROTOCOL DOMAIN RXQ_OVFL " +
		"WIFI_STATUS PEEK_OFF NOFCS LOCK_FILTER SELECT_ERR_QUEUE BUSY_POLL MAX_PACING_RATE BPF_EXTENSIONS INCOMING_CPU ATTACH_BPF " +
		"ATTACH_REUSEPORT_CBPF ATTACH_REUSEPORT_EBPF CNX_ADVICE - MEMINFO INCOMING_NAPI_ID COOKIE - PEERGROUPS ZEROCOPY TXTIME " +
		"BINDTOIFINDEX TIMESTAMP_NEW TIMESTAMPNS_NEW TIMESTAMPING_NEW RCVTIMEO_NEW SNDTIMEO_NEW DETACH_REUSEPORT_BPF " +
		"PREFER_BUSY_POLL BUSY_POLL_BUDGET NETNS_COOKIE BUF_LOCK RESERVE_MEM TXREHASH RCVMARK PASSPIDFD PEERPIDFD"
	socketOptions = numbered("SO_", socketNames_)
	tcpOptions    = numbered("TCP_", "NODELAY MAXSEG CORK KEEPIDLE KEEPINTVL KEEPCNT SYNCNT LINGER2 DEFER_ACCEPT WINDOW_CLAMP INFO "+
		"QUICKACK CONGESTION MD5SIG - THIN_LINEAR_TIMEOUTS THIN_DUPACK USER_TIMEOUT REPAIR REPAIR_QUEUE QUEUE_SEQ REPAIR_OPTIONS "+
		"FASTOPEN TIMESTAMP NOTSENT_LOWAT CC_INFO SAVE_SYN SAVED_SYN REPAIR_WINDOW FASTOPEN_CONNECT ULP MD5SIG_EXT FASTOPEN_KEY "+
		"FASTOPEN_NO_COOKIE ZEROCOPY_RECEIVE INQ TX_DELAY")
	ipOptions = numbered("IP_", "TOS TTL HDRINCL OPTIONS ROUTER_ALERT RECVOPTS RETOPTS PKTINFO PKTOPTIONS MTU_DISCOVER RECVERR RECVTTL "+
		"RECVTOS MTU FREEBIND IPSEC_POLICY XFRM_POLICY PASSSEC TRANSPARENT RECVORIGDSTADDR MINTTL NODEFRAG CHECKSUM BIND_ADDRESS_NO_PORT "+
		"RECVFRAGSIZE RECVERR_RFC4884")
	ipv6Options = map[int]string{16: "IPV6_UNICAST_HOPS", 23: "IPV6_MTU_DISCOVER", 24: "IPV6_MTU", 25: "IPV6_RECVERR", 26: "IPV6_V6ONLY",
		49: "IPV6_RECVPKTINFO", 51: "IPV6_RECVHOPLIMIT", 66: "IPV6_RECVTCLASS", 67: "IPV6_TCLASS", 70: "IPV6_AUTOFLOWLABEL",
		72: "IPV6_ADDR_PREFERENCES", 75: "IPV6_TRANSPARENT"}
)

// numbered names 1, 2, 3 ... by a list of words; "-" leaves one out.
func numbered(prefix, list string) map[int]string {
	out := map[int]string{}
	for i, name := range strings.Fields(list) {
		if name != "-" {
			out[i+1] = prefix + name
		}
	}
	return out
}

func nameOf(names map[int]string, n int) string {
	if s, ok := names[n]; ok {
		return s
	}
	return fmt.Sprint(n)
}

// bits writes n as names of its bits; what has none is a number.
func bits(n int, tables ...map[int]string) string {
	var out []string
	for _, names := range tables {
		for bit, name := range names {
			if n&bit == bit {
				out = append(out, name)
				n &^= bit
			}
		}
	}
	slices.Sort(out)
	if n != 0 || len(out) == 0 {
		out = append(out, fmt.Sprintf("%#x", n))
	}
	return strings.Join(out, "|")
}

// PollEvents writes poll's events.
func PollEvents(n int) string {
	if n == 0 {
		return "-"
	}
	return bits(n, pollNames)
}

// EpollEvents writes epoll's.
func EpollEvents(n int) string { return bits(n, pollNames, epollExtra) }

// MsgFlags writes flags of send and recv.
func MsgFlags(n int) string {
	if n == 0 {
		return "0"
	}
	return bits(n, msgFlags)
}

// named gives the integers of a step, by name where they have one.
func (s Step) named() []string {
	var out []string
	for i, n := range s.Args {
		text := fmt.Sprint(n)
		name := ""
		if spec := ops[s.Op]; i < len(spec.args) {
			name = spec.args[i]
		}
		switch name {
		case "family":
			text = nameOf(familyNames, n)
		case "type":
			text = nameOf(typeNames, n&0xf)
			if rest := n &^ 0xf; rest != 0 {
				text += "|" + bits(rest, typeFlags)
			}
		case "flags":
			text = MsgFlags(n)
			if s.Op == "accept4" || s.Op == "dup3" || s.Op == "epoll_create" {
				text = bits(n, typeFlags)
			}
		case "level":
			text = nameOf(levelNames, n)
		case "name":
			text = nameOf(optionNames[s.Arg(0)], n)
		case "how":
			text = nameOf(howNames, n)
		case "cmd":
			text = nameOf(fcntlNames, n)
		case "request":
			text = nameOf(ioctlNames, n)
		case "op":
			text = nameOf(epollOps, n)
		case "events":
			text = EpollEvents(n)
		case "addrlen", "len", "timeout", "n", "backlog", "arg", "max", "uid", "messages", "controllen":
			text = name + " " + text
		}
		out = append(out, text)
	}
	return out
}

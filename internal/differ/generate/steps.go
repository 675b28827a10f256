package generate

import (
	"encoding/binary"
	"encoding/hex"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

const nonblock, cloexec = unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC

// socket makes a TCP socket, now and then with flags or a protocol said.
func (g *generator) socket(at string, slot int, form string) differ.Step {
	family := unix.AF_INET
	if form != "4" {
		family = unix.AF_INET6
	}
	kind := unix.SOCK_STREAM | pick(g, 0, 0, nonblock, nonblock, cloexec, nonblock|cloexec)
	return differ.Step{At: at, Op: "socket", To: slot, Args: []int{family, kind, pick(g, 0, 0, unix.IPPROTO_TCP)}}
}

// strangeSocket asks for something else than an ordinary TCP socket.
func (g *generator) strangeSocket(at string, slot int) differ.Step {
	return differ.Step{At: at, Op: "socket", To: slot, Args: []int{
		pick(g, unix.AF_INET, unix.AF_INET6, unix.AF_INET, unix.AF_UNIX, 0, -1, 77),
		pick(g, unix.SOCK_STREAM, unix.SOCK_STREAM|nonblock, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET, 0, 77, unix.SOCK_STREAM|1<<20, -1),
		pick(g, 0, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, -1, 255, 256, 1<<16|6),
	}}
}

// epoll watches a socket by a new epoll descriptor and waits once.
func (g *generator) epoll(at string, fd, epfd int) []differ.Step {
	events := pick(g, unix.EPOLLIN, unix.EPOLLOUT, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP)
	events |= pick(g, 0, unix.EPOLLET, unix.EPOLLONESHOT, unix.EPOLLET|unix.EPOLLONESHOT)
	return []differ.Step{
		{At: at, Op: "epoll_create", To: epfd, Args: []int{0}},
		{At: at, Op: "epoll_ctl", Fd: epfd, To: fd, Args: []int{unix.EPOLL_CTL_ADD, events & 0xffffffff}},
		g.epollWait(at, epfd),
	}
}

func (g *generator) epollWait(at string, epfd int) differ.Step {
	return differ.Step{At: at, Op: "epoll_wait", Fd: epfd, Args: []int{pick(g, 8, 1), pick(g, 0, 0, 0, -1)}}
}

// talk is one or two steps at one end of a connection.
func (g *generator) talk(at string, fd int) []differ.Step {
	switch g.r.IntN(12) {
	case 0, 1, 2:
		return []differ.Step{g.send(at, fd)}
	case 3, 4, 5:
		return []differ.Step{g.receive(at, fd)}
	case 6:
		return []differ.Step{g.send(at, fd), g.receive(at, fd)}
	case 7:
		return []differ.Step{g.epollWait(at, 3)}
	case 8:
		return g.pass(at, fd)
	}
	return []differ.Step{g.inspect(at, fd)}
}

func (g *generator) size() int { return pick(g, 0, 1, 10, 100, 1000, 1448, 4000, 8000) }

func (g *generator) send(at string, fd int) differ.Step {
	s := differ.Step{At: at, Fd: fd, Op: pick(g, "write", "writev", "send", "send", "send", "sendmsg", "sendfile", "splice_to"), Args: []int{g.size()}}
	switch s.Op {
	case "send", "sendmsg":
		s.Args = append(s.Args, pick(g, 0, unix.MSG_NOSIGNAL, unix.MSG_DONTWAIT, unix.MSG_OOB, unix.MSG_MORE|unix.MSG_DONTWAIT, unix.MSG_EOR, unix.MSG_NOSIGNAL|unix.MSG_OOB, 1<<27))
	case "splice_to":
		s.Args = append(s.Args, pick(g, 0, unix.SPLICE_F_NONBLOCK, unix.SPLICE_F_MORE))
	}
	return s
}

func (g *generator) receive(at string, fd int) differ.Step {
	s := differ.Step{At: at, Fd: fd, Op: pick(g, "read", "readv", "recv", "recv", "recv", "recvfrom", "recvmsg", "recvmmsg", "splice_from"), Args: []int{pick(g, g.size(), 8000, 16000)}}
	flags := pick(g, 0, 0, unix.MSG_DONTWAIT, unix.MSG_DONTWAIT, unix.MSG_PEEK, unix.MSG_PEEK|unix.MSG_DONTWAIT, unix.MSG_OOB, unix.MSG_TRUNC,
		unix.MSG_WAITALL|unix.MSG_DONTWAIT, unix.MSG_ERRQUEUE, unix.MSG_OOB|unix.MSG_PEEK, unix.MSG_TRUNC|unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch s.Op {
	case "recv", "recvfrom":
		s.Args = append(s.Args, flags)
	case "recvmsg":
		s.Args = append(s.Args, flags, pick(g, 0, 64, 256))
	case "recvmmsg":
		s.Args = append(s.Args, flags|pick(g, 0, unix.MSG_WAITFORONE), pick(g, 1, 2, 4, 0))
	case "splice_from":
		s.Args = append(s.Args, pick(g, 0, unix.SPLICE_F_NONBLOCK))
	}
	return s
}

// pass makes another descriptor, or another process, have the socket.
func (g *generator) pass(at string, fd int) []differ.Step {
	switch g.r.IntN(4) {
	case 0:
		return []differ.Step{{At: at, Op: pick(g, "fork", "exec")}, g.send(at+"+", fd)}
	case 1:
		return []differ.Step{{At: at, Op: pick(g, "fork", "exec")}, {At: at, Op: "close", Fd: fd}, g.inspect(at+"+", fd), g.receive(at+"+", fd)}
	case 2:
		return []differ.Step{{At: at, Op: "socketpair", Fd: 4, To: 5}, {At: at, Op: "send_fd", Fd: 4, To: fd}, {At: at, Op: "close", Fd: fd},
			{At: at, Op: "recv_fd", Fd: 5, To: fd}, g.inspect(at, fd)}
	}
	return []differ.Step{{At: at, Op: "dup", Fd: fd, To: 2}, {At: at, Op: "close", Fd: fd}, g.send(at, 2)}
}

// inspect asks a socket something, or changes how it behaves.
func (g *generator) inspect(at string, fd int) differ.Step {
	s := differ.Step{At: at, Fd: fd}
	length := pick(g, 128, 128, 128, 28, 16, 8, 2, 0, -1)
	switch g.r.IntN(9) {
	case 0:
		s.Op, s.Args = "getsockname", []int{length}
	case 1:
		s.Op, s.Args = "getpeername", []int{length}
	case 2, 3:
		return g.getOption(at, fd)
	case 4:
		return g.setOption(at, fd)
	case 5:
		s.Op, s.Args = "fcntl", []int{pick(g, unix.F_GETFL, unix.F_GETFD, unix.F_SETFL, unix.F_SETFD, unix.F_DUPFD, unix.F_GETOWN, 99), pick(g, 0, 1, unix.O_NONBLOCK)}
		if s.Args[0] == unix.F_DUPFD {
			s.Args[1] = pick(g, 0, 50, -1)
		}
	case 6:
		s.Op, s.Args = "ioctl", []int{pick(g, unix.SIOCINQ, unix.SIOCATMARK, 0x5421, 0x1234, unix.SIOCOUTQ), pick(g, 0, 1)}
	case 7:
		s.Op, s.Args = "poll", []int{pick(g, unix.POLLIN, unix.POLLOUT, unix.POLLIN|unix.POLLPRI|unix.POLLOUT|unix.POLLRDHUP, 0), pick(g, 0, 0, -1)}
	case 8:
		s.Op, s.To, s.Args = pick(g, "dup2", "dup3"), pick(g, 0, 1, 2, 3), []int{pick(g, 0, cloexec, 1)}
		if s.Op == "dup2" {
			s.Args = nil
		}
	}
	return s
}

// randomStep is any call on anything.
func (g *generator) randomStep() differ.Step {
	at := pick(g, "a", "a", "b", "b", "a+", "b+")
	fd := g.slot()
	switch g.r.IntN(16) {
	case 0:
		return g.socket(at, max(fd, 0), pick(g, "4", "6"))
	case 1:
		return g.strangeSocket(at, max(fd, 0))
	case 2:
		return differ.Step{At: at, Op: "bind", Fd: fd, Addr: g.addr(), Args: []int{pick(g, 0, 0, 65534)}}
	case 3:
		return differ.Step{At: at, Op: "listen", Fd: fd, Args: []int{pick(g, 0, 1, 5, 4096, -1)}}
	case 4, 5:
		return differ.Step{At: at, Op: "connect", Fd: fd, Addr: g.addr()}
	case 6:
		return differ.Step{At: at, Op: "accept4", Fd: fd, To: pick(g, 1, 2), Args: []int{pick(g, 0, nonblock, cloexec, 1), pick(g, 128, 16, 4, 0, -1)}}
	case 7:
		return differ.Step{At: at, Op: "shutdown", Fd: fd, Args: []int{pick(g, 0, 1, 2, 3, -1)}}
	case 8:
		return differ.Step{At: at, Op: "close", Fd: fd}
	case 9:
		if g.chance(1, 3) {
			return differ.Step{At: at, Op: "sendto", Fd: fd, Addr: g.addr(), Args: []int{g.size(), pick(g, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN|unix.MSG_DONTWAIT, unix.MSG_NOSIGNAL, 0)}}
		}
		return g.send(at, fd)
	case 10:
		return g.receive(at, fd)
	case 11:
		return pick(g, g.epoll(at, fd, 3)...)
	case 12:
		return pick(g, g.pass(at[:1], fd)...)
	}
	return g.inspect(at, fd)
}

func (g *generator) addr() *differ.Addr {
	a := &differ.Addr{Form: pick(g, "4", "4", "4", "6", "6", "mapped"), Host: g.host(), Port: pick(g, "P1", "P1", "P1", "P2", "P2", "0", "low")}
	if g.chance(1, 8) {
		a.Form = pick(g, "unspec", "unspec", "unix", "junk")
	}
	if g.chance(1, 12) {
		a.Len = pick(g, 1, 2, 8, 15, 16, 24, 27, 28, 128)
	}
	return a
}

// option is one that programs use: with values that make sense and some that do not.
type option struct {
	level, name int
	values      []int // integers; none: only read
}

var options = []option{
	{unix.SOL_SOCKET, unix.SO_REUSEADDR, []int{0, 1, 2, -1}}, {unix.SOL_SOCKET, unix.SO_REUSEPORT, []int{0, 1}},
	{unix.SOL_SOCKET, unix.SO_TYPE, []int{1}}, {unix.SOL_SOCKET, unix.SO_ERROR, []int{0}}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE, []int{0, 1}},
	{unix.SOL_SOCKET, unix.SO_BROADCAST, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_OOBINLINE, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_DONTROUTE, []int{0, 1}},
	{unix.SOL_SOCKET, unix.SO_LINGER, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_RCVLOWAT, []int{0, 1, 5, 200, -1}}, {unix.SOL_SOCKET, unix.SO_SNDLOWAT, []int{1, 9}},
	{unix.SOL_SOCKET, unix.SO_SNDBUF, []int{0, 30000, 100000, -1}}, {unix.SOL_SOCKET, unix.SO_RCVBUF, []int{30000, 100000, -1}},
	{unix.SOL_SOCKET, unix.SO_ACCEPTCONN, []int{1}}, {unix.SOL_SOCKET, unix.SO_PROTOCOL, []int{1}}, {unix.SOL_SOCKET, unix.SO_DOMAIN, []int{1}},
	{unix.SOL_SOCKET, unix.SO_PRIORITY, []int{0, 3, 6, 7, -1}}, {unix.SOL_SOCKET, unix.SO_PASSCRED, []int{1}}, {unix.SOL_SOCKET, unix.SO_PEERCRED, nil},
	{unix.SOL_SOCKET, 28, nil}, {unix.SOL_SOCKET, unix.SO_TIMESTAMP, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, []int{0, 1}},
	{unix.SOL_SOCKET, unix.SO_PEEK_OFF, []int{0, 5, -1}}, {unix.SOL_SOCKET, unix.SO_ZEROCOPY, []int{0, 1, 2}}, {unix.SOL_SOCKET, unix.SO_COOKIE, nil},
	{unix.SOL_SOCKET, unix.SO_INCOMING_CPU, []int{0}}, {unix.SOL_SOCKET, unix.SO_BUSY_POLL, []int{0, 10, -1}}, {unix.SOL_SOCKET, unix.SO_NO_CHECK, []int{0, 1}},
	{unix.SOL_SOCKET, unix.SO_RXQ_OVFL, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_LOCK_FILTER, []int{1}}, {unix.SOL_SOCKET, unix.SO_DETACH_FILTER, []int{0}},
	{unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, []int{100000000, -1}}, {unix.SOL_SOCKET, unix.SO_MEMINFO, nil}, {unix.SOL_SOCKET, unix.SO_TXTIME, []int{1}},
	{unix.SOL_SOCKET, unix.SO_PEERSEC, nil}, {unix.SOL_SOCKET, unix.SO_PEERGROUPS, nil}, {unix.SOL_SOCKET, 200, []int{1}}, {unix.SOL_SOCKET, 0, []int{1}},
	{unix.SOL_SOCKET, unix.SO_TXREHASH, []int{0, 1, 5}}, {unix.SOL_SOCKET, unix.SO_BUF_LOCK, []int{0, 1, 3, 4}}, {unix.SOL_SOCKET, unix.SO_RESERVE_MEM, []int{0, -1}},
	{unix.SOL_SOCKET, unix.SO_MARK, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, []int{0, 1, 99}}, {unix.SOL_SOCKET, unix.SO_BINDTODEVICE, []int{0, 'o'<<8 | 'l'}},
	{unix.SOL_SOCKET, unix.SO_DEBUG, []int{0, 1}}, {unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, []int{30000}}, {unix.SOL_SOCKET, unix.SO_NETNS_COOKIE, nil},
	{unix.SOL_TCP, unix.TCP_NODELAY, []int{0, 1, -1}}, {unix.SOL_TCP, unix.TCP_MAXSEG, []int{0, 88, 500, 40000, -1}}, {unix.SOL_TCP, unix.TCP_CORK, []int{0, 1}},
	{unix.SOL_TCP, unix.TCP_KEEPIDLE, []int{0, 1, 100, 32768}}, {unix.SOL_TCP, unix.TCP_KEEPINTVL, []int{0, 10}}, {unix.SOL_TCP, unix.TCP_KEEPCNT, []int{0, 5, 128}},
	{unix.SOL_TCP, unix.TCP_SYNCNT, []int{0, 1, 6, 300}}, {unix.SOL_TCP, unix.TCP_LINGER2, []int{-1, 0, 10, 1000}}, {unix.SOL_TCP, unix.TCP_DEFER_ACCEPT, []int{0}},
	{unix.SOL_TCP, unix.TCP_WINDOW_CLAMP, []int{0, 60000}}, {unix.SOL_TCP, unix.TCP_INFO, nil}, {unix.SOL_TCP, unix.TCP_QUICKACK, []int{0, 1}},
	{unix.SOL_TCP, unix.TCP_CONGESTION, []int{'r' | 'e'<<8 | 'n'<<16 | 'o'<<24, 'x'}}, {unix.SOL_TCP, unix.TCP_USER_TIMEOUT, []int{0, 1000, -1}},
	{unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, []int{0, 16384, -1}}, {unix.SOL_TCP, unix.TCP_CC_INFO, nil}, {unix.SOL_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, []int{0, 1, 2}},
	{unix.SOL_TCP, unix.TCP_THIN_DUPACK, []int{0, 1, 2}}, {unix.SOL_TCP, unix.TCP_FASTOPEN, []int{0, 5, -1}}, {unix.SOL_TCP, unix.TCP_TIMESTAMP, []int{1}},
	{unix.SOL_TCP, unix.TCP_ULP, []int{'x'}}, {unix.SOL_TCP, unix.TCP_INQ, []int{0, 1, 2}}, {unix.SOL_TCP, unix.TCP_TX_DELAY, []int{0}}, {unix.SOL_TCP, 100, []int{1}},
	{unix.SOL_TCP, unix.TCP_FASTOPEN_NO_COOKIE, []int{0, 1}}, {unix.SOL_TCP, unix.TCP_REPAIR, []int{0, 1}}, {unix.SOL_TCP, unix.TCP_SAVED_SYN, nil},
	{unix.SOL_TCP, unix.TCP_FASTOPEN_CONNECT, []int{0, 1}}, {unix.SOL_TCP, unix.TCP_SAVE_SYN, []int{0, 1, 2}}, {unix.SOL_TCP, 0, []int{1}},
	{unix.SOL_IP, unix.IP_TOS, []int{0, 16, 255, 256, -1}}, {unix.SOL_IP, unix.IP_TTL, []int{0, 1, 64, 255, 256, -1}}, {unix.SOL_IP, unix.IP_PKTINFO, []int{0, 1}},
	{unix.SOL_IP, unix.IP_MTU_DISCOVER, []int{0, 1, 2, 3, 5, 9, -1}}, {unix.SOL_IP, unix.IP_RECVTTL, []int{0, 1}}, {unix.SOL_IP, unix.IP_RECVTOS, []int{0, 1}},
	{unix.SOL_IP, unix.IP_MTU, []int{1500}}, {unix.SOL_IP, unix.IP_FREEBIND, []int{0, 1}}, {unix.SOL_IP, unix.IP_MINTTL, []int{0, 1, 256}},
	{unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, []int{0, 1}}, {unix.SOL_IP, 51, []int{0}}, {unix.SOL_IP, unix.IP_RECVERR, []int{0, 1}},
	{unix.SOL_IP, unix.IP_OPTIONS, nil}, {unix.SOL_IP, unix.IP_TRANSPARENT, []int{0, 1}}, {unix.SOL_IP, unix.IP_HDRINCL, []int{1}}, {unix.SOL_IP, 0, []int{0}},
	{unix.SOL_IP, unix.IP_RECVORIGDSTADDR, []int{0, 1}}, {unix.SOL_IP, 80, nil}, {unix.SOL_IP, unix.IP_MULTICAST_TTL, []int{0, 1, 300}}, {unix.SOL_IP, 999, []int{1}},
	{unix.SOL_IPV6, unix.IPV6_V6ONLY, []int{0, 1, 2, -1}}, {unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS, []int{-1, 0, 64, 256}}, {unix.SOL_IPV6, unix.IPV6_MTU_DISCOVER, []int{0, 1, 2, 9}},
	{unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, []int{0, 1}}, {unix.SOL_IPV6, unix.IPV6_RECVHOPLIMIT, []int{0, 1}}, {unix.SOL_IPV6, unix.IPV6_RECVTCLASS, []int{0, 1}},
	{unix.SOL_IPV6, unix.IPV6_TCLASS, []int{-1, 0, 32, 256}}, {unix.SOL_IPV6, 33, []int{0, 1}}, {unix.SOL_IPV6, 72, []int{1, 2, 64}}, {unix.SOL_IPV6, unix.IPV6_MTU, []int{1280, 100}},
	{unix.SOL_IPV6, 70, []int{0, 1}}, {unix.SOL_IPV6, 73, []int{0, 255, 256}}, {unix.SOL_IPV6, 78, []int{0, 1}}, {unix.SOL_IPV6, unix.IPV6_RECVERR, []int{0, 1}},
	{unix.SOL_IPV6, 75, []int{0}}, {unix.SOL_IPV6, unix.IPV6_MULTICAST_HOPS, []int{1}}, {unix.SOL_IPV6, 999, []int{1}},
	{unix.SOL_UDP, 1, []int{1}}, {77, 1, []int{1}}, {-1, 1, []int{0}}, {unix.SOL_RAW, 1, nil}, {284, 1, nil},
}

func (g *generator) getOption(at string, fd int) differ.Step {
	o := pick(g, options...)
	length := pick(g, 4, 4, 4, 8, 16, 128, 256, 3, 1, 0, -1)
	return differ.Step{At: at, Op: "getsockopt", Fd: fd, Args: []int{o.level, o.name, length}}
}

func (g *generator) setOption(at string, fd int) differ.Step {
	o := pick(g, options...)
	for o.values == nil {
		o = pick(g, options...)
	}
	value := binary.NativeEndian.AppendUint32(nil, uint32(pick(g, o.values...)))
	switch {
	case o.name == unix.SO_LINGER && o.level == unix.SOL_SOCKET:
		value = binary.NativeEndian.AppendUint32(value, uint32(pick(g, 0, 0, 5)))
	case g.chance(1, 8):
		value = append(value, 0, 0, 0, 0)
	}
	length := len(value)
	if g.chance(1, 8) {
		length = pick(g, 0, 1, 2, 3, 5, -1)
	}
	return differ.Step{At: at, Op: "setsockopt", Fd: fd, Args: []int{o.level, o.name, length}, Data: hex.EncodeToString(value)}
}

package generate

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// socket is what the generator knows of one, from the text of the program alone.
type socket struct {
	family      int
	nonblocking bool // or may be
	named       bool // may have a name: bind, listen or connect was tried, or it was accepted
	bound       bool
	host, port  string // it is bound to
	listening   bool
	place       string
}

// history is what a program did before a step.
type history struct {
	p      differ.Program
	before []differ.Step
	slots  map[string]map[int]*socket // by actor
}

// replay follows the steps before one.
func replay(p differ.Program, before []differ.Step) *history {
	h := &history{p: p, slots: map[string]map[int]*socket{"a": {}, "b": {}}}
	for _, s := range before {
		h.step(s)
	}
	return h
}

// place gives where an actor is: actors of one place share its ports.
func (h *history) place(at string) string {
	if at[0] == 'a' {
		return h.p.A
	}
	return h.p.B
}

// socket gives what is in the slot of a step, nil if that is no TCP socket.
func (h *history) socket(s differ.Step) *socket { return h.slots[s.At][s.Fd] }

// step follows one step.
func (h *history) step(s differ.Step) {
	h.before = append(h.before, s)
	slots := h.slots[s.At]
	if slots == nil { // a child that is not there
		return
	}
	sock := slots[s.Fd]
	switch s.Op {
	case "socket":
		if family := tcpFamily(s); family != 0 {
			slots[s.To] = &socket{family: family, nonblocking: s.Arg(1)&nonblock != 0, place: h.place(s.At)}
		}
	case "socketpair":
		delete(slots, s.Fd)
		delete(slots, s.To)
	case "recv_fd": // which one it is depends on the other end
		slots[s.To] = &socket{named: true, nonblocking: true, place: h.place(s.At)}
	case "close":
		delete(slots, s.Fd)
	case "fork", "exec":
		h.slots[s.At[:1]+"+"] = maps.Clone(slots)
	case "exit":
		delete(h.slots, s.At)
	}
	if sock == nil {
		return
	}
	switch s.Op {
	case "bind":
		if !sock.named && sock.takes(*s.Addr, s.At) {
			sock.bound, sock.host, sock.port = true, s.Addr.Host, s.Addr.Port
		}
		sock.named = true
	case "listen":
		sock.named, sock.listening = true, sock.bound
	case "connect", "shutdown":
		sock.named, sock.listening = true, false
	case "accept4":
		if sock.listening {
			slots[s.To] = &socket{family: sock.family, named: true, nonblocking: s.Arg(0)&nonblock != 0, place: sock.place}
		}
	case "dup", "dup2", "dup3":
		slots[s.To] = sock
	case "fcntl", "ioctl":
		sock.nonblocking = true
	}
}

// tcpFamily gives the address family of a TCP socket that a step makes, 0 if it makes none.
func tcpFamily(s differ.Step) int {
	if s.Arg(1)&^(nonblock|cloexec) != unix.SOCK_STREAM || s.Arg(2) != 0 && s.Arg(2) != unix.IPPROTO_TCP {
		return 0
	}
	if s.Arg(0) != unix.AF_INET && s.Arg(0) != unix.AF_INET6 {
		return 0
	}
	return s.Arg(0)
}

// takes reports whether a socket can be bound to an address, unless the port is taken.
func (k *socket) takes(a differ.Addr, at string) bool {
	if a.Len != 0 || !slices.Contains([]string{"any", "lo", at[:1]}, a.Host) {
		return false
	}
	if k.family == unix.AF_INET {
		return a.Form == "4"
	}
	return a.Form == "mapped" || a.Form == "6" && a.Host != at[:1]
}

// own reports whether the address of a connect is in the caller's own container.
func (h *history) own(s differ.Step) bool {
	switch s.Addr.Host {
	case "lo", "lo5", "any":
		return true
	case "a", "b":
		return h.place(s.At) == h.place(s.Addr.Host)
	}
	return false
}

// listens reports whether a listener is where a connect goes.
func (h *history) listens(s differ.Step) bool {
	place := h.place(s.At)
	if s.Addr.Host == "a" || s.Addr.Host == "b" {
		place = h.place(s.Addr.Host)
	}
	for _, slots := range h.slots {
		for _, k := range slots {
			reached := k.host == s.Addr.Host || k.host == "any" || k.host == "lo" && s.Addr.Host == "any" || h.place(s.At) == place && k.place == place && k.host != "lo" && s.Addr.Host != "lo" && s.Addr.Host != "any"
			if k.listening && k.port == s.Addr.Port && k.place == place && reached {
				return true
			}
		}
	}
	return false
}

package generate

import (
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// socket is what the generator knows of one, from the text of the program alone.
type socket struct {
	family      int
	nonblocking bool // or may be
	named       bool // may have a name: bind, listen or connect was tried, or it was accepted
	bound       bool
	form        string // of the address it is bound to
	host, port  string
	v6only      bool
	wild6       bool // may be bound to [::], not V6ONLY
	lo6         bool // may be bound to ::1
	reached     bool // listened, and a connect went to its port
	mapped      bool // may have tried a connect to an IPv6 address that is IPv4 underneath
	native      bool // may have tried one to an IPv6 address that is IPv6 underneath
	triedMapped bool // may have tried a connect to a v4-mapped address
	listening   bool
	connected   bool // or may be
	doubtful    bool // may not be connected, though connected
	queued      int  // connections that wait for accept(), at least
	failed      bool // a connect that does not wait may have failed
	place       string
}

// history is what a program did before a step.
type history struct {
	p      differ.Program
	before []differ.Step
	slots  map[string]map[int]*socket // by actor
	ended  bool                       // an end of a connection may have been closed
	waits  map[byte]bool              // actors of which an accept() may wait
	passed bool                       // a socket that may not be connected was given to send_fd
}

// replay follows the steps before one.
func replay(p differ.Program, before []differ.Step) *history {
	h := &history{p: p, slots: map[string]map[int]*socket{"a": {}, "b": {}}, waits: map[byte]bool{}}
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
	if connects(s) {
		if k := h.socket(s); k != nil {
			k.connected = k.connected || h.listens(s) && k.reaches(*s.Addr)
			k.failed = k.failed || k.nonblocking && !h.listens(s)
			h.reach(s.Addr.Port)
		}
	}
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
		slots[s.To] = &socket{named: true, nonblocking: true, connected: slots[s.To] == nil || slots[s.To].connected, doubtful: h.passed, place: h.place(s.At)}
	case "send_fd":
		k := slots[s.To]
		h.passed = h.passed || k != nil && !k.surelyConnected()
	case "close":
		h.ended = h.ended || sock != nil && (sock.connected || sock.listening)
		delete(slots, s.Fd)
	case "fork", "exec":
		h.slots[s.At[:1]+"+"] = maps.Clone(slots)
	case "exit":
		delete(h.slots, s.At)
	}
	if sock != nil {
		h.act(s, sock, slots)
	}
}

// act notes what a step does to a socket that is there, or with it.
func (h *history) act(s differ.Step, sock *socket, slots map[int]*socket) {
	switch s.Op {
	case "bind":
		sock.tryBind(*s.Addr)
		if !sock.named && sock.takes(*s.Addr, s.At) {
			sock.bound, sock.form, sock.host, sock.port = true, s.Addr.Form, s.Addr.Host, s.Addr.Port
		}
		sock.named = true
	case "listen":
		sock.listenUnbound()
		sock.named, sock.listening = true, sock.bound
	case "setsockopt":
		if option2(s) == [2]int{unix.SOL_IPV6, unix.IPV6_V6ONLY} && s.Arg(2) >= 4 && !sock.bound && sock.family == unix.AF_INET6 {
			sock.v6only = strings.Trim(s.Data[:8], "0") != ""
		}
	case "sendto":
		if !connects(s) {
			break
		}
		sock.try(h, s)
		sock.named, sock.listening = true, false
	case "connect", "shutdown":
		h.ended = h.ended || s.Op == "shutdown" && sock.connected && s.Arg(0) != unix.SHUT_WR
		if s.Op == "connect" {
			sock.try(h, s)
		}
		sock.named, sock.listening = true, false
	case "accept4":
		if sock.listening {
			if sock.queued--; sock.queued < 0 && !sock.nonblocking {
				h.waits[s.At[0]] = true
			}
			slots[s.To] = &socket{family: sock.family, named: true, connected: slots[s.To] == nil || slots[s.To].connected, nonblocking: s.Arg(0)&nonblock != 0, place: sock.place}
		}
	case "dup", "dup2", "dup3":
		if to := slots[s.To]; s.Op != "dup" && to != nil && to.connected {
			h.ended = true
		}
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

// surelyConnected reports whether it is connected, or was.
func (k *socket) surelyConnected() bool { return k.connected && !k.doubtful }

// reaches reports whether a connect to an address, at which somebody listens, may succeed.
func (k *socket) reaches(a differ.Addr) bool {
	away := k.bound && k.host == "lo" && a.Host != "lo" && a.Host != "any"
	if k.listening || a.Len != 0 || away {
		return false
	}
	if k.family == unix.AF_INET {
		return a.Form == "4"
	}
	return a.Form == "6" || a.Form == "mapped" && !k.v6only
}

// takes reports whether a socket can be bound to an address, unless the port is taken.
func (k *socket) takes(a differ.Addr, at string) bool {
	if a.Len != 0 || !slices.Contains([]string{"any", "lo", at[:1]}, a.Host) {
		return false
	}
	if k.family == unix.AF_INET {
		return a.Form == "4"
	}
	return a.Form == "6" || a.Form == "mapped" && !k.v6only
}

// tryBind notes what an IPv6 socket may be bound to underneath.
func (k *socket) tryBind(a differ.Addr) {
	if k.family != unix.AF_INET6 || a.Form != "6" {
		return
	}
	switch {
	case a.Host == "any" && !k.v6only:
		k.wild6 = true
	case a.Host == "lo":
		k.lo6 = true
	}
}

// listenUnbound notes that a new socket which listens is at a wildcard from then on, with a port of
// the kernel's choice.
func (k *socket) listenUnbound() {
	if k.named || k.v6only {
		return
	}
	k.bound, k.host, k.form = true, "any", "4"
	if k.family == unix.AF_INET6 {
		k.form, k.wild6 = "6", true
	}
}

// connects reports whether a step makes a connection.
func connects(s differ.Step) bool {
	return s.Op == "connect" || s.Op == "sendto" && s.Arg(1)&unix.MSG_FASTOPEN != 0
}

// try notes what a connect may leave in a socket if it fails.
func (k *socket) try(h *history, s differ.Step) {
	k.mapped = k.mapped || h.mappedUnderneath(s)
	k.native = k.native || s.Addr.Form == "6" && toIPv6(s)
	k.triedMapped = k.triedMapped || s.Addr.Form == "mapped"
}

// mappedUnderneath reports whether a connect goes to an IPv6 address, but over IPv4 on the node.
func (h *history) mappedUnderneath(s differ.Step) bool {
	if s.Addr.Form != "6" {
		return false
	}
	switch s.Addr.Host {
	case "any", "lo":
		return true
	case "a", "b":
		return !sameNode(h.p.A, h.p.B)
	}
	return false
}

// sameNode reports whether two places are on one node.
func sameNode(a, b string) bool {
	node := func(place string) string {
		if place == differ.PlaceNode {
			return "n1"
		}
		name, _, _ := strings.Cut(place, "/")
		return name
	}
	return node(a) == node(b)
}

// reach notes that a connect may have reached the listeners of a port.
func (h *history) reach(port string) {
	for _, slots := range h.slots {
		for _, k := range slots {
			if k.listening && k.port == port {
				k.reached = true
				k.queued = max(k.queued, 0) + 1
			}
		}
	}
}

// hasV6Only reports whether a socket has IPV6_V6ONLY.
func (h *history) hasV6Only() bool {
	for _, slots := range h.slots {
		for _, k := range slots {
			if k.v6only {
				return true
			}
		}
	}
	return false
}

// serves reports whether a listener takes connections to addresses of a form.
func (k *socket) serves(form string) bool {
	if form == "6" {
		return k.form == "6"
	}
	return k.form != "6" || k.host == "any" && !k.v6only
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
	switch s.Addr.Host {
	case "a", "b":
		place = h.place(s.Addr.Host)
	case "gateway":
		place = differ.PlaceNode
	}
	for _, slots := range h.slots {
		for _, k := range slots {
			reached := k.host == s.Addr.Host || k.host == "any" || k.host == "lo" && s.Addr.Host == "any" || h.place(s.At) == place && k.place == place && k.host != "lo" && s.Addr.Host != "lo" && s.Addr.Host != "any"
			if k.listening && k.port == s.Addr.Port && k.place == place && reached && k.serves(s.Addr.Form) {
				return true
			}
		}
	}
	return false
}

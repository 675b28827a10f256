// Package generate makes socket programs from seeds. Most are a conversation that works, with steps
// put in, left out, moved and changed; some are steps at random. The same seed gives the same
// program.
//
// What is a known difference is not generated: a Set names each, with its row of
// docs/differences.md.
package generate

import (
	"math/rand/v2"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// layout is where the two actors are.
type layout struct {
	a, b, plain string
	weight      int
}

// Set is what programs are generated for: where their actors may be, which steps would show a known
// difference, and what of a trace may differ.
type Set struct {
	layouts    []layout
	Exclusions []Exclusion
	Allowances []Allowance
}

// Allowance is a known difference that every program may show, and which changes nothing that comes
// after it: traces are compared without it.
type Allowance struct {
	Name string
	Row  string // part of its row in docs/differences/
	// Level takes it out of a trace.
	Level func(p differ.Program, t *differ.Trace)
}

// Level takes out of a trace what may differ.
func (set *Set) Level(p differ.Program, t *differ.Trace) {
	for _, a := range set.Allowances {
		a.Level(p, t)
	}
}

// Intercepted are programs for containers whose TCP the node's kernel runs.
var Intercepted = &Set{layouts: layouts, Exclusions: Exclusions}

var layouts = []layout{
	{"n1/c1", "n1/c1", "", 5},
	{"n1/c1", "n1/c2", "", 3},
	{"n1/c1", "n2/c1", "", 5},
	{"n1/c1", "n1/c2", "b", 1},
	{"n1/c1", "n2/c1", "b", 1},
	{"n1/c1", "n1/c2", "a", 1},
	{"n1/c1", "n2/c1", "a", 1},
	{"n1/c1", differ.PlaceNode, "", 1},
	{"n1/c1", differ.PlaceOutside, "", 1},
}

// generator makes one program.
type generator struct {
	r *rand.Rand
	p differ.Program
}

// Program makes the program of a seed.
func (set *Set) Program(seed uint64) differ.Program {
	g := &generator{r: rand.New(rand.NewPCG(seed, 0x686564646c65))}
	total := 0
	for _, l := range set.layouts {
		total += l.weight
	}
	n := g.r.IntN(total)
	for _, l := range set.layouts {
		if n -= l.weight; n < 0 {
			g.p = differ.Program{Seed: seed, A: l.a, B: l.b, Plain: l.plain}
			break
		}
	}
	switch {
	case g.chance(1, 40):
		g.crowd()
	case g.chance(4, 5):
		g.conversation()
		g.mutate()
	default:
		for range 4 + g.r.IntN(14) {
			g.add(g.randomStep())
		}
	}
	g.tame()
	g.p.Steps = set.exclude(g.p)
	return g.p
}

// tame makes most of what would be left out as chance into something that is not.
func (g *generator) tame() {
	for i := range g.p.Steps {
		s := &g.p.Steps[i]
		if !chance(g.p.Steps[:i], *s) {
			continue
		}
		s.Args = slices.Clone(s.Args)
		switch {
		case s.Op == "splice_to":
			s.Op, s.Args = "write", []int{min(s.Args[0], oneSegment)}
		case sends(*s):
			s.Args[0] = oneSegment
		case len(s.Args) > 1 && s.Op != "splice_from":
			s.Args[1] |= unix.MSG_DONTWAIT
		default:
			s.Op, s.Args = "recv", []int{s.Args[0], unix.MSG_DONTWAIT}
		}
	}
}

func (g *generator) chance(n, of int) bool { return g.r.IntN(of) < n }

func pick[T any](g *generator, list ...T) T { return list[g.r.IntN(len(list))] }

func (g *generator) add(steps ...differ.Step) { g.p.Steps = append(g.p.Steps, steps...) }

// conversation: b listens, a connects, both talk and end. a's socket is f0; b listens at f0 and
// accepts into f1.
func (g *generator) conversation() {
	form := pick(g, "4", "4", "6")
	server, client := "b", "a"
	// The host outside cannot reach a container, a process of the node can.
	if g.p.B != differ.PlaceOutside && g.chance(1, 4) {
		server, client = "a", "b"
	}
	listening, reached := g.hosts(server)
	if form == "6" && listening == server {
		form = pick(g, "6", "mapped")
	}
	connectForm := pick(g, "4", "4", "mapped")
	v6only := form == "6" && g.chance(1, 6)
	if form == "6" && (listening != "any" || v6only || g.chance(1, 2)) {
		connectForm = "6"
	}
	g.add(g.socket(server, 0, form))
	if v6only {
		g.add(differ.Step{At: server, Op: "setsockopt", Fd: 0, Args: []int{unix.SOL_IPV6, unix.IPV6_V6ONLY, 4}, Data: "01000000"})
	}
	for g.chance(1, 3) {
		g.add(g.setOption(server, 0))
	}
	g.add(differ.Step{At: server, Op: "bind", Fd: 0, Addr: &differ.Addr{Form: form, Host: listening, Port: "P1"}})
	if g.chance(1, 4) {
		g.add(differ.Step{At: server, Op: "getsockname", Fd: 0, Args: []int{128}})
	}
	g.add(differ.Step{At: server, Op: "listen", Fd: 0, Args: []int{pick(g, 1, 8, 128)}})
	if g.chance(1, 5) {
		g.add(g.epoll(server, 0, 3)...)
	}
	g.add(g.socket(client, 0, connectForm))
	for g.chance(1, 3) {
		g.add(g.setOption(client, 0))
	}
	if g.chance(1, 6) {
		g.add(differ.Step{At: client, Op: "bind", Fd: 0, Addr: &differ.Addr{Form: connectForm, Host: pick(g, "any", client), Port: pick(g, "0", "P2")}})
	}
	if g.p.B == differ.PlaceNode && server == "b" && connectForm == "6" {
		reached = "gateway"
	}
	to := &differ.Addr{Form: connectForm, Host: reached, Port: "P1"}
	if g.chance(1, 8) {
		g.add(differ.Step{At: client, Op: "sendto", Fd: 0, Addr: to, Args: []int{g.size(), pick(g, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN|unix.MSG_DONTWAIT)}})
	} else {
		g.add(differ.Step{At: client, Op: "connect", Fd: 0, Addr: to})
	}
	g.add(differ.Step{At: server, Op: "accept4", Fd: 0, To: 1, Args: []int{pick(g, 0, nonblock, nonblock|cloexec), pick(g, 128, 128, 128, 16, 0, -1)}})
	if g.chance(1, 5) {
		g.add(g.epoll(pick(g, client, server), 1, 3)...)
	}
	ends := []end{{client, 0}, {server, 1}}
	for range 2 + g.r.IntN(9) {
		e := pick(g, ends...)
		g.add(g.talk(e.at, e.fd)...)
	}
	for _, e := range ends {
		g.add(pick(g, differ.Step{At: e.at, Op: "shutdown", Fd: e.fd, Args: []int{g.r.IntN(3)}}, differ.Step{At: e.at, Op: "close", Fd: e.fd}, g.receive(e.at, e.fd)))
	}
}

// crowd: more clients than a listener has room for, which accepts none.
func (g *generator) crowd() {
	server, client := "b", "a"
	if g.p.B == differ.PlaceOutside {
		g.p.B = g.p.A
	}
	form := pick(g, "4", "6")
	g.add(g.socket(server, 5, form))
	g.add(differ.Step{At: server, Op: "bind", Fd: 5, Addr: &differ.Addr{Form: form, Host: "any", Port: "P1"}})
	g.add(differ.Step{At: server, Op: "listen", Fd: 5, Args: []int{g.r.IntN(3)}})
	for i := range 2 + g.r.IntN(3) {
		g.add(differ.Step{At: client, Op: "socket", To: i, Args: []int{unix.AF_INET6, unix.SOCK_STREAM | nonblock, 0}})
		to := &differ.Addr{Form: pick(g, "mapped", form), Host: pick(g, server, server, "any"), Port: "P1"}
		if to.Form == "4" {
			to.Form = "mapped"
		}
		g.add(differ.Step{At: client, Op: "connect", Fd: i, Addr: to})
		if g.chance(1, 4) {
			g.add(g.inspect(client, i))
		}
	}
}

// end is one end of a connection.
type end struct {
	at string
	fd int
}

// hosts gives where the server listens and which address the other connects to.
func (g *generator) hosts(server string) (listening, reached string) {
	listening = pick(g, "any", "any", server)
	reached = server
	if g.p.A == g.p.B && g.chance(1, 2) {
		listening, reached = pick(g, "any", "lo"), "lo"
	}
	if g.p.B == differ.PlaceNode && server == "b" && g.chance(1, 2) {
		listening, reached = "any", "gateway"
	}
	return listening, reached
}

// mutate changes a program that works.
func (g *generator) mutate() {
	for range g.r.IntN(6) {
		i := g.r.IntN(len(g.p.Steps))
		switch g.r.IntN(8) {
		case 0:
			g.p.Steps = slices.Delete(g.p.Steps, i, i+1)
		case 1:
			j := min(i+1, len(g.p.Steps)-1)
			g.p.Steps[i], g.p.Steps[j] = g.p.Steps[j], g.p.Steps[i]
		case 2:
			g.p.Steps = slices.Insert(g.p.Steps, i, g.p.Steps[g.r.IntN(len(g.p.Steps))])
		case 3:
			g.distort(&g.p.Steps[i])
		default:
			g.p.Steps = slices.Insert(g.p.Steps, i, g.randomStep())
		}
		if len(g.p.Steps) == 0 {
			g.add(g.randomStep())
		}
	}
}

// distort makes one argument of a step strange.
func (g *generator) distort(s *differ.Step) {
	s.Args = slices.Clone(s.Args)
	switch {
	case s.Addr != nil && g.chance(3, 4):
		a := *s.Addr
		switch g.r.IntN(4) {
		case 0:
			a.Form = pick(g, "4", "6", "mapped", "unspec", "unix", "junk")
		case 1:
			a.Host = g.host()
		case 2:
			a.Len = pick(g, 1, 2, 8, 15, 16, 17, 24, 27, 28, 29, 128)
		case 3:
			a.Port = pick(g, "0", "P1", "P2", "P3", "low")
		}
		s.Addr = &a
	case len(s.Args) > 0 && g.chance(2, 3):
		s.Args[g.r.IntN(len(s.Args))] = pick(g, -1, 0, 1, 2, 3, 4, 7, 16, 4096, 1<<20, 1<<30)
	default:
		s.Fd = g.slot()
	}
}

func (g *generator) host() string {
	return pick(g, "a", "b", "any", "lo", "lo5", "nobody", "gateway", "broadcast", "multicast")
}

func (g *generator) slot() int {
	if g.chance(1, 20) {
		return pick(g, -1, differ.Slots+1)
	}
	return pick(g, 0, 0, 0, 1, 1, 2, 3)
}

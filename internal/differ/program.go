package differ

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Slots is how many descriptors an actor names. A step that names another is one on a descriptor
// that is not open.
const Slots = 6

// Places of actors: lab containers, the namespace of the first one's node, and the host outside the
// overlay.
const (
	PlaceNode    = "node"
	PlaceOutside = "outside"
)

// Program is a socket program of two actors.
type Program struct {
	Name  string `json:"name,omitempty"`
	About string `json:"about,omitempty"` // what a named program is kept for
	Seed  uint64 `json:"seed,omitempty"`  // what it was generated from
	A     string `json:"a"`               // place of actor a: a container
	B     string `json:"b"`               // place of actor b
	Plain string `json:"plain,omitempty"` // the actor that is not intercepted in either run: "a", "b" or none
	Steps []Step `json:"steps"`
}

// Step is one call of one actor.
type Step struct {
	At   string `json:"at"` // "a", "b", or "a+", "b+" for the child that actor made
	Op   string `json:"op"`
	Fd   int    `json:"fd"`             // the slot whose descriptor the call gets
	To   int    `json:"to,omitempty"`   // the slot that gets the result, or of the call's second descriptor
	Addr *Addr  `json:"addr,omitempty"` // of bind and connect
	Args []int  `json:"args,omitempty"` // the call's integers, as ops names them
	Data string `json:"data,omitempty"` // hexadecimal: the value of setsockopt
}

// Addr is a socket address by symbols.
type Addr struct {
	Form string `json:"form"` // "4", "6", "mapped"; "unspec", "unix", "junk": wrong families of an IPv4 address
	Host string `json:"host"` // "a", "b": that actor's own; "gateway": of a's node; "any", "lo", "lo5", "nobody", "broadcast", "multicast"
	Port string `json:"port"` // "P1", "P2", "P3", "low" (below 1024): ports nobody else uses; "0"
	Len  int    `json:"len,omitempty"`
}

// op says how a kind of step is written and treated.
type op struct {
	args   []string // names of Args
	addr   bool
	to     bool // fills or names a second slot
	local  bool // changes nothing another actor could see
	blocks bool // may block, so it has a thread of its own
}

var ops = map[string]op{
	"socket":       {args: []string{"family", "type", "protocol"}, to: true, local: true},
	"bind":         {args: []string{"uid"}, addr: true, local: true},
	"connect":      {addr: true, blocks: true},
	"listen":       {args: []string{"backlog"}},
	"accept4":      {args: []string{"flags", "addrlen"}, to: true, blocks: true},
	"getsockname":  {args: []string{"addrlen"}, local: true},
	"getpeername":  {args: []string{"addrlen"}, local: true},
	"getsockopt":   {args: []string{"level", "name", "len"}, local: true},
	"setsockopt":   {args: []string{"level", "name", "len"}},
	"shutdown":     {args: []string{"how"}},
	"close":        {},
	"dup":          {to: true, local: true},
	"dup2":         {to: true},
	"dup3":         {args: []string{"flags"}, to: true},
	"fcntl":        {args: []string{"cmd", "arg"}, local: true},
	"ioctl":        {args: []string{"request", "arg"}, local: true},
	"poll":         {args: []string{"events", "timeout"}, blocks: true, local: true},
	"epoll_create": {args: []string{"flags"}, to: true, local: true},
	"epoll_ctl":    {args: []string{"op", "events"}, to: true, local: true},
	"epoll_wait":   {args: []string{"max", "timeout"}, blocks: true, local: true},
	"write":        {args: []string{"n"}, blocks: true},
	"writev":       {args: []string{"n"}, blocks: true},
	"sendto":       {args: []string{"n", "flags"}, addr: true, blocks: true},
	"send":         {args: []string{"n", "flags"}, blocks: true},
	"sendmsg":      {args: []string{"n", "flags"}, blocks: true},
	"sendfile":     {args: []string{"n"}, blocks: true},
	"splice_to":    {args: []string{"n", "flags"}, blocks: true},
	"read":         {args: []string{"n"}, blocks: true},
	"readv":        {args: []string{"n"}, blocks: true},
	"recv":         {args: []string{"n", "flags"}, blocks: true},
	"recvfrom":     {args: []string{"n", "flags"}, blocks: true},
	"recvmsg":      {args: []string{"n", "flags", "controllen"}, blocks: true},
	"recvmmsg":     {args: []string{"n", "flags", "messages"}, blocks: true},
	"splice_from":  {args: []string{"n", "flags"}, blocks: true},
	"socketpair":   {to: true, local: true},
	"send_fd":      {to: true, local: true},
	"recv_fd":      {to: true, local: true},
	"fork":         {local: true},
	"exec":         {local: true},
	"exit":         {},
}

// hasLowPort reports whether a step names a port below 1024.
func (p Program) hasLowPort() bool {
	return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Addr != nil && s.Addr.Port == "low" })
}

// Known reports whether there is such a step, and Blocks whether it may block.
func (s Step) Known() bool  { _, ok := ops[s.Op]; return ok }
func (s Step) Blocks() bool { return ops[s.Op].blocks }

// Arg gives argument i, 0 if the step has none.
func (s Step) Arg(i int) int {
	if i < len(s.Args) {
		return s.Args[i]
	}
	return 0
}

// Load reads the programs of a JSON file: one, or a list.
func Load(path string) ([]Program, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	var list []Program
	if strings.HasPrefix(strings.TrimSpace(string(raw)), "{") {
		raw = append(append([]byte("["), raw...), ']')
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read program %s: %w", path, err)
	}
	for _, p := range list {
		if err := p.Check(); err != nil {
			return nil, fmt.Errorf("program %s: %w", path, err)
		}
	}
	return list, nil
}

// Check reports mistakes that would make a program mean nothing.
func (p Program) Check() error {
	if p.A == "" || p.B == "" || p.A == PlaceNode || p.A == PlaceOutside {
		return fmt.Errorf("places %q and %q: a must be a container, b anything", p.A, p.B)
	}
	for i, s := range p.Steps {
		switch {
		case !s.Known():
			return fmt.Errorf("step %d: no operation %q", i, s.Op)
		case !strings.Contains(" a b a+ b+ ", " "+s.At+" "):
			return fmt.Errorf("step %d: no actor %q", i, s.At)
		case ops[s.Op].addr != (s.Addr != nil):
			return fmt.Errorf("step %d: %s with or without an address", i, s.Op)
		}
	}
	return nil
}

// JSON gives the program so that it can be kept and replayed: a line for each step.
func (p Program) JSON() string {
	steps := p.Steps
	p.Steps = nil
	head, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and integers
	}
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(string(head), "null}") + "[")
	for i, s := range steps {
		line, err := json.Marshal(s)
		if err != nil {
			panic(err)
		}
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n  " + string(line))
	}
	b.WriteString("\n]}\n")
	return b.String()
}

// String writes the program for people.
func (p Program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "a in %s, b in %s", p.A, p.B)
	if p.Plain != "" {
		fmt.Fprintf(&b, "; %s is not intercepted", p.Plain)
	}
	for i, s := range p.Steps {
		fmt.Fprintf(&b, "\n%3d %s", i, s)
	}
	return b.String()
}

// String writes one step: "a: f0 = socket(AF_INET, SOCK_STREAM, 0)".
func (s Step) String() string {
	spec := ops[s.Op]
	args := []string{fmt.Sprintf("f%d", s.Fd)}
	result := ""
	switch s.Op {
	case "socket", "epoll_create":
		args, result = nil, fmt.Sprintf("f%d = ", s.To)
	case "accept4", "dup", "recv_fd":
		result = fmt.Sprintf("f%d = ", s.To)
	case "fork", "exec", "exit":
		args = nil
	default:
		if spec.to {
			args = append(args, fmt.Sprintf("f%d", s.To))
		}
	}
	if s.Addr != nil {
		args = append(args, s.Addr.String())
	}
	args = append(args, s.named()...)
	if s.Data != "" {
		args = append(args, "0x"+s.Data)
	}
	return fmt.Sprintf("%s: %s%s(%s)", s.At, result, s.Op, strings.Join(args, ", "))
}

func (a Addr) String() string {
	text := fmt.Sprintf("%s[%s]:%s", a.Form, a.Host, a.Port)
	if a.Len != 0 {
		text += fmt.Sprintf(" len %d", a.Len)
	}
	return text
}

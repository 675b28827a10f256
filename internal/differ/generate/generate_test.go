package generate

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/differ"
)

// TestProgram checks that a seed is a program, that all of them are well formed, and that the
// generator uses every operation and leaves few programs without a connection.
func TestProgram(t *testing.T) {
	const many = 3000
	used := map[string]int{}
	rare := map[string]int{}
	connects := 0
	for seed := range uint64(many) {
		p := Intercepted.Program(seed)
		if err := p.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(p, Intercepted.Program(seed)) {
			t.Fatalf("seed %d gives two programs", seed)
		}
		if !Intercepted.Allowed(p) {
			t.Errorf("seed %d: shows a known difference: %s", seed, p)
		}
		seen := map[string]bool{}
		for _, s := range p.Steps {
			used[s.Op]++
			seen[s.Op] = true
			if what := special(s); what != "" {
				rare[what]++
			}
		}
		if seen["accept4"] && seen["connect"] && seen["listen"] {
			connects++
		}
	}
	for _, op := range []string{"socket", "bind", "listen", "connect", "accept4", "getsockname", "getpeername", "getsockopt", "setsockopt", "shutdown",
		"close", "dup", "dup2", "dup3", "fork", "exec", "fcntl", "ioctl", "poll", "epoll_create", "epoll_ctl", "epoll_wait", "write", "writev", "send", "sendto",
		"sendmsg", "sendfile", "splice_to", "read", "readv", "recv", "recvfrom", "recvmsg", "recvmmsg", "splice_from", "socketpair", "send_fd", "recv_fd"} {
		if used[op] < many/200 {
			t.Errorf("%s in %d steps of %d programs", op, used[op], many)
		}
	}
	for _, what := range []string{"IPv6 connect", "IPv6 own bind", "fast open", "low port", "other user", "gateway"} {
		if rare[what] < many/100 {
			t.Errorf("%s in %d steps of %d programs", what, rare[what], many)
		}
	}
	if connects < many/2 {
		t.Errorf("%d of %d programs have a connection", connects, many)
	}
}

// special tells a step that is worth generating now and then.
func special(s differ.Step) string {
	switch {
	case s.Op == "bind" && s.Arg(0) != 0:
		return "other user"
	case s.Addr == nil:
		return ""
	case s.Addr.Port == "low":
		return "low port"
	case s.Addr.Host == "gateway":
		return "gateway"
	case s.Op == "sendto" && connects(s):
		return "fast open"
	case s.Op == "connect" && toIPv6(s):
		return "IPv6 connect"
	case s.Op == "bind" && s.Addr.Form == "6" && s.Addr.Host == s.At[:1]:
		return "IPv6 own bind"
	}
	return ""
}

// TestModules checks the same of programs for stack modules.
func TestModules(t *testing.T) {
	const many = 1000
	connects := 0
	for seed := range uint64(many) {
		p := Modules.Program(seed)
		if err := p.Check(); err != nil || !Modules.Allowed(p) {
			t.Fatalf("seed %d: %v: %s", seed, err, p)
		}
		seen := map[string]bool{}
		for _, s := range p.Steps {
			seen[s.Op] = true
		}
		if seen["accept4"] && seen["connect"] && seen["listen"] {
			connects++
		}
	}
	if connects < many/2 {
		t.Errorf("%d of %d programs have a connection", connects, many)
	}
}

// TestExclusions ties every exclusion to its row: one that was made equal, and so lost its row,
// must be taken out.
func TestExclusions(t *testing.T) {
	pages, err := filepath.Glob("../../../docs/differences/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("pages of docs/differences/: %d, %v", len(pages), err)
	}
	var rows strings.Builder
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		rows.Write(raw)
	}
	of := func(name, row string) {
		if row == "" || !strings.Contains(rows.String(), row) {
			t.Errorf("%q stands for a row with %q: docs/differences/ has none", name, row)
		}
	}
	for _, set := range []*Set{Intercepted, Modules} {
		for _, e := range set.Exclusions {
			of(e.Name, e.Row)
		}
		for _, a := range set.Allowances {
			of(a.Name, a.Row)
		}
	}
}

package sockets

import (
	"bufio"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// optionDifference is an option whose answers are not those of a plain container, and why: a row of
// docs/differences/options.md, or that they differ from one run to the next.
type optionDifference struct {
	level   string
	numbers []int
	why     string
	// chance: the values differ from run to run; lengths and errors must be equal.
	chance bool
}

var optionDifferences = []optionDifference{
	{level: "socket", numbers: []int{7, 8}, why: "SO_SNDBUF, SO_RCVBUF: grow with what a connection carries", chance: true},
	{level: "socket", numbers: []int{28}, why: "SO_PEERNAME: a port of the kernel's choice", chance: true},
	{level: "socket", numbers: []int{49}, why: "SO_INCOMING_CPU", chance: true},
	{level: "socket", numbers: []int{56}, why: "SO_INCOMING_NAPI_ID", chance: true},
	{level: "socket", numbers: []int{57}, why: "SO_COOKIE", chance: true},
	{level: "socket", numbers: []int{71}, why: "SO_NETNS_COOKIE: labs are made anew", chance: true},
	{level: "ip", numbers: []int{52}, why: "IP_PROTOCOL: the port, for a stream socket", chance: true},
	{level: "tcp", numbers: []int{11, 24, 26}, why: "TCP_INFO, TCP_TIMESTAMP, TCP_CC_INFO: times", chance: true},

	{level: "socket", numbers: []int{55}, why: "SO_MEMINFO counts the tag"},
	{level: "socket", numbers: []int{50, 52}, why: "SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_EBPF"},
	{level: "ip", numbers: []int{4}, why: "IP_OPTIONS"},
	{level: "ip", numbers: []int{14}, why: "IP_MTU: the underlay's"},
	{level: "ip", numbers: []int{51}, why: "IP_LOCAL_PORT_RANGE: ends below the node's ports"},
	{level: "ipv6", numbers: []int{24, 61}, why: "IPV6_MTU, IPV6_PATHMTU: the underlay's"},
	{level: "tcp", numbers: []int{2, 10}, why: "TCP_MAXSEG, TCP_WINDOW_CLAMP: the underlay's MTU"},
}

// difference finds the entry for an option.
func difference(level string, number int) *optionDifference {
	for i, d := range optionDifferences {
		for _, n := range d.numbers {
			if d.level == level && n == number {
				return &optionDifferences[i]
			}
		}
	}
	return nil
}

// optionValue matches a value in the output of sockopts.c, behind its length.
var optionValue = regexp.MustCompile(`(=\d+:)[0-9a-f]+`)

// TestSocketOptions reads and sets every option number of four levels on IPv4 and IPv6 sockets in
// six states, in both modes: what the calls return must be equal, but for the table above. Each
// entry of the table must be needed.
func TestSocketOptions(t *testing.T) {
	sockopts := filepath.Join(t.TempDir(), "sockopts")
	if out, err := exec.Command("gcc", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-o", sockopts, "testdata/sockopts.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	plain, here := sweepOptions(t, "overlay", sockopts), sweepOptions(t, "heddle", sockopts)
	if want := 2 * 6 * 4 * 101; len(plain) != want || len(here) != want {
		t.Fatalf("%d and %d lines, want %d", len(plain), len(here), want)
	}
	needed := map[*optionDifference]bool{}
	wrong := 0
	for key, want := range plain {
		got := here[key]
		if got == want {
			continue
		}
		parts := strings.Split(key, "/")
		number, err := strconv.Atoi(parts[3])
		if err != nil {
			t.Fatalf("line %q: %v", key, err)
		}
		d := difference(parts[2], number)
		switch {
		case d != nil && !d.chance:
			needed[d] = true
		case d != nil && optionValue.ReplaceAllString(got, "$1") == optionValue.ReplaceAllString(want, "$1"):
		default:
			if wrong++; wrong <= 20 {
				t.Errorf("%s:\n got %s\nwant %s", key, got, want)
			}
		}
	}
	if wrong > 20 {
		t.Errorf("and %d more", wrong-20)
	}
	for i, d := range optionDifferences {
		if !d.chance && !needed[&optionDifferences[i]] {
			t.Errorf("%s (%s %v) differs no longer: take it out of the table and of docs/differences/options.md", d.why, d.level, d.numbers)
		}
	}
}

// sweepOptions runs sockopts.c between two nodes and gives its lines by family, state, level and
// option.
func sweepOptions(t *testing.T, mode, sockopts string) map[string]string {
	t.Helper()
	port := strconv.Itoa(lab.FreePort())
	lab.Start(t, mode, "n2/c1", sockopts, "server", port).WaitFor("ready")
	out := lab.MustRun(t, mode, "n1/c1", sockopts, lab.Address(t, mode, "n2/c1"), port)
	lines := map[string]string{}
	for scan := bufio.NewScanner(strings.NewReader(out)); scan.Scan(); {
		key, values, ok := strings.Cut(scan.Text(), " get256")
		if !ok || lines[key] != "" {
			t.Fatalf("sockopts printed %q", scan.Text())
		}
		lines[key] = fmt.Sprint("get256", values)
	}
	return lines
}

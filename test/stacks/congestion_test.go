package stacks

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// load brings a congestion control that ships with Heddle to all nodes, until the end of the test.
func load(t testing.TB, name string) {
	t.Helper()
	lab.Heddle(t, "stack", "load", filepath.Join(filepath.Dir(lab.Bin), name+".bpf.o"))
	t.Cleanup(func() { _ = lab.Command("stack", "unload", name) })
}

// stateOf gives what the nodes have made of a congestion control.
func stateOf(t testing.TB, name string) (states []string) {
	t.Helper()
	var nodes []struct {
		Congestion []struct{ Name, State string }
	}
	lab.Query(t, &nodes, "stack")
	for _, n := range nodes {
		for _, c := range n.Congestion {
			if c.Name == name {
				states = append(states, c.State)
			}
		}
	}
	return states
}

func hasState(t testing.TB, name, want string) {
	t.Helper()
	if got := stateOf(t, name); fmt.Sprint(got) != fmt.Sprint([]string{want, want}) {
		t.Errorf("%s is %v, want %s on both nodes", name, got, want)
	}
}

// static starts the program without a C library in n1/c1; it sends n bytes to n2/c1 and holds the
// connection. It gives its port.
func static(t testing.TB, n int) (port uint16) {
	t.Helper()
	program := lab.Build(t, "static", func(path string) *exec.Cmd {
		cmd := exec.Command("go", "build", "-o", path, "./testdata/static")
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
		return cmd
	})
	server, to := lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, to)
	p := lab.Start(t, "heddle", "n1/c1", program, net.JoinHostPort(lab.OverlayOf("n2/c1")(t), strconv.Itoa(to)), strconv.Itoa(n))
	server.Must(`c, _ = l.accept()`)
	server.Begin(fmt.Sprintf(`receive(c, %d)`, n))
	p.WaitFor("port ")
	found := regexp.MustCompile(`port (\d+)`).FindStringSubmatch(p.Output())
	number, err := strconv.ParseUint(found[1], 10, 16)
	testutil.NoError(t, err)
	return uint16(number)
}

// TestLoad: a congestion control that was loaded while the nodes run is what a static program's
// connection has; it holds while no agent runs and with the next, and goes when nobody names it.
func TestLoad(t *testing.T) {
	load(t, "dctcp")
	hasState(t, "dctcp", "unused")
	apply(t, "loaded", "stack: kernel\nfallback: refuse\nsettings: {congestion: dctcp}\n")
	hasState(t, "dctcp", "registered")
	label(t, "loaded", "n1/c1", "n2/c1")
	port := static(t, 1<<20)
	// Both ends have ECN, which the kernel of neither asks for by itself.
	for _, word := range []string{" dctcp ", " ecn "} {
		if out := socketOf(t, "n1", port); !strings.Contains(out, word) {
			t.Errorf("no%sin %s", word, out)
		}
	}
	raw, err := exec.CommandContext(t.Context(), lab.Bin, "stack", "unload", "--lab", lab.Name, "dctcp").CombinedOutput()
	if err == nil || !strings.Contains(string(raw), "named by profile loaded") {
		t.Errorf("unload what is used: %v, %s", err, raw)
	}
	client, server, to := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, to)
	client.Must(`s = tcp()`) // that takes an agent
	lab.EndAgent(t, "n1", 9)
	client.Must(`s.connect((%q, %d))`, lab.OverlayOf("n2/c1")(t), to)
	if out := socketOf(t, "n1", client.PortOf("s")); !strings.Contains(out, " dctcp ") {
		t.Errorf("without an agent: %s", out)
	}
	testutil.NoError(t, lab.Command("up"))
	hasState(t, "dctcp", "registered")
	lab.Heddle(t, "stack", "delete", "loaded")
	hasState(t, "dctcp", "unused")
	if out := socketOf(t, "n1", port); strings.Contains(out, " dctcp ") {
		t.Errorf("a live connection still has it: %s", out)
	}
}

// TestLoadRefused: what a kernel refuses is not stored, and its verifier's words are told.
func TestLoadRefused(t *testing.T) {
	source := filepath.Join(t.TempDir(), "bad.bpf.c")
	lab.WriteFile(t, source, []byte(`#include "tcp.h"
SEC("struct_ops/s") __u32 BPF_PROG(s, struct sock *sk) { return *(__u32 *)(long)tcp_of(sk)->snd_cwnd; }
SEC("struct_ops/c") void BPF_PROG(c, struct sock *sk, __u32 ack, __u32 acked) { }
SEC("struct_ops/u") __u32 BPF_PROG(u, struct sock *sk) { return 2; }
SEC(".struct_ops.link") struct tcp_congestion_ops bad = {.ssthresh = (void *)s, .cong_avoid = (void *)c, .undo_cwnd = (void *)u, .name = "bad"};
char _license[] SEC("license") = "GPL";
`))
	object := filepath.Join(t.TempDir(), "bad.bpf.o")
	out, err := exec.CommandContext(t.Context(), "clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-I../../bpf/cc", "-I/usr/include/x86_64-linux-gnu", "-c", source, "-o", object).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for path, want := range map[string]string{object: "invalid mem access", lab.Bin: "no BPF object"} {
		raw, err := exec.CommandContext(t.Context(), lab.Bin, "stack", "load", "--lab", lab.Name, path).CombinedOutput()
		if text := string(raw); err == nil || !strings.Contains(text, want) && !strings.Contains(text, "more than 524288 bytes") {
			t.Errorf("%s: %v, %s", path, err, raw)
		}
	}
	if got := stateOf(t, "bad"); len(got) != 0 {
		t.Errorf("it is stored: %v", got)
	}
}

// meanWindow sends through a hop that marks one packet in a hundred, and gives the mean congestion
// window, in segments, of what a profile gives the connection.
func meanWindow(t *testing.T, congestion string) float64 {
	apply(t, "marked", "stack: kernel\nfallback: refuse\nsettings: {congestion: "+congestion+", ecn: true}\n")
	port := static(t, 1<<36) // which does not end meanwhile
	const samples = 60
	sum := 0
	for range samples { // each in its own time: a busy machine may take a second for one
		testutil.Eventually(t, "a sample of the window", func() (bool, string) {
			out := socketOf(t, "n1", port)
			found := regexp.MustCompile(` cwnd:(\d+)`).FindStringSubmatch(out)
			if found == nil || !strings.Contains(out, " "+congestion+" ") || !strings.Contains(out, "delivered_ce:") {
				return false, out
			}
			n, _ := strconv.Atoi(found[1])
			sum += n
			return true, out
		})
	}
	return float64(sum) / samples
}

// TestDCTCPReacts: where a queue marks one packet in a hundred, reno halves its window for each
// mark; DCTCP takes back a part of it, by the share that is marked. Where everything is marked, it
// goes down to two segments.
func TestDCTCPReacts(t *testing.T) {
	load(t, "dctcp")
	label(t, "marked", "n1/c1", "n2/c1")
	const rules = "chain in { type filter hook ingress device eth0 priority 0; %s ip ecn set ce counter; }"
	repair := lab.Spoil(t, "n2", "netdev", fmt.Sprintf(rules, "ip ecn ect0 numgen random mod 100 0"))
	reno, dctcp := meanWindow(t, "reno"), meanWindow(t, "dctcp")
	t.Logf("mean windows: reno %.1f, dctcp %.1f segments", reno, dctcp)
	if dctcp < 2*reno {
		t.Errorf("one packet in a hundred marked: mean windows: reno %.1f, dctcp %.1f, want at least twice", reno, dctcp)
	}
	repair()
	lab.Spoil(t, "n2", "netdev", fmt.Sprintf(rules, "ip ecn ect0"))
	if all := meanWindow(t, "dctcp"); all > 4 {
		t.Errorf("everything marked: mean window %.1f, want 2", all)
	}
}

// TestECN: two endpoints whose profiles ask for ECN have it, on each path and in both families; of
// one that asks alone, its peer declines.
func TestECN(t *testing.T) {
	apply(t, "ecn", "stack: kernel\nsettings: {ecn: true}\n")
	label(t, "ecn", "n1/c1", "n1/c2", "n2/c1")
	const ecn = 8 // TCPI_OPT_ECN
	for _, c := range []struct {
		name, server, target string
		family               int
		want                 bool
	}{
		{"direct", "n2/c1", lab.OverlayOf("n2/c1")(t), 4, true},
		{"direct, IPv6", "n2/c1", lab.Overlay6Of("n2/c1")(t), 6, true},
		{"local", "n1/c2", lab.OverlayOf("n1/c2")(t), 4, true},
		{"local, IPv6", "n1/c2", lab.Overlay6Of("n1/c2")(t), 6, true},
		{"to one without a profile", "n2/c2", lab.OverlayOf("n2/c2")(t), 4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", c.server), lab.FreePort()
			server.Must(`l = listen(%d, %q, %d)`, c.family, map[int]string{4: "0.0.0.0", 6: "::"}[c.family], port)
			client.Must(`s = connect(%d, %q, %d)`, c.family, c.target, port)
			server.Must(`c, _ = l.accept()`)
			want := fmt.Sprint(c.want)
			client.Expect(want, `bool(s.getsockopt(6, 11, 8)[5] & %d)`, ecn)
			server.Expect(want, `bool(c.getsockopt(6, 11, 8)[5] & %d)`, ecn)
			client.Must(`send(s, 1 << 20)`)
			server.Expect(client.Must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
		})
	}
}

// TestLEDBAT: a connection of a background profile moves what it is given, and nothing is lost.
func TestLEDBAT(t *testing.T) {
	load(t, "ledbat")
	apply(t, "background", "stack: kernel\nfallback: refuse\nsettings: {congestion: ledbat}\n")
	label(t, "background", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n2/c1")(t), port)
	server.Must(`c, _ = l.accept()`)
	client.Expect(`"ledbat"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.Must(`send(s, 1 << 24)`)
	server.Expect(client.Must(`digest(pattern(1 << 24))`), `receive(c, 1 << 24)`)
}

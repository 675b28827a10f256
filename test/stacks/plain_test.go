package stacks

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// plainContainer makes an endpoint of n1 that is not intercepted and has a profile's label, and
// gives its network namespace.
func plainContainer(t *testing.T, profile string) (space string) {
	t.Helper()
	space = lab.Name + "-plain"
	testutil.NoError(t, netns.Create(space))
	t.Cleanup(func() {
		_ = lab.Command("endpoints", "delete", "plain", "--ignore-missing", "--node", "n1")
		if err := netns.Delete(space); err != nil {
			t.Error(err)
		}
	})
	lab.Heddle(t, "endpoints", "add", "plain", "--intercepted=false", "--netns", netns.Path(space), "--node", "n1", "--label", "stack="+profile)
	return space
}

const plainSettings = "stack: kernel\nsettings: {congestion: reno, initial_window: 33, receive_buffer: 60000, send_buffer: 50000, mss: 1200, keepalive: {idle: 61s, interval: 11s, count: 6}, notsent_lowat: %d}\n"

// ofNetns are the options that plainSettings gives a socket of a container that is not intercepted.
const ofNetns = `[%[1]s.getsockopt(6, 13, 16).rstrip(b"\0").decode(), %[1]s.getsockopt(1, 8), %[1]s.getsockopt(1, 7), %[1]s.getsockopt(6, 4), %[1]s.getsockopt(6, 25)]`

// TestPlainContainer: a container that is not intercepted has of a profile, at both ends and to and
// from intercepted ones, what a network namespace can be given, is told what not, and has what it
// had before when the profile goes.
func TestPlainContainer(t *testing.T) {
	apply(t, "plain", fmt.Sprintf(plainSettings, 16384))
	label(t, "plain", "n2/c1")
	space := plainContainer(t, "plain")
	plain, other := lab.RunEntered(t, space), lab.StartPeer(t, "heddle", "n2/c1")
	port := lab.FreePort()
	for _, p := range []*lab.Peer{plain, other} {
		p.Must(`l = listen(6, "::", %d)`, port)
	}
	address := strings.Fields(lab.Shell(t, space, "ip -o -4 address show dev eth0"))[3]
	address, _, _ = strings.Cut(address, "/")
	for _, target := range []string{lab.OverlayOf("n2/c1")(t), lab.Overlay6Of("n2/c1")(t)} {
		plain.Must(`s = connect(%d, %q, %d)`, map[bool]int{true: 6, false: 4}[strings.Contains(target, ":")], target, port)
		other.Must(`c, _ = l.accept()`)
		for _, end := range []struct {
			*lab.Peer
			socket string
		}{{plain, "s"}, {other, "c"}} { // the same at the intercepted end: the differential
			end.Expect(`["reno", 120000, 100000, 61, 0]`, strings.Replace(ofNetns, "%[1]s.getsockopt(6, 25)", "0", 1), end.socket)
		}
		if out := lab.Shell(t, space, fmt.Sprintf("ss -tiOH sport = %d", plain.PortOf("s"))); !strings.Contains(out, " reno ") || !strings.Contains(out, " cwnd:33 ") {
			t.Errorf("want reno and a window of 33: %s", out)
		}
		plain.Must(`send(s, 1 << 20)`)
		other.Expect(plain.Must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
	}
	other.Must(`s = connect(4, %q, %d)`, address, port)
	plain.Must(`c, _ = l.accept()`)
	plain.Expect(`["reno", 120000, 100000]`, `[c.getsockopt(6, 13, 16).rstrip(b"\0").decode(), c.getsockopt(1, 8), c.getsockopt(1, 7)]`)
	if lowat := lab.Shell(t, space, "cat /proc/sys/net/ipv4/tcp_notsent_lowat"); lowat != "16384\n" {
		t.Errorf("tcp_notsent_lowat is %s", lowat)
	}
	if out := lab.Heddle(t, "stack"); !strings.Contains(out, "n1: plain is not intercepted, and has not mss: only sockets of intercepted programs") {
		t.Errorf("heddle stack: %s", out)
	}
	if out := lab.Heddle(t, "endpoints", "--node", "n1"); !strings.Contains(out, "kernel (plain, in part)") {
		t.Errorf("heddle endpoints: %s", out)
	}
	lab.Heddle(t, "stack", "delete", "plain")
	out := lab.Shell(t, space, "ip route; ip -6 route; cd /proc/sys/net/ipv4; cat tcp_rmem tcp_wmem tcp_keepalive_time tcp_keepalive_intvl tcp_keepalive_probes tcp_notsent_lowat")
	fresh := lab.Shell(t, space, "unshare --net sh -c 'cd /proc/sys/net/ipv4; cat tcp_rmem tcp_wmem tcp_keepalive_time tcp_keepalive_intvl tcp_keepalive_probes tcp_notsent_lowat'")
	if strings.Contains(out, "initcwnd") || strings.Contains(out, "congctl") || !strings.HasSuffix(out, fresh) {
		t.Errorf("the profile is gone, and of it is left:\n%s\na new network namespace has\n%s", out, fresh)
	}
}

// TestPlainContainerChanges: what the container's root sets stays his, also when the profile changes
// and when the agent is another, and is told; the rest of the profile, and other containers, follow.
func TestPlainContainerChanges(t *testing.T) {
	apply(t, "plain", fmt.Sprintf(plainSettings, 16384))
	space := plainContainer(t, "plain")
	label(t, "plain", "n1/c1")
	lab.Shell(t, space, `echo 4096 70000 70000 >/proc/sys/net/ipv4/tcp_rmem
ip route change $(ip route show default) congctl cubic`)
	check := func(when string, lowat int) {
		t.Helper()
		got := lab.Shell(t, space, "cat /proc/sys/net/ipv4/tcp_rmem /proc/sys/net/ipv4/tcp_notsent_lowat; ip route show default")
		if !strings.HasPrefix(got, fmt.Sprintf("4096\t70000\t70000\n%d\n", lowat)) || !strings.Contains(got, "congctl cubic") {
			t.Errorf("%s: %s", when, got)
		}
		out := lab.Heddle(t, "stack")
		for _, want := range []string{"has not receive_buffer: the container has ipv4/tcp_rmem 4096 70000 70000 of its own", "has not congestion: the container has congctl cubic of its own"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: heddle stack does not say %q:\n%s", when, want, out)
			}
		}
		other := lab.MustRun(t, "overlay", "n1/c1", "cat", "/proc/sys/net/ipv4/tcp_notsent_lowat")
		if other != fmt.Sprintf("%d\n", lowat) {
			t.Errorf("%s: another container has %s", when, other)
		}
	}
	apply(t, "plain", fmt.Sprintf(plainSettings, 8192))
	check("after a change of the profile", 8192)
	lab.EndAgent(t, "n1", 9)
	testutil.NoError(t, lab.Command("up"))
	check("with the next agent", 8192)
	apply(t, "plain", fmt.Sprintf(plainSettings, 4096))
	check("after its change", 4096)
	lab.Heddle(t, "stack", "delete", "plain")
	if got := lab.Shell(t, space, "cat /proc/sys/net/ipv4/tcp_rmem"); got != "4096\t70000\t70000\n" {
		t.Errorf("without the profile: %s", got)
	}
}

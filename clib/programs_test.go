package clib_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// waitTimeout is for one program; under load a test is slow. It is a guard against hangs alone.
const waitTimeout = 10 * time.Minute

// place is a mount and network namespace with a /dev of its own, in which programs find the library
// and the router's socket.
type place struct {
	t     *testing.T
	pid   int
	libs  string
	nodes string
}

// setUp makes a /dev, because the host's must not change, and names what programs look for in it.
const setUp = `set -e
mount -t tmpfs dev "$1"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom "$1"
mkdir "$1/shm" "$1/heddle-verbs" "$1/infiniband"
mknod "$1/infiniband/uverbs0" c 1 3
mount --bind "$2" "$1/heddle-verbs"
mount --move "$1" /dev
ip link set lo up
echo ready
exec cat`

func newPlace(t *testing.T, sockets string) *place {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: it makes namespaces")
	}
	p := &place{t: t, libs: t.TempDir(), nodes: t.TempDir()}
	path, err := filepath.Abs(library(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, filepath.Join(p.libs, "libibverbs.so.1")); err != nil {
		t.Fatal(err)
	}
	holder := exec.Command("unshare", "--mount", "--net", "sh", "-c", setUp, "sh", p.nodes, sockets)
	holder.Stderr = os.Stderr
	stdin, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := holder.Wait(); err != nil {
			t.Errorf("holder of the namespaces: %v", err)
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("set up namespaces: %q, %v", line, err)
	}
	p.pid = holder.Process.Pid
	return p
}

// command is a program in the place, which ends at the latest when its timeout says.
func (p *place) command(words ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(p.t.Context(), waitTimeout)
	p.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(p.pid), "-m", "-n", "--"}, words...)...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+p.libs, "LD_BIND_NOW=1")
	return cmd
}

// run gives what a program prints, and fails the test if the program does.
func (p *place) run(words ...string) string {
	p.t.Helper()
	out, err := p.command(words...).CombinedOutput()
	if err != nil {
		p.t.Fatalf("%v: %v\n%s", words, err, out)
	}
	return string(out)
}

// isListening looks for a listener on a TCP port.
func (p *place) isListening(port int) bool {
	for _, file := range []string{"tcp", "tcp6"} {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", p.pid, file))
		if err != nil {
			p.t.Fatal(err)
		}
		for line := range strings.Lines(string(raw)) {
			if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && f[3] == "0A" {
				return true
			}
		}
	}
	return false
}

// join connects the networks of two places: a has the address 10.9.0.1, b 10.9.0.2.
func join(t *testing.T, a, b *place) {
	t.Helper()
	a.run("ip", "link", "add", "p0", "type", "veth", "peer", "name", "p0", "netns", strconv.Itoa(b.pid))
	a.run("sh", "-c", "ip address add 10.9.0.1/24 dev p0 && ip link set p0 up")
	b.run("sh", "-c", "ip address add 10.9.0.2/24 dev p0 && ip link set p0 up")
}

// pair runs a server, and once it listens a client that is told its address.
func pair(t *testing.T, server, client *place, address string, port int, words ...string) {
	t.Helper()
	start := time.Now()
	var out bytes.Buffer
	s := server.command(words...)
	s.Stdout, s.Stderr = &out, &out
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Wait() }()
	for tick := time.NewTicker(5 * time.Millisecond); !server.isListening(port); {
		select {
		case err := <-ended:
			t.Fatalf("%v ended before it listened: %v\n%s", words, err, &out)
		case <-tick.C:
		}
	}
	c, err := client.command(append(words, address)...).CombinedOutput()
	if err != nil {
		s.Process.Kill()
		<-ended
		t.Fatalf("client %v: %v\n%s\nserver:\n%s", words, err, c, &out)
	}
	if err := <-ended; err != nil {
		t.Fatalf("server %v: %v\n%s\nclient:\n%s", words, err, &out, c)
	}
	t.Logf("%v: %v", words, time.Since(start).Round(time.Millisecond))
}

// Where servers listen, before they use RDMA: those of ibverbs-utils and perftest, and of UCX.
const (
	verbsPort = 18515
	ucxPort   = 13337
)

// programs are Debian's, from packages ibverbs-utils and perftest.
func programs() [][]string {
	var out [][]string
	for _, words := range []string{
		"ibv_rc_pingpong", "ibv_rc_pingpong -e", "ibv_uc_pingpong", "ibv_ud_pingpong -s 2048", "ibv_srq_pingpong -q 4", "ibv_srq_pingpong -q 4 -e", "ibv_rc_pingpong -t",
	} {
		out = append(out, append(strings.Fields(words), "-g", "0", "-n", "200"))
	}
	for _, words := range []string{
		"ib_send_bw -s 65536", "ib_send_lat -s 8", "ib_write_bw -s 65536", "ib_write_lat -s 8", "ib_read_bw -s 65536", "ib_read_lat -s 8", "ib_atomic_bw", "ib_atomic_lat",
		"ib_send_lat -e", "ib_send_bw -q 4", "ib_send_bw -c UD -s 2048", "ib_write_bw -c UC", "ib_send_bw -b", "ib_write_bw -s 4194304",
	} {
		out = append(out, append(strings.Fields(words), "-F", "-x", "0", "-n", "200"))
	}
	return out
}

// TestDebianPrograms: unmodified programs of Debian find the device, and move messages between two
// endpoints of a node, each in namespaces of its own, by heddle-rdma.
func TestDebianPrograms(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1}, [4]byte{10, 9, 0, 2})
	a, b := newPlace(t, dirs[0]), newPlace(t, dirs[1])
	join(t, a, b)
	if out := a.run("ibv_devices"); !strings.Contains(out, "heddle0") {
		t.Errorf("ibv_devices:\n%s", out)
	}
	info := b.run("ibv_devinfo", "-v")
	for _, want := range []string{"hca_id:\theddle0", "PORT_ACTIVE", "max_qp:", "::ffff:10.9.0.2, RoCE v2", "link_layer:\t\tEthernet"} {
		if !strings.Contains(info, want) {
			t.Errorf("ibv_devinfo -v has no %q:\n%s", want, info)
		}
	}
	for _, words := range programs() {
		t.Run(words[0], func(t *testing.T) { pair(t, a, b, "10.9.0.1", verbsPort, words...) })
	}
	for _, transport := range []string{"rc_verbs,ud_verbs", "ud_verbs"} {
		for _, test := range []string{"tag_lat -s 8", "tag_bw -s 65536", "ucp_put_lat -s 8", "ucp_get -s 8", "stream_bw -s 1024"} {
			words := append([]string{"env", "UCX_TLS=" + transport, "UCX_NET_DEVICES=heddle0:1", "ucx_perftest", "-n", "500", "-w", "10", "-t"}, strings.Fields(test)...)
			t.Run(transport, func(t *testing.T) { pair(t, a, b, "10.9.0.1", ucxPort, words...) })
		}
	}
}

package netcfg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// The topology of the tests with root:
//
//	c1, c2 (endpoints)          c3 (endpoint)
//	  |                           |
//	 n1 192.168.50.1 ------- 192.168.50.2 n2
//	  | 203.0.113.1
//	 ext 203.0.113.2: knows nothing of the overlay
const (
	testMark    = 0x51
	testTable   = 51
	testTimeout = 5 * time.Second
	// shortTimeout is for what must not arrive.
	shortTimeout = 300 * time.Millisecond
)

var (
	pool     = netip.MustParsePrefix("10.99.0.0/16")
	underlay = []netip.Addr{netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("192.168.50.2")}
	prefixes = []netip.Prefix{netip.MustParsePrefix("10.99.1.0/24"), netip.MustParsePrefix("10.99.2.0/24")}
	ext      = netip.MustParseAddr("203.0.113.2")
	c1, c2   = netip.MustParseAddr("10.99.1.2"), netip.MustParseAddr("10.99.1.3")
	c3       = netip.MustParseAddr("10.99.2.2")
)

var nsCount atomic.Int32

// newNetns makes a namespace for the test and gives its path.
func newNetns(t *testing.T) string {
	t.Helper()
	sweep.Do(func() { sweepNetns(t) })
	name := fmt.Sprintf("hdcfg-%d-%d", os.Getpid(), nsCount.Add(1))
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(name); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	path := netns.Path(name)
	// Link-local addresses would come and change in the dumps when the kernel likes.
	run(t, path, "sysctl -qw net.ipv6.conf.default.addr_gen_mode=1\nip link set lo up")
	return path
}

var sweep sync.Once

// sweepNetns deletes namespaces of test runs that were killed.
func sweepNetns(t *testing.T) {
	t.Helper()
	paths, err := filepath.Glob(netns.Path("hdcfg-*-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		name := filepath.Base(path)
		pid, _, _ := strings.Cut(strings.TrimPrefix(name, "hdcfg-"), "-")
		if _, err := os.Stat("/proc/" + pid); !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := netns.Delete(name); err != nil {
			t.Logf("left by a killed run: %v", err)
		}
	}
}

// run runs commands, one a line, in the namespace ns and gives their output.
func run(t *testing.T, ns, commands string) string {
	t.Helper()
	var out bytes.Buffer
	for line := range strings.Lines(commands) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := netns.Start(ns, cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, &out)
		}
	}
	return out.String()
}

// in runs fn in ns and fails the test on its error.
func in(t *testing.T, ns string, fn func() error) {
	t.Helper()
	if err := netns.Do(ns, fn); err != nil {
		t.Fatal(err)
	}
}

// mustFail runs fn in ns and checks that its error has all of words in it.
func mustFail(t *testing.T, ns string, fn func() error, words ...string) {
	t.Helper()
	err := netns.Do(ns, fn)
	if err == nil {
		t.Fatalf("no error; want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q: want %q in it", err, w)
		}
	}
}

// dumpCommands show everything this package may change.
const dumpCommands = `ip -o -d link show
ip -o -d addr show
ip -4 route show table all
ip -6 route show table all
ip -4 rule show
ip -6 rule show
ip neigh show nud permanent
bridge fdb show
nft -s list ruleset
tc qdisc show
`

// volatile are parts of the dumps that the kernel changes by itself: address lifetimes, whether the
// other end of a pair is up already, and what ip says when a namespace that it asks about,
// anybody's, has just gone.
var volatile = regexp.MustCompile(`(?m)^Error: Peer netns reference is invalid\.\n|valid_lft \S+|preferred_lft \S+|NO-CARRIER,|,LOWER_UP|,M-DOWN| linkdown| state \S+`)

func dumpState(t *testing.T, ns string) string {
	t.Helper()
	return volatile.ReplaceAllString(run(t, ns, dumpCommands), "")
}

// sameState fails if the dump of ns differs from want in more than the order of lines.
func sameState(t *testing.T, ns, when, want string) {
	t.Helper()
	sameLines(t, when, want, dumpState(t, ns))
}

// sameLines fails if got differs from want in more than the order of lines.
func sameLines(t *testing.T, when, want, got string) {
	t.Helper()
	count := map[string]int{}
	for line := range strings.Lines(got) {
		count[line]++
	}
	for line := range strings.Lines(want) {
		count[line]--
	}
	for line, n := range count {
		if n != 0 {
			t.Errorf("%s: %+d times: %s", when, n, line)
		}
	}
}

// topology is two nodes without anything of Heddle's, and the outside.
type topology struct {
	node [2]string // paths
	ext  string
	devs [2]NodeDevices
}

func newTopology(t *testing.T) *topology {
	t.Helper()
	testutil.NeedRoot(t, "makes network namespaces")
	top := &topology{node: [2]string{newNetns(t), newNetns(t)}, ext: newNetns(t)}
	name := func(path string) string { return strings.TrimPrefix(path, netns.Dir+"/") }
	run(t, top.node[0], fmt.Sprintf(`ip link add under0 type veth peer name under0 netns %s
ip link add out0 type veth peer name out0 netns %s
ip addr add 192.168.50.1/24 dev under0
ip addr add 203.0.113.1/24 dev out0
ip link set under0 up
ip link set out0 up
`, name(top.node[1]), name(top.ext)))
	run(t, top.node[1], "ip addr add 192.168.50.2/24 dev under0\nip link set under0 up")
	run(t, top.ext, "ip addr add 203.0.113.2/24 dev out0\nip link set out0 up")
	return top
}

func nodeConfig(i int) NodeConfig {
	return NodeConfig{
		Underlay: underlay[i], Prefixes: prefixes[i : i+1], Pool: []netip.Prefix{pool}, VNI: 42,
		Mark: testMark, OverlayMark: 0x52, DropMark: 0x53, RejectMark: 0x54, ServiceMark: 0x56, Table: testTable, RulePref: 51,
	}
}

func (top *topology) nodes() []model.Node {
	var out []model.Node
	for i := range top.node {
		out = append(out, model.Node{
			Name: fmt.Sprintf("n%d", i+1), Underlay: underlay[i], Prefixes: prefixes[i : i+1], VTEPMAC: vtepMAC(underlay[i]).String(),
		})
	}
	return out
}

// setup runs SetupNode and SetPeers on node i.
func (top *topology) setup(t *testing.T, i int) {
	t.Helper()
	in(t, top.node[i], func() (err error) {
		if top.devs[i], err = SetupNode(nodeConfig(i)); err != nil {
			return err
		}
		return setPeers(top.devs[i], fmt.Sprintf("n%d", i+1), top.nodes())
	})
}

// endpoint gives the configuration of an endpoint of node i in a new namespace.
func (top *topology) endpoint(t *testing.T, i int, id model.EndpointID, addr netip.Addr) EndpointConfig {
	t.Helper()
	return EndpointConfig{
		ID: id, Name: fmt.Sprintf("n%d/c%d", i+1, id), Addrs: []netip.Addr{addr}, Gateways: gateways(prefixes[i : i+1]),
		NetnsPath: newNetns(t), Table: testTable,
	}
}

func (top *topology) add(t *testing.T, i int, cfg EndpointConfig) (dev EndpointDevice) {
	t.Helper()
	in(t, top.node[i], func() (err error) {
		dev, err = AddEndpoint(cfg)
		return err
	})
	return dev
}

// dialFrom connects from ns to addr; control may prepare the socket.
func dialFrom(ns, network string, addr netip.AddrPort, local net.Addr, control func(string, string, syscall.RawConn) error) (conn net.Conn, err error) {
	err = netns.Do(ns, func() error {
		d := net.Dialer{Timeout: testTimeout, LocalAddr: local, Control: control}
		conn, err = d.Dial(network, addr.String())
		return err
	})
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(testTimeout))
	}
	return conn, err
}

// serve starts a server in ns that answers each connection or datagram with the peer's address.
func serve(t *testing.T, ns string, at netip.Addr, control func(string, string, syscall.RawConn) error) (tcp, udp netip.AddrPort) {
	t.Helper()
	in(t, ns, func() error {
		lc := net.ListenConfig{Control: control}
		l, err := lc.Listen(context.Background(), "tcp", netip.AddrPortFrom(at, 0).String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		tcp = netip.MustParseAddrPort(l.Addr().String())
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				io.WriteString(c, netip.MustParseAddrPort(c.RemoteAddr().String()).Addr().String())
				c.Close()
			}
		}()
		if control != nil {
			return nil
		}
		p, err := net.ListenPacket("udp", netip.AddrPortFrom(at, 0).String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { p.Close() })
		udp = netip.MustParseAddrPort(p.LocalAddr().String())
		go func() {
			b := make([]byte, 64)
			for {
				_, from, err := p.ReadFrom(b)
				if err != nil {
					return
				}
				p.WriteTo([]byte(netip.MustParseAddrPort(from.String()).Addr().String()), from)
			}
		}()
		return nil
	})
	return tcp, udp
}

// transparent makes a socket as the agent makes them for intercepted containers: it may hold an
// address that is not the node's, and its packets bear the mark.
func transparent(_, _ string, c syscall.RawConn) error {
	var err error
	controlErr := c.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, testMark))
	})
	return errors.Join(err, controlErr)
}

// seenAs connects from ns to addr and gives the address under which the server sees it.
func seenAs(ns, network string, addr netip.AddrPort, local net.Addr, control func(string, string, syscall.RawConn) error) (string, error) {
	c, err := dialFrom(ns, network, addr, local, control)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if network == "udp" {
		b := make([]byte, 64)
		for deadline := time.Now().Add(testTimeout); ; { // more than once, as pingWithin
			c.SetDeadline(time.Now().Add(testTimeout / 10))
			if _, err := c.Write([]byte("who am I")); err != nil {
				return "", err
			}
			n, err := c.Read(b)
			if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(deadline) {
				return string(b[:n]), err
			}
		}
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// ping sends an ICMP echo request from ns and waits for the answer.
func ping(ns string, to netip.Addr) error { return pingWithin(ns, to, testTimeout) }

func pingWithin(ns string, to netip.Addr, timeout time.Duration) error {
	var c *net.IPConn
	network, echo, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, echo, reply = "ip6:ipv6-icmp", 128, 129 // the kernel sets the checksum
	}
	err := netns.Do(ns, func() (err error) {
		c, err = net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	// Echo request, id 0x4844, sequence 1, and the checksum of these.
	request := []byte{echo, 0, 0, 0, 0x48, 0x44, 0, 1}
	sum := ^uint16(0x0800 + 0x4844 + 1)
	request[2], request[3] = byte(sum>>8), byte(sum)
	// More than once: a device that has just come up drops what is sent before the kernel has
	// noticed its carrier.
	deadline, next := time.Now().Add(timeout), time.Time{}
	b := make([]byte, 128)
	for {
		if now := time.Now(); now.After(next) {
			next = now.Add(timeout / 10)
			c.SetDeadline(next)
			if _, err := c.Write(request); err != nil {
				return err
			}
		}
		n, _, err := c.ReadFrom(b) // without the IP header, unlike Read
		if errors.Is(err, os.ErrDeadlineExceeded) && next.Before(deadline) {
			continue
		}
		if err != nil {
			return err
		}
		if n >= 6 && b[0] == reply && b[4] == 0x48 && b[5] == 0x44 {
			return nil
		}
	}
}

// teardown is Teardown for in.
func teardown() error {
	_, err := Teardown()
	return err
}

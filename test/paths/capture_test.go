package paths

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
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
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// transferServer takes one connection, reads it to its end, answers and closes. Arguments:
// listening address, port, bytes to answer.
const transferServer = `
import socket, sys
host, port, put = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
l = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind((host, port))
l.listen(8)
print("listening", flush=True)
c, _ = l.accept()
while c.recv(1 << 16): pass
c.sendall(bytes(i * 7 % 251 for i in range(put)))
c.close()
print("done", flush=True)
`

// transferClient sends, reads the answer to its end, and prints the addresses it saw. Arguments:
// address to bind or "", address to dial, port, bytes to send, what to wait for on standard input
// before it sends, if any.
const transferClient = `
import socket, sys
bind, host, port, put, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
if bind: s.bind((bind, 0))
s.connect((host, port))
f = "[%s]:%d" if ":" in host else "%s:%d"
print("names", f % s.getsockname()[:2], f % s.getpeername()[:2], flush=True)
if wait: sys.stdin.readline()
s.sendall(bytes(i * 5 % 251 for i in range(put)))
s.shutdown(socket.SHUT_WR)
while s.recv(1 << 16): pass
s.close()
`

// Lengths of what a transfer carries: enough for several segments.
const transferSent, transferAnswered = 100_000, 50_000

// transfer is one connection with known content.
type transfer struct {
	name, client, server string
	listen, bind, dial   string // dial "" is the server's overlay address; "6" its IPv6 one. bind "own" and "own6", listen "own6": the container's
	port                 string
	// clientMode and serverMode are "heddle" if empty.
	clientMode, serverMode string
	// hold, if set, is called while the connection is open and has carried nothing.
	hold func()
	// peers carry it out; nil: new ones.
	peers *peerSet
}

// run makes the connection and gives the addresses that the client saw.
func (x transfer) run(t *testing.T) (local, remote netip.AddrPort) {
	t.Helper()
	x.clientMode, x.serverMode = cmp.Or(x.clientMode, "heddle"), cmp.Or(x.serverMode, "heddle")
	if x.dial == "" {
		x.dial = lab.Address(t, x.serverMode, x.server)
	}
	if x.dial == "6" {
		x.dial = lab.Address6(t, x.serverMode, x.server).String()
	}
	switch x.bind {
	case "own":
		x.bind = lab.Address(t, "heddle", x.client)
	case "own6":
		x.bind = lab.Overlay6(t, x.client)
	}
	if x.listen == "own6" {
		x.listen = lab.Overlay6(t, x.server)
	}
	if x.peers == nil {
		x.peers = &peerSet{t: t}
	}
	server, client := x.peers.get(t, "server", x.serverMode, x.server), x.peers.get(t, "client", x.clientMode, x.client)
	server.Must("l = socket.socket(AF[%d])\nl.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\nl.bind((%q, %s))\nl.listen(8)",
		familyOf(x.listen), x.listen, x.port)
	client.Must("s = socket.socket(AF[%d])", familyOf(x.dial))
	if x.bind != "" {
		client.Must("s.bind((%q, 0))", x.bind)
	}
	client.Must("s.connect((%q, %s))", x.dial, x.port)
	raw := client.Must("[list(a[:2]) for a in (s.getsockname(), s.getpeername())]")
	if x.hold != nil {
		x.hold()
	}
	sending := fmt.Sprintf("s.sendall(bytes(i * 5 %% 251 for i in range(%d)))\ns.shutdown(socket.SHUT_WR)", transferSent)
	client.Begin(sending)
	server.Must("c, _ = l.accept()\nwhile c.recv(1 << 16): pass\nc.sendall(bytes(i * 7 %% 251 for i in range(%d)))\nc.close()\nl.close()",
		transferAnswered)
	client.Reply(sending)
	client.Must("while s.recv(1 << 16): pass\ns.close()")
	return peerNames(t, raw)
}

func familyOf(addr string) int {
	if strings.Contains(addr, ":") {
		return 6
	}
	return 4
}

// peerNames reads the two addresses [HOST, PORT] that a peer answered with.
func peerNames(t *testing.T, raw string) (local, remote netip.AddrPort) {
	t.Helper()
	var names [2][2]any
	if err := json.Unmarshal([]byte(raw), &names); err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	at := func(n [2]any) netip.AddrPort {
		return netip.MustParseAddrPort(net.JoinHostPort(fmt.Sprint(n[0]), fmt.Sprint(n[1])))
	}
	return at(names[0]), at(names[1])
}

// peerSet starts peers when they are first asked for, one for each role.
type peerSet struct {
	t   testing.TB
	all map[string]*lab.Peer
}

// get gives the peer of a role in a container to the subtest t.
func (s *peerSet) get(t testing.TB, role, mode, container string) *lab.Peer {
	t.Helper()
	key := role + " " + mode + " " + container
	if s.all[key] == nil {
		if s.all == nil {
			s.all = make(map[string]*lab.Peer)
		}
		s.all[key] = lab.StartPeer(s.t, mode, container)
	}
	return s.all[key].In(t)
}

func seenNames(t *testing.T, out string) (local, remote netip.AddrPort) {
	t.Helper()
	words := strings.Fields(out)
	if len(words) != 3 || words[0] != "names" {
		t.Fatalf("the client printed %q", out)
	}
	return netip.MustParseAddrPort(words[1]), netip.MustParseAddrPort(words[2])
}

// capturing is a `heddle capture` that runs.
type capturing struct {
	*lab.Program
}

// startCapture starts one and waits until packets are kept for it.
func startCapture(t *testing.T, stdout io.Writer, container string, args ...string) *capturing {
	t.Helper()
	cmd := exec.Command(lab.Bin, append([]string{"capture", container, "--lab", lab.Name}, args...)...)
	cmd.Stdout = stdout
	c := &capturing{lab.StartCommand(t, "heddle capture", cmd)}
	c.WaitFor("capturing ")
	return c
}

// interrupt ends the capture as a user does, and gives what it counted.
func (c *capturing) interrupt(t *testing.T) (captured, dropped int) {
	t.Helper()
	testutil.NoError(t, c.Cmd.Process.Signal(syscall.SIGINT))
	c.finished(t)
	return c.counts(t)
}

// finished waits for the capture's end, which must be in good order.
func (c *capturing) finished(t *testing.T) {
	t.Helper()
	if c.WaitEnd(); !c.Cmd.ProcessState.Success() {
		t.Fatalf("capture: %s\n%s", c.Cmd.ProcessState, c.Output())
	}
}

func (c *capturing) counts(t *testing.T) (captured, dropped int) {
	t.Helper()
	m := regexp.MustCompile(`(\d+) packets captured, (\d+) dropped by the kernel, \d+ unmatched, 0 malformed`).FindStringSubmatch(c.Output())
	if m == nil {
		t.Fatalf("the capture printed %s", c.Output())
	}
	_, _ = fmt.Sscan(m[1], &captured)
	_, _ = fmt.Sscan(m[2], &dropped)
	return captured, dropped
}

// captured is what a file holds of one direction of a connection.
type captured struct {
	syn, synAck, fin bool
	first            uint32 // sequence number of the first byte
	payload          map[uint32]byte
	packets          int
}

// content gives the payload in order.
func (c *captured) content() []byte {
	out := make([]byte, len(c.payload))
	for at, b := range c.payload {
		if at >= uint32(len(out)) {
			return nil // a hole
		}
		out[at] = b
	}
	return out
}

type direction struct{ src, dst netip.AddrPort }

// readCapture reads a file's directions.
func readCapture(t *testing.T, path string) map[direction]*captured {
	t.Helper()
	f, err := os.Open(path)
	testutil.NoError(t, err)
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	testutil.NoError(t, err)
	out := map[direction]*captured{}
	for {
		raw, _, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return out
		}
		testutil.NoError(t, err)
		d, tcp := tcpOf(t, raw)
		c := out[d]
		if c == nil {
			c = &captured{payload: map[uint32]byte{}}
			out[d] = c
		}
		c.packets++
		if tcp.SYN {
			c.first = tcp.Seq + 1
			c.syn, c.synAck = c.syn || !tcp.ACK, c.synAck || tcp.ACK
		}
		c.fin = c.fin || tcp.FIN
		for i, b := range tcp.Payload {
			c.payload[tcp.Seq-c.first+uint32(i)] = b
		}
	}
}

func tcpOf(t *testing.T, raw []byte) (direction, *layers.TCP) {
	t.Helper()
	first := gopacket.LayerType(layers.LayerTypeIPv4)
	if raw[0]>>4 == 6 {
		first = layers.LayerTypeIPv6
	}
	p := gopacket.NewPacket(raw, first, gopacket.Default)
	tcp, ok := p.Layer(layers.LayerTypeTCP).(*layers.TCP)
	if !ok {
		t.Fatalf("no TCP packet: %s", p)
	}
	flow := p.NetworkLayer().NetworkFlow()
	end := func(e gopacket.Endpoint, port layers.TCPPort) netip.AddrPort {
		a, _ := netip.AddrFromSlice(e.Raw())
		return netip.AddrPortFrom(a, uint16(port))
	}
	return direction{end(flow.Src(), tcp.SrcPort), end(flow.Dst(), tcp.DstPort)}, tcp
}

func counted(n, factor int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * factor % 251)
	}
	return b
}

// TestCapture: on every path the file shows one connection as its program saw it, whole, and
// nothing else.
func TestCapture(t *testing.T) {
	peers := &peerSet{t: t}
	for i, x := range []transfer{
		{name: "direct", client: "n1/c1", server: "n2/c1", listen: "0.0.0.0"},
		{name: "direct, accepted", client: "n2/c1", server: "n1/c1", listen: "::"},
		{name: "same node", client: "n1/c1", server: "n1/c2", listen: "0.0.0.0"},
		{name: "same node, accepted", client: "n1/c2", server: "n1/c1", listen: "0.0.0.0"},
		{name: "loopback", client: "n1/c1", server: "n1/c1", listen: "127.0.0.1", dial: "127.0.0.1"},
		{name: "loopback to wildcard", client: "n1/c1", server: "n1/c1", listen: "0.0.0.0", dial: "127.0.0.1"},
		{name: "IPv6 loopback", client: "n1/c1", server: "n1/c1", listen: "::1", dial: "::1"},
		{name: "own address", client: "n1/c1", server: "n1/c1", listen: "0.0.0.0"},
		{name: "overlay", client: "n1/c1", server: "n2/c1", listen: "0.0.0.0", bind: "own"},
		{name: "overlay, accepted", client: "n2/c1", clientMode: "overlay", server: "n1/c1", listen: "0.0.0.0"},
		{name: "same node, peer plain", client: "n1/c1", server: "n1/c2", serverMode: "overlay", listen: "0.0.0.0"},
		{name: "relayed", client: "n2/c1", server: "n1/c1", serverMode: "overlay", listen: "0.0.0.0"},
		{name: "plain", client: "n1/c1", clientMode: "overlay", server: "n2/c1", serverMode: "overlay", listen: "0.0.0.0"},
		{name: "node's process", client: "n1/c1", clientMode: "host", server: "n1/c1", listen: "0.0.0.0"},
		{name: "to the node", client: "n1/c1", server: "n1/c1", serverMode: "host", listen: "0.0.0.0"},
		{name: "outside", client: "n1/c1", server: "n2/c1", serverMode: "host", listen: "0.0.0.0"},
		{name: "IPv6, direct", client: "n1/c1", server: "n2/c1", listen: "::", dial: "6"},
		{name: "IPv6, direct, accepted", client: "n2/c1", server: "n1/c1", listen: "::", dial: "6"},
		{name: "IPv6, direct, accepted at its address", client: "n2/c1", server: "n1/c1", listen: "own6", dial: "6"},
		{name: "IPv6, same node", client: "n1/c1", server: "n1/c2", listen: "::", dial: "6"},
		{name: "IPv6, same node, accepted", client: "n1/c2", server: "n1/c1", listen: "own6", dial: "6"},
		{name: "IPv6 loopback to wildcard", client: "n1/c1", server: "n1/c1", listen: "::", dial: "::1"},
		{name: "IPv6, own address", client: "n1/c1", server: "n1/c1", listen: "::", dial: "6"},
		{name: "IPv6, own address, listening there", client: "n1/c1", server: "n1/c1", listen: "own6", dial: "6"},
		{name: "IPv6, overlay", client: "n1/c1", server: "n2/c1", listen: "::", bind: "own6", dial: "6"},
		{name: "IPv6, overlay, accepted", client: "n2/c1", clientMode: "overlay", server: "n1/c1", listen: "::", dial: "6"},
		{name: "IPv6, same node, peer plain", client: "n1/c1", server: "n1/c2", serverMode: "overlay", listen: "::", dial: "6"},
		{name: "IPv6, relayed", client: "n2/c1", server: "n1/c1", serverMode: "overlay", listen: "::", dial: "6"},
		{name: "IPv6, own address, peer plain", client: "n1/c1", server: "n1/c1", serverMode: "overlay", listen: "::", dial: "6"},
		{name: "IPv6 loopback, peer plain", client: "n1/c1", server: "n1/c1", serverMode: "overlay", listen: "::1", dial: "::1"},
		{name: "IPv6, plain", client: "n1/c1", clientMode: "overlay", server: "n2/c1", serverMode: "overlay", listen: "::", dial: "6"},
		{name: "IPv6, node's process", client: "n1/c1", clientMode: "host", server: "n1/c1", listen: "::", dial: "6"},
		{name: "IPv6, to the node", client: "n1/c1", server: "n1/c1", serverMode: "host", listen: "::", dial: "6"},
	} {
		t.Run(x.name, func(t *testing.T) {
			x.port = fmt.Sprint(23000 + i)
			file := filepath.Join(t.TempDir(), "c1.pcap")
			c := startCapture(t, nil, "n1/c1", "-w", file)
			transfer{client: "n1/c2", server: "n2/c2", listen: "0.0.0.0", port: "23100", peers: peers}.run(t) // not to be seen
			x.peers = peers
			// What only the agent knows (outside) is asked while the connection lives.
			x.hold = func() {
				const fileHeader = 24
				testutil.Eventually(t, "the handshake to be in the file", func() (bool, string) {
					info, err := os.Stat(file)
					return err == nil && info.Size() > fileHeader, fmt.Sprint(err)
				})
			}
			local, remote := x.run(t)
			total, dropped := c.interrupt(t)
			if dropped != 0 {
				t.Errorf("the kernel dropped %d packets", dropped)
			}
			checkTransfer(t, file, local, remote, total)
			checkByTcpdump(t, file, local, remote, total)
		})
	}
}

// checkTransfer reads the file and demands one whole connection between these addresses.
func checkTransfer(t *testing.T, file string, local, remote netip.AddrPort, total int) {
	t.Helper()
	got := readCapture(t, file)
	out, in := got[direction{local, remote}], got[direction{remote, local}]
	if out == nil || in == nil || len(got) != 2 {
		t.Fatalf("the program saw %s to %s; the file has %d directions: %v", local, remote, len(got), got)
	}
	if !out.syn || !in.synAck || !out.fin || !in.fin {
		t.Errorf("handshake or FIN is missing: SYN %v, SYN-ACK %v, FIN %v and %v", out.syn, in.synAck, out.fin, in.fin)
	}
	if !bytes.Equal(out.content(), counted(transferSent, 5)) || !bytes.Equal(in.content(), counted(transferAnswered, 7)) {
		t.Errorf("payload: %d bytes out, %d in, or others than were sent", len(out.payload), len(in.payload))
	}
	if n := out.packets + in.packets; n != total {
		t.Errorf("%d packets in the file, %d counted", n, total)
	}
}

// checkByTcpdump demands that tcpdump reads the file, and finds the addresses and every checksum
// right.
func checkByTcpdump(t *testing.T, file string, local, remote netip.AddrPort, total int) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "tcpdump", "-nn", "-v", "-r", file).CombinedOutput()
	if err != nil {
		t.Fatalf("tcpdump: %v\n%s", err, out)
	}
	text := string(out)
	if n := strings.Count(text, "(correct)"); n != total || strings.Contains(text, "incorrect") || strings.Contains(text, "bad cksum") {
		t.Errorf("%d right checksums of %d\n%s", n, total, text)
	}
	name := func(a netip.AddrPort) string { return fmt.Sprintf("%s.%d", a.Addr(), a.Port()) }
	if syn := name(local) + " > " + name(remote) + ": Flags [S],"; strings.Count(text, syn) != 1 {
		t.Errorf("tcpdump does not show %q once\n%s", syn, text)
	}
	if strings.Contains(text, "unknown-253") || strings.Contains(text, "exp-") {
		t.Errorf("the SYN shows Heddle's option\n%s", text)
	}
}

// TestCaptureLive: what a connection has carried can be read while it goes on, also one that is
// older than the capture, and a capture may end by itself.
func TestCaptureLive(t *testing.T) {
	server := lab.Start(t, "heddle", "n2/c1", "python3", "-c", transferServer, "0.0.0.0", "23200", "10")
	server.WaitFor("listening")
	client := lab.Start(t, "heddle", "n1/c1", "python3", "-c", transferClient, "", lab.Address(t, "heddle", "n2/c1"), "23200", "10", "wait")
	client.WaitFor("names")
	local, remote := seenNames(t, client.Output())
	read, write, err := os.Pipe()
	testutil.NoError(t, err)
	defer read.Close()
	c := startCapture(t, write, "n1/c1", "--count", "2", "--port", "23200", "--peer", remote.Addr().String())
	write.Close()
	if _, err := client.Stdin.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	testutil.NoError(t, read.SetReadDeadline(time.Now().Add(testutil.WaitTimeout)))
	r, err := pcapgo.NewReader(read)
	testutil.NoError(t, err)
	for range 2 {
		raw, _, err := r.ReadPacketData()
		testutil.NoError(t, err)
		if d, _ := tcpOf(t, raw); d != (direction{local, remote}) && d != (direction{remote, local}) {
			t.Errorf("%v, want %s and %s", d, local, remote)
		}
	}
	c.finished(t)
	if n, _ := c.counts(t); n != 2 {
		t.Errorf("%d packets counted, want 2", n)
	}
}

// TestCaptureAll: with --all the file has what is no TCP, each packet once.
func TestCaptureAll(t *testing.T) { captureEchoes(t) }

// captureEchoes wants two echoes to another node and their answers in a capture, each once.
func captureEchoes(t *testing.T) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "all.pcap")
	c := startCapture(t, nil, "n1/c1", "--all", "-w", file)
	lab.MustRun(t, "heddle", "n1/c1", "ping", "-c", "2", "-i", "0.2", lab.Address(t, "heddle", "n2/c1"))
	c.interrupt(t)
	out, err := exec.CommandContext(t.Context(), "tcpdump", "-nn", "-r", file, "icmp").CombinedOutput()
	if err != nil {
		t.Fatalf("tcpdump: %v\n%s", err, out)
	}
	for _, kind := range []string{"echo request", "echo reply"} {
		if n := strings.Count(string(out), kind); n != 2 {
			t.Errorf("%d of %q, want 2\n%s", n, kind, out)
		}
	}
}

// TestCaptureKeepsOption: --keep-option shows the SYN as it was on the wire.
func TestCaptureKeepsOption(t *testing.T) {
	file := filepath.Join(t.TempDir(), "option.pcap")
	c := startCapture(t, nil, "n1/c1", "--keep-option", "-w", file)
	_, remote := transfer{client: "n1/c1", server: "n2/c1", listen: "0.0.0.0", port: "23300"}.run(t)
	c.interrupt(t)
	raw, err := os.ReadFile(file)
	testutil.NoError(t, err)
	option := []byte{253, 16, 0x48, 0x64}
	dst := binary.BigEndian.AppendUint16(nil, remote.Port())
	at := bytes.Index(raw, option)
	if at < 0 || !bytes.Equal(raw[at+6:at+8], dst) || bytes.Count(raw, option) != 1 {
		t.Errorf("the option to port %d is not once in the file", remote.Port())
	}
}

// TestCaptureRefuses: what cannot be captured is refused, and leaves no file.
func TestCaptureRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "none.pcap")
	for _, args := range [][]string{{"n1/c9"}, {"10.244.255.254"}, {"n1/c1", "--peer", "n2"}, {"n1/c1", "--snaplen", "0"}, {"n1/c1", "--duration", "-1s"}} {
		out, err := exec.CommandContext(t.Context(), lab.Bin, append([]string{"capture", "--lab", lab.Name, "-w", file}, args...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), args[len(args)-1]) {
			t.Errorf("%v: %v, %s", args, err, out)
		}
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made: %v", err)
	}
}

package attack

import (
	"encoding/hex"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"find the underlay in what the kernel answers", model.ProtectSocketOptions, "n1", findUnderlay},
		attack{"ask what a translated connection was made to", model.ProtectSocketOptions, "n1", askOriginal},
		attack{"ask for the node's address of a connection to the outside", model.ProtectSocketOptions, "n1", askOwnOutside},
		attack{"ask for multicast filters at the node's addresses and devices", model.ProtectSocketOptions, "n1", askFilters},
	)
}

// echoBytes answers each byte on any number of connections.
const echoBytes = `
import socket, sys, threading
s = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=100)
print("ready", flush=True)
def echo(c):
    with c:
        while b := c.recv(100): c.sendall(b)
while True: threading.Thread(target=echo, args=(s.accept()[0],), daemon=True).start()
`

// underlayDevice gives the hardware address of the device that a node reaches another one by.
func underlayDevice(t *testing.T, node, other string) (mac []byte) {
	t.Helper()
	script := "cat /sys/class/net/$(ip -o route get " + other + " | sed 's/.* dev \\([^ ]*\\).*/\\1/')/address"
	out, err := exec.Command("ip", "netns", "exec", lab.Name+"-"+node, "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("hardware address of %s: %v\n%s", node, err, out)
	}
	if mac, err = hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(out)), ":", "")); err != nil {
		t.Fatal(err)
	}
	return mac
}

// findUnderlay reads every option of every level, the error queue and control messages, and
// searches the program's memory for addresses of the underlay and for names of the node's devices.
func findUnderlay(t *testing.T) string {
	program, port := lab.CompileC(t, "testdata/options.c"), strconv.Itoa(lab.FreePort())
	lab.Start(t, "heddle", "n2/c1", lab.Python, "-c", echoBytes, port).WaitFor("ready")
	n1, n2 := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	out := lab.MustRun(t, "heddle", "n1/c1", program, lab.Address(t, "heddle", "n2/c1"), port,
		netip4(t, n1), netip4(t, n2), hex.EncodeToString(underlayDevice(t, "n1", n2)), hex.EncodeToString([]byte("heddle-")))
	finds, whole := strings.CutSuffix(out, "done\n")
	if !whole || strings.Contains(out, "no timestamps") {
		t.Fatalf("options printed\n%s", out)
	}
	return finds
}

// askOriginal has a connection that the node translates come to the container, and asks for the
// address that it was made to: the node's.
func askOriginal(t *testing.T) string {
	server, client, inner, outer := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "host", "n2/c1"), lab.FreePort(), lab.FreePort()
	own, n1 := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "host", "n1/c1")
	lab.TranslateTo(t, "n1", map[int]string{outer: fmt.Sprintf("%s:%d", own, inner)}, nil)
	server.Must(`l = listen(4, "0.0.0.0", %d)`, inner)
	client.Must(`s = connect(4, %q, %d)`, n1, outer)
	server.Must(`c = l.accept()[0]`)
	server.Must(`import ctypes`)
	server.Must(`room, length = ctypes.create_string_buffer(16), ctypes.c_uint32(16)`)
	server.Must(`said = ctypes.CDLL(None).getsockopt(c.fileno(), 0, 80, room, ctypes.byref(length))`)
	address := func(ip string, port int) string { return fmt.Sprintf("\"0200%04x%s\"", port, netip4(t, ip)) }
	return gained(t, "the connection was made to", server.Must(`room.raw[:8].hex()`), address(own, inner), address(n1, outer))
}

// askOwnOutside connects to the outside by IPv6 and asks for the address that the answers come to:
// the node's.
func askOwnOutside(t *testing.T) string {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartOutside(t), lab.FreePort()
	server.Must(`l = listen(6, "::", %d)`, port)
	client.Must(`s = tcp(6)`)
	client.Must(`[s.setsockopt(41, o, 1) for o in (74, 11)] and None`) // IPV6_RECVORIGDSTADDR, IPV6_FLOWINFO
	client.Expect(`[1, 1]`, `[s.getsockopt(41, o) for o in (74, 11)]`)
	client.Must(`s.connect((%q, %d))`, lab.Outside6(t).String(), port)
	server.Must(`c, who = l.accept()`)
	server.Must(`c.send(b"x")`)
	client.Must(`s.recv(1)`)
	node := server.Must(`socket.inet_pton(socket.AF_INET6, who[0]).hex()`)
	told := client.Must(`s.getsockopt(41, 6, 512).hex()`) // IPV6_2292PKTOPTIONS
	return gained(t, "the node's address was told", fmt.Sprint(strings.Contains(told, strings.Trim(node, `"`))), "false", "true")
}

// filterScript asks for multicast filters.
const filterScript = `
import ctypes
def ask_filter(s, level, name, raw):
    room, length = ctypes.create_string_buffer(raw), ctypes.c_uint32(len(raw))
    libc = ctypes.CDLL(None, use_errno=True)
    said = libc.getsockopt(s.fileno(), level, name, room, ctypes.byref(length)) and ctypes.get_errno()
    return [errno.errorcode.get(said, said), error_of(s.setsockopt, level, name, raw)]

def filters_of(addr):
    """What IP_MSFILTER says of one with addr for its device."""
    return ask_filter(tcp(), 0, 41, socket.inet_aton("224.1.2.3") + socket.inet_aton(addr) + struct.pack("II", 1, 0))

def filters_at(index):
    """What MCAST_MSFILTER says of a device, for both families."""
    four = struct.pack("HH", socket.AF_INET, 0) + socket.inet_aton("224.1.2.3")
    six = struct.pack("HHI", socket.AF_INET6, 0, 0) + socket.inet_pton(socket.AF_INET6, "ff02::1234") + bytes(4)
    whole = lambda group: struct.pack("Q", index) + group.ljust(128, bytes(1)) + struct.pack("II", 1, 0)
    return ask_filter(tcp(), 0, 48, whole(four)) + ask_filter(tcp(6), 41, 48, whole(six))
`

// askFilters compares what is said of the node's addresses and devices with what is said of those
// of nobody.
func askFilters(t *testing.T) string {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must("%s", filterScript)
	addresses := p.Must(`filters_of(%q) != filters_of("203.0.113.99")`, lab.Address(t, "host", "n1/c1"))
	devices := p.Must(`any(filters_at(i) != filters_at(1 << 20) for i in range(3, 100))`)
	return gained(t, "addresses and devices are told", addresses+devices, "falsefalse", "truetrue")
}

package attack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"bind a port that cannot be counted", model.ProtectPortQuota, "n1", bindUncounted},
		attack{"listen at a port that cannot be counted", model.ProtectPortQuota, "n1", listenUncounted},
	)
}

// fullScript is Python that fills a socket's option memory: completions of MSG_ZEROCOPY that nobody
// reads, each kept from becoming one with the last by a timestamp between them.
const fullScript = `
def full():
    l = listen(4, "127.0.0.1", 0)
    s = tcp(4)
    for level, name, value in (1, 8, 1 << 22), (1, 60, 1), (6, 1, 1), (1, 37, 1 << 9 | 1 << 4 | 1 << 11):  # SO_RCVBUF, SO_ZEROCOPY, TCP_NODELAY, SO_TIMESTAMPING
        s.setsockopt(level, name, value)
    s.connect(l.getsockname())
    a, said = l.accept()[0], "ok"
    l.close()
    for _ in range(100000):
        said = error_of(s.send, b"x", 0x4000000)
        if said != "ok":
            break
        a.recv(1)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER)
    a.close()
    error_of(s.recv, 1)
    return s, said

def undone(s):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.connect(s.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16)
`

// fullSocket has a container's program fill the option memory of a socket, which then is as new but
// for that, and called s there. The node's limit is lowered by what is left over, less than one
// completion takes: it depends on the kernel's sizes.
func fullSocket(t *testing.T) *lab.Peer {
	t.Helper()
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must("exec(%s)", lab.JSON(t, fullScript))
	p.Must(`s, said = full()`)
	p.Expect(`"ENOBUFS"`, `said`)
	p.Expect(`0`, `undone(s)`)
	lowerOptmem(t, "n1")
	return p
}

// lowerOptmem takes 1,000 from a node's limit of option memory until the end of the test.
func lowerOptmem(t *testing.T, node string) {
	t.Helper()
	const path = "/proc/sys/net/core/optmem_max"
	setting := func(value string) string {
		t.Helper()
		return strings.TrimSpace(lab.InNode(t, node, "sh", "-c", "cat "+path+"; "+value))
	}
	if lab.InNode(t, node, "sh", "-c", "test -e "+path+" && echo there || true") == "" {
		t.Skipf("no %s in a network namespace: this kernel has one limit for all (Linux 6.8 has one for each)", path)
	}
	before := setting("")
	n, err := strconv.Atoi(before)
	testutil.NoError(t, err)
	t.Cleanup(func() { setting(fmt.Sprintf("echo %s >%s", before, path)) })
	setting(fmt.Sprintf("echo %d >%s", n-1000, path))
}

func bindUncounted(t *testing.T) string {
	p, before := fullSocket(t), lab.Counters(t, "n1")["refuse_no_storage"]
	said := p.Do(`error_of(s.bind, ("0.0.0.0", 0))`)
	if n := portsOf(t, "n1/c1"); said == `"ok"` && n != 0 {
		t.Errorf("the port is counted: %d", n)
	}
	if n := lab.Counters(t, "n1")["refuse_no_storage"] - before; said != `"ok"` && n != 1 {
		t.Errorf("refuse_no_storage rose by %d, want 1", n)
	}
	return gained(t, "a port that nobody counts", said, `"ENOBUFS"`, `"ok"`)
}

func listenUncounted(t *testing.T) string {
	p, before := fullSocket(t), lab.Counters(t, "n1")["cut_port_quota"]
	p.Must(`s.listen()`)
	p.Must(`p = select.poll()`)
	p.Must(`p.register(s, 0)`) // POLLHUP, once it is ended
	said := p.Must(`len(p.poll(3000))`)
	if n := lab.Counters(t, "n1")["cut_port_quota"] - before; said == "1" && n != 1 {
		t.Errorf("cut_port_quota rose by %d, want 1", n)
	}
	return gained(t, "a listener at a port that nobody counts", said, "1", "0")
}

// TestNoRoomForService: a socket that could not be remembered by the service that it asked for does
// not get to a backend.
func TestNoRoomForService(t *testing.T) {
	p := fullSocket(t)
	server, vip := lab.StartPeer(t, "heddle", "n2/c1"), model.ServiceAddr{AddrPort: netip.MustParseAddrPort("10.96.0.11:80")}
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client := api.Dial(lab.APISocket("n1"))
	defer client.Close()
	backend := netip.AddrPortFrom(netip.MustParseAddr(lab.Address(t, "heddle", "n2/c1")), uint16(port))
	testutil.NoError(t, client.EditServices(t.Context(), api.ServiceEdit{Put: []model.Service{{Addr: vip, Backends: []netip.AddrPort{backend}}}}))
	defer func() {
		if err := client.EditServices(context.Background(), api.ServiceEdit{Delete: []model.ServiceAddr{vip}}); err != nil {
			t.Error(err)
		}
	}()
	p.Expect(`"ENOBUFS"`, `error_of(s.connect, (%q, %d))`, vip.Addr(), vip.Port())
	p.Expect(`"ok"`, `error_of(connect, 4, %q, %d)`, vip.Addr(), vip.Port())
}

// TestNoRoomForGroup: a listener whose accepted connections could not be counted with it does not
// stay.
func TestNoRoomForGroup(t *testing.T) {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	p.Must(`before, s, below = listen(4, "0.0.0.0", 0), bound(4, "0.0.0.0", 0), listen(4, "0.0.0.0", %d)`, port)
	groups, err := ebpf.LoadPinnedMap("/run/heddle/lab/"+lab.Name+"/n1/bpf/heddle/group_by_listener", nil)
	testutil.NoError(t, err)
	defer groups.Close()
	// Cookies as the kernel gives them out in 300 years.
	keys, values := make([]uint64, groups.MaxEntries()), make([]uint64, groups.MaxEntries())
	for i := range keys {
		keys[i] = 1<<62 + uint64(i)
	}
	defer func() {
		if _, err := groups.BatchDelete(keys, nil); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Error(err)
		}
	}()
	if n, err := groups.BatchUpdate(keys, values, nil); !errors.Is(err, unix.E2BIG) {
		t.Fatalf("%d entries made, %v, want none to be left", n, err)
	}
	p.Must(`s.listen()`)
	p.Must(`p = select.poll()`)
	p.Must(`p.register(s, 0)`) // POLLHUP, once it is ended
	p.Expect("1", `len(p.poll(%d))`, testutil.WaitTimeout.Milliseconds())
	p.Expect("[1, 1]", `[l.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for l in (before, below)]`)
}

package test

import (
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"find the underlay in what the kernel answers", model.ProtectSocketOptions, "n1", findUnderlay},
		attack{"ask what a translated connection was made to", model.ProtectSocketOptions, "n1", askOriginal},
	)
}

// builds are the programs that tests had built, by name; they go when all tests are done.
var builds struct {
	dir  string
	done map[string]string
}

// built gives the program that the command makes at path, and makes it once in a run.
func built(t testing.TB, name string, command func(path string) *exec.Cmd) string {
	t.Helper()
	if path := builds.done[name]; path != "" {
		return path
	}
	if builds.done == nil {
		dir, err := os.MkdirTemp("/tmp", "heddle-builds-")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		builds.dir, builds.done = dir, map[string]string{}
	}
	path := filepath.Join(builds.dir, name)
	cmd := command(path)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
	builds.done[name] = path
	return path
}

// compileC makes a static program of a C file below testdata.
func compileC(t testing.TB, name string) string {
	t.Helper()
	return built(t, strings.TrimSuffix(strings.ReplaceAll(name, "/", "-"), ".c"), func(path string) *exec.Cmd {
		return exec.Command("gcc", "-D_GNU_SOURCE=", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", path, filepath.Join("testdata", name))
	})
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
	out, err := exec.Command("ip", "netns", "exec", labName+"-"+node, "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("hardware address of %s: %v\n%s", node, err, out)
	}
	if mac, err = hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(out)), ":", "")); err != nil {
		t.Fatal(err)
	}
	return mac
}

// findUnderlay reads every option of every level, the error queue and control messages, and searches the program's
// memory for addresses of the underlay and for names of the node's devices.
func findUnderlay(t *testing.T) string {
	program, port := compileC(t, "attack/options.c"), strconv.Itoa(freePort())
	start(t, "heddle", "n2/c1", python, "-c", echoBytes, port).waitFor("ready")
	n1, n2 := address(t, "host", "n1/c1"), address(t, "host", "n2/c1")
	out := mustRun(t, "heddle", "n1/c1", program, address(t, "heddle", "n2/c1"), port,
		netip4(t, n1), netip4(t, n2), hex.EncodeToString(underlayDevice(t, "n1", n2)), hex.EncodeToString([]byte("heddle-")))
	finds, whole := strings.CutSuffix(out, "done\n")
	if !whole || strings.Contains(out, "no timestamps") {
		t.Fatalf("options printed\n%s", out)
	}
	return finds
}

// askOriginal has a connection that the node translates come to the container, and asks for the address that it was made to:
// the node's.
func askOriginal(t *testing.T) string {
	server, client, inner, outer := startPeer(t, "heddle", "n1/c1"), startPeer(t, "host", "n2/c1"), freePort(), freePort()
	own, n1 := address(t, "heddle", "n1/c1"), address(t, "host", "n1/c1")
	translate(t, "n1", map[int]string{outer: fmt.Sprintf("%s:%d", own, inner)}, nil)
	server.must(`l = listen(4, "0.0.0.0", %d)`, inner)
	client.must(`s = connect(4, %q, %d)`, n1, outer)
	server.must(`c = l.accept()[0]`)
	server.must(`import ctypes`)
	server.must(`room, length = ctypes.create_string_buffer(16), ctypes.c_uint32(16)`)
	server.must(`said = ctypes.CDLL(None).getsockopt(c.fileno(), 0, 80, room, ctypes.byref(length))`)
	address := func(ip string, port int) string { return fmt.Sprintf("\"0200%04x%s\"", port, netip4(t, ip)) }
	return gained(t, "the connection was made to", server.must(`room.raw[:8].hex()`), address(own, inner), address(n1, outer))
}

package test

import (
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"leave the network namespace and connect", model.ProtectNetns, "n1", connectFromOutside},
		attack{"one thread leaves the network namespace", model.ProtectNetns, "n1", threadFromOutside},
	)
}

// leaveNetns is Python that moves the calling thread to a network namespace of its own, by way of a user namespace, for
// which it needs no capability.
const leaveNetns = `import ctypes; CLONE_NEWUSER, CLONE_NEWNET, CLONE_FILES = 0x10000000, 0x40000000, 0x400; libc = ctypes.CDLL(None, use_errno=True)`

// connectFromOutside leaves the container's network namespace, where it has no network, and connects all the same.
func connectFromOutside(t *testing.T) string {
	server, p, port := startPeer(t, "heddle", "n2/c1"), startPeer(t, "heddle", "n1/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.must(leaveNetns)
	p.expect(`0`, `libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)`)
	return gained(t, "connect from a namespace without network", p.do(`error_of(tcp(4).connect, (%q, %d))`, address(t, "heddle", "n2/c1"), port),
		`"ENETUNREACH"`, `"ok"`)
}

// threadFromOutside does the same in one thread.
func threadFromOutside(t *testing.T) string {
	server, p, port := startPeer(t, "heddle", "n2/c1"), startPeer(t, "heddle", "n1/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	target := address(t, "heddle", "n2/c1")
	p.must(leaveNetns)
	p.must(`said = []`)
	// A user namespace is for whole processes; CAP_SYS_ADMIN of the new one is what a thread needs.
	p.expect(`0`, `libc.unshare(CLONE_NEWUSER)`)
	p.must(`thread = threading.Thread(target=lambda: (said.append(libc.unshare(CLONE_NEWNET)), said.append(error_of(tcp(4).connect, (%q, %d)))))`, target, port)
	p.must(`thread.start()`)
	p.must(`thread.join()`)
	p.expect(`"ok"`, `error_of(tcp(4).connect, (%q, %d))`, target, port) // the other thread has not left
	return gained(t, "connect from a thread's namespace without network", p.must(`said`), `[0, "ENETUNREACH"]`, `[0, "ok"]`)
}

package attack

import (
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"leave the network namespace and connect", model.ProtectNetns, "n1", connectFromOutside},
		attack{"one thread leaves the network namespace", model.ProtectNetns, "n1", threadFromOutside},
	)
}

// connectFromOutside leaves the container's network namespace, where it has no network, and
// connects all the same.
func connectFromOutside(t *testing.T) string {
	server, p, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.Must(lab.LeaveNetns)
	p.Expect(`0`, `libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)`)
	return gained(t, "connect from a namespace without network", p.Do(`error_of(tcp(4).connect, (%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port),
		`"ENETUNREACH"`, `"ok"`)
}

// threadFromOutside does the same in one thread.
func threadFromOutside(t *testing.T) string {
	server, p, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	target := lab.Address(t, "heddle", "n2/c1")
	p.Must(lab.LeaveNetns)
	p.Must(`said = []`)
	// A user namespace is for whole processes; CAP_SYS_ADMIN of the new one is what a thread needs.
	p.Expect(`0`, `libc.unshare(CLONE_NEWUSER)`)
	p.Must(`thread = threading.Thread(target=lambda: (said.append(libc.unshare(CLONE_NEWNET)), said.append(error_of(tcp(4).connect, (%q, %d)))))`, target, port)
	p.Must(`thread.start()`)
	p.Must(`thread.join()`)
	p.Expect(`"ok"`, `error_of(tcp(4).connect, (%q, %d))`, target, port) // the other thread has not left
	return gained(t, "connect from a thread's namespace without network", p.Must(`said`), `[0, "ENETUNREACH"]`, `[0, "ok"]`)
}

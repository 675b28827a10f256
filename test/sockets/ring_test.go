package sockets

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestRing connects, accepts, sends and receives through io_uring, with sockets of socket() and
// with those that io_uring makes itself, which no seccomp filter sees: they are the container's
// own, and reach intercepted listeners all the same.
func TestRing(t *testing.T) {
	ring := filepath.Join(t.TempDir(), "ring")
	if out, err := exec.Command("gcc", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-o", ring, "testdata/ring.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	for _, peer := range []string{"n2/c1", "n1/c2"} {
		target := lab.Address(t, "overlay", peer)
		for _, kind := range []string{"plain", "ring"} {
			want := "connect 0\nsend 5\nrecv 5 hello\nown " + lab.Address(t, "overlay", "n1/c1") + "\npeer " + target + "\nrefused -111\n"
			for _, m := range lab.ContainerModes {
				t.Run(peer+"/"+kind+"/"+m[0]+" to "+m[1], func(t *testing.T) {
					port := strconv.Itoa(lab.FreePort())
					lab.Start(t, m[1], peer, ring, "serve", port).WaitFor("ready")
					if got := lab.MustRun(t, m[0], "n1/c1", ring, target, port, kind); got != want {
						t.Errorf("got:\n%swant:\n%s", got, want)
					}
				})
			}
		}
	}
}

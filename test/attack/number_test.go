package attack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// netnsNumber gives the number by which the kernel names the network namespace at path.
func netnsNumber(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	testutil.NoError(t, unix.Stat(path, &st))
	return st.Ino
}

// endNetns ends what runs in a network namespace, and takes its name.
func endNetns(t *testing.T, path string) {
	t.Helper()
	number := netnsNumber(t, path)
	testutil.NoError(t, errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)))
	testutil.Eventually(t, "the namespace's processes to end", func() (bool, string) {
		tasks, err := filepath.Glob("/proc/[0-9]*/ns/net")
		testutil.NoError(t, err)
		var left []string
		for _, task := range tasks {
			var st unix.Stat_t
			if unix.Stat(task, &st) != nil || st.Ino != number {
				continue
			}
			var pid int
			if _, err := fmt.Sscanf(task, "/proc/%d/", &pid); err != nil {
				t.Fatal(err)
			}
			left = append(left, task)
			_ = unix.Kill(pid, syscall.SIGKILL) // it may have ended
		}
		return len(left) == 0, strings.Join(left, " ")
	})
}

// makeNetns makes network namespaces until one has a number that another had: the kernel gives the
// lowest that is free. It gives "" if somebody else on the machine was quicker.
func makeNetns(t *testing.T, number uint64) (path string) {
	t.Helper()
	var had []string
	t.Cleanup(func() {
		for _, name := range had {
			if out, err := exec.Command("ip", "netns", "delete", name).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
	})
	for len(had) < 128 {
		name := fmt.Sprintf("%s-number-%d", lab.Name, len(had))
		if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		had, path = append(had, name), "/run/netns/"+name
		if netnsNumber(t, path) == number {
			return path
		}
	}
	return ""
}

// TestNetnsNumberIsGivenAgain: a container that ended without its endpoint being deleted leaves the
// number of its network namespace to the next one that is made. The endpoint there reads nothing of
// the other's sockets, which another container has kept.
func TestNetnsNumberIsGivenAgain(t *testing.T) {
	const tries = 5
	for try := range tries {
		var taken bool
		t.Run(strconv.Itoa(try), func(t *testing.T) { taken = !giveNumberAgain(t) })
		if !taken {
			return
		}
	}
	t.Skipf("needs a machine on which others make fewer namespaces: they took the number %d times", tries)
}

// giveNumberAgain reports whether the next container got the number, and then fails the test if
// that reads of the other's sockets.
func giveNumberAgain(t *testing.T) (given bool) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	giver, keeper, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.FreePort()
	path := fmt.Sprintf("/tmp/%s-kept-%d", lab.Name, port)
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	})
	keeper.Must(`u = taker(%q)`, path)
	keeper.Begin(`kept = take(u)`)
	giver.Must(`give(%q, listen(4, "0.0.0.0", %d))`, path, port)
	keeper.Reply("take")
	list := func(netns string) string {
		out, err := exec.Command("nsenter", "--net="+netns, "cat", "/run/heddle/lab/"+lab.Name+"/n1/proc/tcp").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	gone, line := "/run/netns/"+lab.Name+"-n1-c1", fmt.Sprintf("00000000:%04X ", port)
	if got := list(gone); !strings.Contains(got, line) {
		t.Fatalf("its own container does not read of the listener:\n%s", got)
	}
	number := netnsNumber(t, gone)
	endNetns(t, gone)
	next := makeNetns(t, number)
	if next == "" {
		return false
	}
	lab.Heddle(t, "endpoints", "add", "next", "--node", "n1", "--netns", next)
	if got := list(next); strings.Contains(got, line) {
		t.Errorf("the next container reads of the listener:\n%s", got)
	}
	return true
}

package netns

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// tempName gives a name no other test uses, whose namespace is deleted at the end.
func tempName(t *testing.T) string {
	name := fmt.Sprintf("hdt-%d-%s", os.Getpid(), strings.ToLower(filepath.Base(t.Name())))
	t.Cleanup(func() {
		if err := Delete(name); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return name
}

// inode identifies the calling thread's network namespace.
func inode(t *testing.T, path string) uint64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Sys().(*syscall.Stat_t).Ino
}

const own = "/proc/thread-self/ns/net"

func TestValidName(t *testing.T) {
	for _, bad := range []string{"", ".", "..", "a/b", "/", strings.Repeat("x", 256), "a\x00"} {
		if validName(bad) == nil {
			t.Errorf("validName(%q) accepted", bad)
		}
		if Create(bad) == nil || Delete(bad) == nil || Exists(bad) {
			t.Errorf("%q: accepted by Create, Delete or Exists", bad)
		}
	}
	if err := validName("n1-c2.x"); err != nil {
		t.Error(err)
	}
	if Path("a") != "/run/netns/a" {
		t.Errorf("Path = %s", Path("a"))
	}
}

func TestDoErrors(t *testing.T) {
	ran := false
	fn := func() error { ran = true; return nil }
	if err := Do(filepath.Join(t.TempDir(), "absent"), fn); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Do(plain, fn); err == nil || !strings.Contains(err.Error(), plain) {
		t.Errorf("plain file: %v", err)
	}
	if err := Do("/proc/self/ns/uts", fn); err == nil {
		t.Error("a namespace of another kind is accepted")
	}
	if ran {
		t.Error("function ran")
	}
}

func TestCreateDelete(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	before := inode(t, own)
	if Exists(name) {
		t.Fatal("exists before Create")
	}
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	if !Exists(name) {
		t.Fatal("does not exist after Create")
	}
	first := inode(t, Path(name))
	if first == before {
		t.Fatal("the new namespace is our own")
	}
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	if got := inode(t, Path(name)); got != first {
		t.Error("second Create made another namespace")
	}
	if err := Delete(name); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(Path(name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Delete: %v", err)
	}
	if err := Delete(name); err != nil {
		t.Errorf("second Delete: %v", err)
	}
}

func TestCreateAfterKilledCreate(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	if err := prepareDir(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(Path(name), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if Exists(name) {
		t.Error("a plain file counts as a namespace")
	}
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	if !Exists(name) {
		t.Error("not made")
	}
}

func TestCreateRace(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := Create(name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(mounts, []byte(" "+Path(name)+" ")); n < 1 {
		t.Errorf("%d mounts at %s", n, Path(name))
	}
	if err := unix.Unmount(Path(name), unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if Exists(name) {
		t.Error("mounts were stacked")
	}
}

func TestIPNetnsCompatible(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("needs the ip command")
	}
	name := tempName(t)
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !Exists(name) {
		t.Error("ip netns add: not seen")
	}
	if err := Delete(name); err != nil {
		t.Fatal(err)
	}
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ip", "netns", "exec", name, "true").CombinedOutput(); err != nil {
		t.Errorf("ip netns exec: %v: %s", err, out)
	}
	if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
		t.Errorf("ip netns del: %v: %s", err, out)
	}
	if Exists(name) {
		t.Error("ip netns del: still seen")
	}
}

// TestDoDiscardsThreads checks that no thread of the process stays in a namespace that was entered.
func TestDoDiscardsThreads(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	before, target := inode(t, own), inode(t, Path(name))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			err := Do(Path(name), func() error {
				if unix.Gettid() == unix.Getpid() {
					return errors.New("runs on the main thread")
				}
				if got := inode(t, own); got != target {
					return fmt.Errorf("runs in %d, want %d", got, target)
				}
				ifs, err := net.Interfaces()
				if err != nil || len(ifs) == 0 {
					return fmt.Errorf("interfaces: %v %v", ifs, err)
				}
				for _, i := range ifs {
					if i.Name == "lo" && i.Flags&net.FlagUp != 0 {
						return errors.New("lo is up: not the new namespace")
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	wg = sync.WaitGroup{}
	for range 32 {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if got := inode(t, own); got != before {
				t.Errorf("a goroutine runs in namespace %d, want %d", got, before)
			}
		})
	}
	wg.Wait()
	if got := inode(t, "/proc/self/ns/net"); got != before {
		t.Error("the main thread changed its namespace")
	}
}

// TestVisitComesBack: whatever becomes of the function, the thread that called Visit is in its own
// namespace again, and the main thread, by which others see where the process is, never left it.
func TestVisitComesBack(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	there, err := Open(Path(name))
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	before, target := inode(t, own), inode(t, Path(name))
	mine := errors.New("mine")
	visit := func(end func()) error {
		return Visit(there, func() error {
			if got, main := inode(t, own), inode(t, "/proc/self/ns/net"); got != target || main != before {
				return fmt.Errorf("runs in %d, the main thread in %d, want %d and %d", got, main, target, before)
			}
			end()
			return mine
		})
	}
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			defer func() {
				if got := inode(t, own); got != before {
					t.Errorf("came back to %d, want %d", got, before)
				}
			}()
			if i%2 > 0 {
				_ = visit(runtime.Goexit)
			} else if err := visit(func() {}); err != mine {
				t.Errorf("got %v", err)
			}
		})
	}
	wg.Wait()
	if err := Visit(os.Stdin, func() error { return nil }); err == nil {
		t.Error("visited a file that is no namespace")
	}
}

func TestDoPassesErrorAndGoexit(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	want := errors.New("mine")
	if err := Do(own, func() error { return want }); err != want {
		t.Errorf("got %v", err)
	}
	if err := Do(own, func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Goexit: no error")
	}
}

func TestSame(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	open := func(path string) *os.File {
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	a, b, c := open(Path(name)), open(Path(name)), open(own)
	if same, err := Same(a, b); err != nil || !same {
		t.Errorf("Same(a, a) = %v, %v", same, err)
	}
	if same, err := Same(a, c); err != nil || same {
		t.Errorf("Same(a, own) = %v, %v", same, err)
	}
}

func TestStart(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	name := tempName(t)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("stat", "-L", "-c", "%i", "/proc/self/ns/net")
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := Start(Path(name), cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.TrimSpace(out.String()), fmt.Sprint(inode(t, Path(name))); got != want {
		t.Errorf("command ran in %s, want %s", got, want)
	}
	deadly := exec.Command("true")
	deadly.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := Start(Path(name), deadly); err == nil {
		t.Error("Pdeathsig accepted")
	}
}

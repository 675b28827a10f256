package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// socketOf makes a socket in a cgroup, closed at the end of the test at the latest.
func socketOf(t *testing.T, group string) (fd int) {
	t.Helper()
	enter := func(dir string) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	enter(group)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	enter(filepath.Dir(group))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) }) // mostly closed before
	return fd
}

// madeAnew removes a cgroup and makes it again; it gives the id it had.
func madeAnew(t *testing.T, group string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := errors.Join(unix.Stat(group, &st), os.Remove(group), os.Mkdir(group, 0o755)); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// reopen is the next agent.
func reopen(t *testing.T, cfg Config) *Datapath {
	t.Helper()
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// earlierOf gives the pins of links to cgroup id, and the program that each runs.
func earlierOf(t *testing.T, d *Datapath, id uint64) map[string]ebpf.ProgramID {
	t.Helper()
	out := map[string]ebpf.ProgramID{}
	for _, h := range d.hooks() {
		l, err := link.LoadPinnedLink(filepath.Join(d.cfg.PinDir, h.earlierPin(id)), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		info, err := l.Info()
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		out[h.name] = info.Program
	}
	return out
}

// Sockets of a cgroup that was removed run the programs of every agent that follows, and once they
// are gone so are the links.
func TestLinksOfEarlierCgroups(t *testing.T) {
	cfg := upgradeConfig(t)
	pinned := pinsOf(t, reopen(t, cfg).cfg)
	first := socketOf(t, cfg.Cgroup)
	one := madeAnew(t, cfg.Cgroup)
	reopen(t, cfg)
	socketOf(t, cfg.Cgroup)
	two := madeAnew(t, cfg.Cgroup)
	d := reopen(t, cfg)
	for _, id := range []uint64{one, two} {
		runs := earlierOf(t, d, id)
		for _, h := range d.hooks() {
			info, err := h.prog.Info()
			if err != nil {
				t.Fatal(err)
			}
			if mine, _ := info.ID(); runs[h.name] != mine {
				t.Errorf("%s of cgroup %d runs program %d, want %d", h.name, id, runs[h.name], mine)
			}
		}
	}
	if err := unix.Bind(first, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Errorf("an untagged socket: %v", err)
	}
	if err := unix.Close(first); err != nil {
		t.Fatal(err)
	}
	letGo(t, d, one)
	d = reopen(t, cfg)
	if left := earlierOf(t, d, one); len(left) != 0 {
		t.Errorf("the last socket of cgroup %d is gone, and pinned are %v", one, left)
	}
	if kept := earlierOf(t, d, two); len(kept) != len(d.hooks()) {
		t.Errorf("cgroup %d has a socket, and pinned are %v", two, kept)
	}
	if got := len(pinsOf(t, cfg)); got != len(pinned)+len(d.hooks()) {
		t.Errorf("%d pins, want %d", got, len(pinned)+len(d.hooks()))
	}
}

// letGo waits until the kernel has let go of the links to a cgroup.
func letGo(t *testing.T, d *Datapath, id uint64) {
	t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(d.cfg.PinDir, d.hooks()[0].earlierPin(id)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		now, err := linkCgroup(l)
		if err != nil || now != 0 && time.Now().After(deadline) {
			t.Fatalf("the link is of cgroup %d, %v", now, err)
		}
		if now == 0 {
			return
		}
	}
}

// An agent that goes back to a cgroup that it had has one link a hook there, not two.
func TestBackInEarlierCgroup(t *testing.T) {
	here := upgradeConfig(t)
	there := here
	there.Cgroup = upgradeConfig(t).Cgroup
	pinned := pinsOf(t, reopen(t, here).cfg)
	hooks := len(reopen(t, there).hooks())
	if got := len(pinsOf(t, here)); got != len(pinned)+hooks {
		t.Errorf("%d pins in another cgroup, want %d", got, len(pinned)+hooks)
	}
	reopen(t, here)
	for cgroup, want := range map[string]int{here.Cgroup: 1, there.Cgroup: 1} {
		found, err := link.QueryPrograms(link.QueryOptions{Target: open(t, cgroup), Attach: ebpf.AttachCGroupInet4Bind})
		if err != nil || len(found.Programs) != want {
			t.Errorf("programs at bind4 of %s: %+v, %v, want %d", cgroup, found, err, want)
		}
	}
}

func open(t *testing.T, path string) (fd int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // only read
	return int(f.Fd())
}

// A version with a hook that sockets of an earlier cgroup lack does not start beside them.
func TestEarlierCgroupLacksHook(t *testing.T) {
	cfg := upgradeConfig(t)
	reopen(t, cfg)
	s := socketOf(t, cfg.Cgroup)
	id := madeAnew(t, cfg.Cgroup)
	d := reopen(t, cfg)
	lacks := d.hooks()[len(d.hooks())-1]
	if err := os.Remove(filepath.Join(cfg.PinDir, lacks.earlierPin(id))); err != nil {
		t.Fatal(err)
	}
	before := pinsOf(t, cfg)
	refused, err := Open(cfg)
	if !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), fmt.Sprintf("cgroup %d lack the hook %s", id, lacks.name)) {
		t.Errorf("opened: %v, %v", refused, err)
	}
	if got := pinsOf(t, cfg); !slices.Equal(got, before) {
		t.Errorf("pins %v, were %v", got, before)
	}
	if err := unix.Close(s); err != nil {
		t.Fatal(err)
	}
	letGo(t, d, id)
	reopen(t, cfg)
}

// An agent does not start above or below a cgroup that an earlier one had: hooks would run twice.
func TestCgroupsWithinEachOther(t *testing.T) {
	for _, down := range []bool{true, false} {
		upper := upgradeConfig(t)
		lower := upper
		lower.Cgroup = filepath.Join(upper.Cgroup, "agent")
		if err := os.Mkdir(lower.Cgroup, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(lower.Cgroup); err != nil {
				t.Error(err)
			}
		})
		earlier, next := lower, upper
		if down {
			earlier, next = upper, lower
		}
		pinned := pinsOf(t, reopen(t, earlier).cfg)
		refused, err := Open(next)
		if err == nil || !strings.Contains(err.Error(), "--cgroup "+earlier.Cgroup+",") {
			t.Errorf("in %s after %s: opened: %v, %v", next.Cgroup, earlier.Cgroup, refused, err)
		}
		if got := pinsOf(t, earlier); !slices.Equal(got, pinned) {
			t.Errorf("pins %v, were %v", got, pinned)
		}
		reopen(t, earlier)
	}
}

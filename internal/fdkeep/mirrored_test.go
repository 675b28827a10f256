package fdkeep

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// shelf is a Storage as systemd is one: names of descriptors, the same file under a name once, and
// all of it given to the next process.
type shelf struct {
	t   *testing.T
	fds map[string]int
}

func (s *shelf) Store(name string, fd int) error {
	if _, there := s.fds[name]; there {
		s.t.Errorf("%s is stored twice", name)
	}
	if strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		s.t.Errorf("name %q", name)
	}
	copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	s.fds[name] = copied
	return err
}

func (s *shelf) Remove(name string) error {
	if fd, ok := s.fds[name]; ok {
		delete(s.fds, name)
		return unix.Close(fd)
	}
	return nil
}

func (s *shelf) Kept() map[string]int {
	out := map[string]int{}
	for name, fd := range s.fds {
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			s.t.Error(err)
		}
		out[name] = copied
	}
	return out
}

// socket gives a descriptor that does not hang up while the test runs, as a listener does not.
func socket(t *testing.T) int {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(pair[:]) })
	return pair[0]
}

func held(t *testing.T, c *Client) map[string]string {
	t.Helper()
	all, err := c.TakeAll()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range all {
		out[p.Key] = string(p.Meta)
		closeAll([]int{p.FD, p.Page})
	}
	return out
}

// TestMirrored: what a keeper loses, the storage has, and the other way round; what is dropped
// neither.
func TestMirrored(t *testing.T) {
	s := &shelf{t, map[string]int{}}
	c, stop := run(t)
	d, err := Mirror(c, s, roomy(t))
	if err != nil {
		t.Fatal(err)
	}
	page, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]int{page})
	one, two, hand := socket(t), socket(t), socket(t)
	for range 2 { // as after the end of a keeper
		for key, fd := range map[string]int{"one/1": one, "two/2": two} {
			if err := d.Put(key, []byte("of "+key), fd, page); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.Put("hand-off", []byte("h"), hand, hand); err != nil { // its own page
			t.Fatal(err)
		}
	}
	if len(s.fds) != 9 {
		t.Errorf("stored %v", slices.Sorted(maps.Keys(s.fds)))
	}
	if err := d.Put("hand-off", []byte("h2"), socket(t), hand); err != nil { // another socket under the same key
		t.Fatal(err)
	}
	if err := d.Drop("two/2"); err != nil {
		t.Fatal(err)
	}

	stop() // agent and keeper end
	c, stop = run(t)
	before := openFiles(t)
	if _, err := Mirror(c, s, roomy(t)); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"one/1": "of one/1", "hand-off": "h2"}
	if got := held(t, c); !maps.Equal(got, want) {
		t.Errorf("the new keeper has %v, want %v", got, want)
	}
	// The keeper, which is in this process, has two descriptors for each, and nothing else is left
	// open.
	testutil.Eventually(t, "no descriptor is left over", func() (bool, string) {
		return openFiles(t) <= before+4, listFiles()
	})

	for name := range s.fds { // the service was stopped
		_ = s.Remove(name)
	}
	if _, err = Mirror(c, s, roomy(t)); err != nil || len(s.fds) != 6 {
		t.Errorf("stored %v, %v", slices.Sorted(maps.Keys(s.fds)), err)
	}

	// A listener that hung up meanwhile: the manager let it go, and keeps the rest until it is
	// told.
	for _, n := range slices.Collect(maps.Keys(s.fds)) {
		if l, err := readLabel(s.fds[n]); n[0] == 't' && err == nil && l.Key == "one/1" {
			_ = s.Remove("l" + n[1:])
		}
	}
	stop()
	c, _ = run(t)
	if _, err = Mirror(c, s, roomy(t)); err != nil || len(s.fds) != 3 {
		t.Errorf("stored %v, %v", slices.Sorted(maps.Keys(s.fds)), err)
	}
	if got := held(t, c); len(got) != 1 || got["hand-off"] != "h2" {
		t.Errorf("the new keeper has %v", got)
	}
}

// roomy is told that all is stored, or nothing.
func roomy(t *testing.T) func(int) {
	return func(alone int) { t.Errorf("the storage has no room for %d", alone) }
}

// TestMirrorOfLongNames: what an earlier agent stored under long names is taken, and stored under
// short ones.
func TestMirrorOfLongNames(t *testing.T) {
	s := &shelf{t, map[string]int{}}
	text, err := writeLabel(label{"one/1", []byte("of one")})
	if err != nil {
		t.Fatal(err)
	}
	page, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]int{text, page})
	id, ended := strings.Repeat("0a", 16), strings.Repeat("1b", 16)
	for name, fd := range map[string]int{"listener-" + id: socket(t), "page-" + id: page, "label-" + id: text, "page-" + ended: page, "label-" + ended: text} {
		if err := s.Store(name, fd); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second has a keeper that has lost nothing
		c, stop := run(t)
		if _, err := Mirror(c, s, roomy(t)); err != nil {
			t.Fatal(err)
		}
		if got := held(t, c); len(got) != 1 || got["one/1"] != "of one" {
			t.Errorf("the keeper has %v", got)
		}
		if got := slices.Sorted(maps.Keys(s.fds)); !slices.Equal(got, []string{"l0", "p0", "t0"}) {
			t.Errorf("stored %v", got)
		}
		stop()
	}
}

// list is a Storage that remembers names only.
type list map[string]bool

func (l list) Store(name string, _ int) error { l[name] = true; return nil }
func (l list) Remove(name string) error       { delete(l, name); return nil }
func (l list) Kept() map[string]int           { return nil }

// TestMirroredIsBounded: the names of all that is stored, which systemd passes in one environment
// string, stay far below the kernel's 128 KiB, and the descriptors within what the unit allows. What
// has no room is reported, until it is dropped or stored.
func TestMirroredIsBounded(t *testing.T) {
	unit, err := os.ReadFile("../../packaging/heddled.service")
	if want := fmt.Sprintf("\nFileDescriptorStoreMax=%d\n", 16384); err != nil || !strings.Contains(string(unit), want) {
		t.Errorf("the agent's unit does not have %q: %v", want, err)
	}
	s, alone := list{}, 0
	d := newMirrored(nil, s, func(n int) { alone = n })
	fd := socket(t)
	put := func(i int) {
		t.Helper()
		if err := d.store(Kept{Key: fmt.Sprintf("container/%d", i), FD: fd, Page: fd}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range MaxStored {
		put(i)
	}
	names := "LISTEN_FDNAMES=" + strings.Join(slices.Collect(maps.Keys(s)), ":")
	if len(s) != 3*MaxStored || MaxStored < 5000 || len(names) > 100_000 || alone != 0 {
		t.Errorf("%d names of %d bytes for %d entries, %d without room", len(s), len(names), MaxStored, alone)
	}
	put(MaxStored)
	put(MaxStored + 1)
	if len(s) != 3*MaxStored || alone != 2 {
		t.Errorf("%d names, %d without room, want 2", len(s), alone)
	}
	if err := d.remove("container/7"); err != nil {
		t.Fatal(err)
	}
	if put(MaxStored); len(s) != 3*MaxStored || alone != 1 {
		t.Errorf("%d names, %d without room after another has gone, want 1", len(s), alone)
	}
	if d.onlyKeeper(fmt.Sprintf("container/%d", MaxStored+1), false); alone != 0 {
		t.Errorf("%d without room, want none", alone)
	}
}

func FuzzParseLabel(f *testing.F) {
	f.Add([]byte(`{"key":"a/1/b","meta":"e30="}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if l, err := parseLabel(raw); err == nil && (l.Key == "" || len(l.Key) > MaxKeyBytes || len(l.Meta) > MaxMetaBytes) {
			t.Errorf("%+v", l)
		}
	})
}

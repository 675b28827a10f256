package fdkeep

import (
	"maps"
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
	d, err := Mirror(c, s)
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
	if _, err := Mirror(c, s); err != nil {
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
	if _, err = Mirror(c, s); err != nil || len(s.fds) != 6 {
		t.Errorf("stored %v, %v", slices.Sorted(maps.Keys(s.fds)), err)
	}

	// A listener that hung up meanwhile: the manager let it go, and keeps the rest until it is
	// told.
	_ = s.Remove(listenerPart + hashOf("one/1"))
	stop()
	c, _ = run(t)
	if _, err = Mirror(c, s); err != nil || len(s.fds) != 3 {
		t.Errorf("stored %v, %v", slices.Sorted(maps.Keys(s.fds)), err)
	}
	if got := held(t, c); len(got) != 1 || got["hand-off"] != "h2" {
		t.Errorf("the new keeper has %v", got)
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

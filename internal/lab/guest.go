package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/lab/fabric"
	"heddle.dev/heddle/internal/netns"
)

// Guest is a host on a lab's fabric for other things than Heddle: it has an underlay address as a
// node has, and no agent. Whoever asks for guests runs what he likes in their namespace, in
// namespaces called as Container says, in their cgroup and with files in their directory. All of it
// goes with RemoveGuests, or with the lab.
type Guest struct {
	Name     string       // g1, g2..
	Netns    string       // path of its network namespace
	Underlay netip.Prefix // its address on the fabric, on device fabric.Device
	Dir      string       // exists, and is empty at first
	Cgroup   string       // as runtimes are told: its path in every hierarchy
	// Cgroups are the directories of that cgroup, in the unified hierarchy first. Those of
	// hierarchies are left out in which a new cgroup has to be set up before it can have processes.
	Cgroups []string
}

// Container gives the name of a network namespace for container i, from 1, of the guest.
func (g Guest) Container(i int) string { return fmt.Sprintf("%s-c%d", filepath.Base(g.Netns), i) }

// MaxGuests bounds the guests of a lab.
const MaxGuests = 9

// guestFirst is the host part of a guest's address, less its number.
const guestFirst = 100

var guestPattern = regexp.MustCompile(`^g[1-9](-c[0-9]+)?$`)

// AddGuests makes guests g1 to the n-th on the lab's fabric. A lab has no other guests meanwhile:
// what is left of earlier ones goes first.
func (l Lab) AddGuests(ctx context.Context, n int) ([]Guest, error) {
	if n < 1 || n > MaxGuests {
		return nil, fmt.Errorf("%d guests: want 1 to %d", n, MaxGuests)
	}
	if err := l.RemoveGuests(ctx); err != nil {
		return nil, err
	}
	unlock, err := l.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	s, err := l.Load()
	if err != nil {
		return nil, err
	}
	groups, err := findCgroups()
	if err != nil {
		return nil, err
	}
	var guests []Guest
	var names []string
	for i := 1; i <= n; i++ {
		name := fmt.Sprintf("g%d", i)
		names = append(names, name)
		guests = append(guests, Guest{
			Name: name, Netns: l.netns(name), Underlay: netip.PrefixFrom(s.underlay(guestFirst+i), underlayBits),
			Dir: l.nodeDir(name), Cgroup: l.cgroup() + "/" + name, Cgroups: groups.ready(l.cgroup() + "/" + name),
		})
	}
	for _, g := range guests {
		err := errors.Join(netns.Create(filepath.Base(g.Netns)), os.MkdirAll(g.Dir, 0o755))
		for _, dir := range g.Cgroups {
			err = errors.Join(err, os.MkdirAll(dir, 0o755))
		}
		if err != nil {
			return nil, fmt.Errorf("guest %s: %w", g.Name, err)
		}
	}
	if err := (&up{lab: l, state: s}).plug(names); err != nil {
		return nil, err
	}
	for _, g := range guests {
		err := netns.Do(g.Netns, func() error {
			return errors.Join(fabric.SetCongestionControl(congestionControl), fabric.SetupHost(fabric.Host{Addrs: []netip.Prefix{g.Underlay}}))
		})
		if err != nil {
			return nil, fmt.Errorf("guest %s: %w", g.Name, err)
		}
	}
	return guests, nil
}

// ready gives the directories of cgroup path that can have processes as soon as they are made.
func (g cgroups) ready(path string) []string {
	dirs := []string{filepath.Join(g.v2, path)}
	for _, mount := range g.v1 {
		if _, err := os.Stat(filepath.Join(mount, "cpuset.cpus")); err != nil {
			dirs = append(dirs, filepath.Join(mount, path))
		}
	}
	return dirs
}

// RemoveGuests removes the lab's guests: their processes, mounts, network namespaces, cgroups and
// files. It goes by names, so that it removes what a killed program left; none is no error.
func (l Lab) RemoveGuests(ctx context.Context) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	all, err := mounts()
	if err != nil {
		return err
	}
	groups := selectCgroups(all)
	var errs []error
	var names []string
	for i := 1; i <= MaxGuests && ctx.Err() == nil; i++ {
		names = append(names, fmt.Sprintf("g%d", i))
		errs = append(errs, l.removeGuest(names[i-1], groups))
	}
	if netns.Exists(l.netnsName(fabricSpace)) {
		// The kernel takes a namespace's devices away some time later, and a new guest must not
		// find the old one's port.
		errs = append(errs, netns.Do(l.netns(fabricSpace), func() error { return fabric.Unplug(names) }))
	}
	return errors.Join(append(errs, ctx.Err())...)
}

func (l Lab) removeGuest(name string, groups cgroups) error {
	group := filepath.Join(l.cgroup(), name)
	if groups.v2 != "" {
		if err := killCgroup(filepath.Join(groups.v2, group), processesDie); err != nil {
			return fmt.Errorf("guest %s: %w", name, err)
		}
	}
	under, err := l.guestMounts(name)
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(under) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("guest %s: unmount %s: %w", name, path, err)
		}
	}
	entries, err := os.ReadDir(netns.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for _, e := range entries {
		suffix, ok := strings.CutPrefix(e.Name(), l.netnsName(""))
		if host, _, _ := strings.Cut(suffix, "-"); ok && host == name && guestPattern.MatchString(suffix) {
			errs = append(errs, netns.Delete(e.Name()))
		}
	}
	for _, mount := range append(groups.v1, groups.v2) {
		if mount != "" {
			errs = append(errs, removeCgroup(filepath.Join(mount, group), processesDie))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("guest %s: %w", name, err)
	}
	if under, err = l.guestMounts(name); err != nil {
		return err
	}
	if len(under) > 0 {
		// Never delete through a mount: what is behind it may not be the guest's.
		return fmt.Errorf("guest %s: %s is mounted again: unmount it", name, under[0])
	}
	return os.RemoveAll(l.nodeDir(name))
}

// guestMounts lists the mount points below a guest's directory, in the order of mounting.
func (l Lab) guestMounts(name string) ([]string, error) {
	under, err := l.mountsUnder()
	if err != nil || len(under) == 0 {
		return nil, err
	}
	dir, err := filepath.EvalSymlinks(l.Dir())
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(under, func(path string) bool {
		return !strings.HasPrefix(path, filepath.Join(dir, name)+"/")
	}), nil
}

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// processesDie bounds how long killed processes may take to go.
const processesDie = 10 * time.Second

// Down removes the lab: processes, mounts, namespaces, cgroups, state. It goes by names and not by
// the state file, so that it removes whatever a killed Up or Down left; parts that are missing are
// no error.
func (l Lab) Down(ctx context.Context, progress io.Writer) error {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	began := time.Now()
	if err := l.clear(ctx); err != nil {
		return fmt.Errorf("lab %s: %w\nnext: `heddle lab down%s` tries again", l.name, err, l.flag())
	}
	fmt.Fprintf(progress, "lab %s: down: %.2f s\n", l.name, time.Since(began).Seconds())
	return nil
}

// clear is Down for a caller that holds the lock.
func (l Lab) clear(ctx context.Context) error {
	for _, step := range []struct {
		name string
		run  func(context.Context) error
	}{
		// Without its state a lab is one to be cleared: an Up that follows on a killed Down does
		// that.
		{"state", l.forget},
		{"processes", l.stopAll},
		{"mounts", l.unmountAll},
		{"network namespaces", l.deleteNamespaces},
		{"cgroups", l.removeCgroups},
		{"directory", l.removeDir},
	} {
		if err := errors.Join(ctx.Err(), step.run(ctx)); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// forget removes the lab's state file.
func (l Lab) forget(context.Context) error {
	if err := os.Remove(l.statePath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// stopAll ends the containers, then the agents in their own way, then whatever is left.
func (l Lab) stopAll(ctx context.Context) error {
	groups, err := findCgroups()
	if err != nil {
		return nil // without cgroup2 nothing of a lab was ever started
	}
	top := filepath.Join(groups.v2, l.cgroup())
	entries, err := os.ReadDir(top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var agents []string
	for _, e := range entries {
		group := filepath.Join(top, e.Name())
		switch {
		case !e.IsDir():
		case isNode(e.Name()):
			agents = append(agents, group)
		default:
			if err := killCgroup(group, processesDie); err != nil {
				return err
			}
		}
	}
	err = each(ctx, agents, func(ctx context.Context, group string) error {
		agents, _, err := agentProcesses(group)
		return errors.Join(err, stopProcesses(ctx, agents, group))
	})
	return errors.Join(err, killCgroup(top, processesDie))
}

var (
	nodePattern  = regexp.MustCompile(`^n[0-9]+$`)
	netnsPattern = regexp.MustCompile(`^(fabric|outside|s[0-9]+|n[0-9]+(-c[0-9]+)?)$`)
)

func isNode(name string) bool { return nodePattern.MatchString(name) }

// unmountAll unmounts everything under the lab's directory, the last mounted first.
func (l Lab) unmountAll(context.Context) error {
	under, err := l.mountsUnder()
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(under) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	return nil
}

func (l Lab) mountsUnder() (paths []string, err error) {
	all, err := mounts()
	if err != nil {
		return nil, err
	}
	// /run may be a symbolic link; mountinfo has the path it leads to.
	dir, err := filepath.EvalSymlinks(l.Dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if strings.HasPrefix(m.path, dir+"/") {
			paths = append(paths, m.path)
		}
	}
	return paths, nil
}

// deleteNamespaces deletes the network namespaces that carry the lab's name.
func (l Lab) deleteNamespaces(context.Context) error {
	entries, err := os.ReadDir(netns.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for _, e := range entries {
		if l.ownsNetns(e.Name()) {
			errs = append(errs, netns.Delete(e.Name()))
		}
	}
	return errors.Join(errs...)
}

func (l Lab) ownsNetns(name string) bool {
	suffix, ok := strings.CutPrefix(name, l.netnsName(""))
	return ok && (netnsPattern.MatchString(suffix) || guestPattern.MatchString(suffix))
}

// removeCgroups removes the lab's cgroups from every hierarchy: runc makes some in each.
func (l Lab) removeCgroups(context.Context) error {
	all, err := mounts()
	if err != nil {
		return err
	}
	groups := selectCgroups(all)
	var errs []error
	for _, mount := range append(groups.v1, groups.v2) {
		if mount != "" {
			errs = append(errs, removeCgroup(filepath.Join(mount, l.cgroup()), processesDie))
		}
	}
	return errors.Join(errs...)
}

// removeDir removes the lab's directory; last, because it is how `heddle lab list` knows of the
// lab.
func (l Lab) removeDir(context.Context) error {
	under, err := l.mountsUnder()
	if err != nil {
		return err
	}
	if len(under) > 0 {
		// Never delete through a mount: what is behind it may not be ours.
		return fmt.Errorf("%s is mounted again: unmount it", under[0])
	}
	return os.RemoveAll(l.Dir())
}

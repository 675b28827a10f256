package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// A socket's hooks are those of the cgroup in which it was made, for as long as it lives, and so
// are those of what it accepts. An agent that starts in another cgroup than the last one, also in
// one that was removed and made anew under the same path, must therefore keep the links to the
// earlier ones: containers have sockets of theirs. The kernel keeps a removed cgroup's programs
// until the last such socket is gone, and lets go of its links by itself then.

// earlierLink is a pinned link of a hook to a cgroup that the agent is not in.
type earlierLink struct {
	hook   hook
	pin    string
	cgroup uint64
	link   link.Link
}

// earlierPin is where a hook's link to cgroup id is pinned, if the agent is in another one.
func (h hook) earlierPin(id uint64) string {
	return linkPin + h.name + "_" + strconv.FormatUint(id, 16)
}

// isEarlierPin reports whether a pin's name is that of a link of this hook to an earlier cgroup.
func (h hook) isEarlierPin(name string) bool {
	id, found := strings.CutPrefix(name, linkPin+h.name+"_")
	n, err := strconv.ParseUint(id, 16, 64)
	return found && err == nil && name == h.earlierPin(n)
}

// retireLinks brings what earlier agents pinned to the names that it has now that the agent is in
// cgroup current: the links to that one are the hooks', those to others go on with this object's
// programs, beside them, and what the kernel has let go of is removed.
func (d *Datapath) retireLinks(current uint64) error {
	all, err := d.pinnedLinks()
	defer func() {
		for _, e := range all {
			_ = e.link.Close() // the pin keeps it
		}
	}()
	if err != nil {
		return err
	}
	if err := errors.Join(checkComplete(d.cfg.PinDir, d.hooks(), all, current), checkApart(d.cfg.Cgroup, all, current)); err != nil {
		return err
	}
	// First those that make room: the agent may be back in a cgroup that it had before.
	for _, mine := range []bool{false, true} {
		for _, e := range all {
			if (e.cgroup == current) != mine {
				continue
			}
			if err := d.retireLink(e, current); err != nil {
				return fmt.Errorf("%s: %w", e.pin, err)
			}
		}
	}
	return nil
}

func (d *Datapath) retireLink(e earlierLink, current uint64) error {
	to := e.hook.earlierPin(e.cgroup)
	switch {
	case e.cgroup == current:
		to = linkPin + e.hook.name // where attachHook finds it
	case e.cgroup == 0 || !model.ProtectHooks.On():
		return os.Remove(filepath.Join(d.cfg.PinDir, e.pin))
	default:
		err := e.link.Update(e.hook.prog)
		if errors.Is(err, unix.ENOLINK) { // let go of meanwhile
			return os.Remove(filepath.Join(d.cfg.PinDir, e.pin))
		}
		if err != nil {
			return fmt.Errorf("update link to cgroup %d: %w", e.cgroup, err)
		}
	}
	if to == e.pin {
		return nil
	}
	return os.Rename(filepath.Join(d.cfg.PinDir, e.pin), filepath.Join(d.cfg.PinDir, to))
}

// pinnedLinks opens every pinned link of a hook. The caller closes what it gives, also beside an
// error.
func (d *Datapath) pinnedLinks() (all []earlierLink, err error) {
	entries, err := os.ReadDir(d.cfg.PinDir)
	if err != nil {
		return nil, fmt.Errorf("list pins: %w", err)
	}
	for _, h := range d.hooks() {
		for _, entry := range entries {
			name := entry.Name()
			if name != linkPin+h.name && !h.isEarlierPin(name) {
				continue
			}
			l, err := link.LoadPinnedLink(filepath.Join(d.cfg.PinDir, name), nil)
			if err != nil {
				return all, fmt.Errorf("load pinned link %s: %w", name, err)
			}
			all = append(all, earlierLink{hook: h, pin: name, link: l})
			if all[len(all)-1].cgroup, err = linkCgroup(l); err != nil {
				return all, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return all, nil
}

// checkComplete refuses to go on beside sockets that lack a hook which this version adds: to a
// cgroup that was removed none can be attached.
func checkComplete(dir string, hooks []hook, all []earlierLink, current uint64) error {
	have := map[uint64]map[string]bool{}
	for _, e := range all {
		if e.cgroup == 0 || e.cgroup == current {
			continue
		}
		if have[e.cgroup] == nil {
			have[e.cgroup] = map[string]bool{}
		}
		have[e.cgroup][e.hook.name] = true
	}
	for id, names := range have {
		for _, h := range hooks {
			if !names[h.name] && model.ProtectHooks.On() {
				return refusal(dir, fmt.Sprintf("sockets of the earlier cgroup %d lack the hook %s", id, h.name))
			}
		}
	}
	return nil
}

// checkApart refuses a cgroup that has one of the earlier ones above or below it: sockets of the
// lower one run the programs of both, and a hook that runs twice answers for what it has changed
// itself (no socket is counted a second time, no connect is direct). One below that was removed is
// not found any more.
func checkApart(dir string, all []earlierLink, current uint64) error {
	earlier := map[uint64]bool{}
	for _, e := range all {
		if e.cgroup != 0 && e.cgroup != current && model.ProtectHooks.On() {
			earlier[e.cgroup] = true
		}
	}
	if len(earlier) == 0 {
		return nil
	}
	other, err := findAbove(dir, earlier)
	if err == nil && other == "" {
		other, err = findBelow(dir, earlier)
	}
	if err != nil {
		return fmt.Errorf("cgroups around %s: %w", dir, err)
	}
	if other == "" {
		return nil
	}
	return fmt.Errorf("%s was an earlier agent's, and one of it and %s is within the other: sockets of the lower one would run every hook twice; "+
		"start the agent with --cgroup %s, as before, or with one beside it", other, dir, other)
}

// findAbove gives the directory above dir that is one of the cgroups; "" if none is.
func findAbove(dir string, cgroups map[uint64]bool) (string, error) {
	var own, st unix.Stat_t
	if err := unix.Stat(dir, &own); err != nil {
		return "", err
	}
	for at := filepath.Dir(filepath.Clean(dir)); ; at = filepath.Dir(at) {
		if err := unix.Stat(at, &st); err != nil {
			return "", err
		}
		if st.Dev != own.Dev { // no cgroup any more
			return "", nil
		}
		if cgroups[st.Ino] {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", nil
		}
	}
}

// findBelow gives a directory below dir that is one of the cgroups; "" if none is.
func findBelow(dir string, cgroups map[uint64]bool) (found string, err error) {
	err = filepath.WalkDir(dir, func(at string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			return nil
		}
		if err != nil || !entry.IsDir() || at == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(at, &st); err == nil && cgroups[st.Ino] {
			found = at
			return fs.SkipAll
		}
		return nil
	})
	return found, err
}

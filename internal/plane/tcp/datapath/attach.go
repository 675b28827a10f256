package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is one program of the agent's cgroup.
type hook struct {
	name   string // pin: link_<name>
	attach ebpf.AttachType
	prog   *ebpf.Program
}

func (d *Datapath) hooks() []hook {
	return []hook{
		{"bind4", ebpf.AttachCGroupInet4Bind, d.objs.Bind4},
		{"bind6", ebpf.AttachCGroupInet6Bind, d.objs.Bind6},
		{"post_bind4", ebpf.AttachCGroupInet4PostBind, d.objs.PostBind4},
		{"post_bind6", ebpf.AttachCGroupInet6PostBind, d.objs.PostBind6},
		{"sock_release", ebpf.AttachCgroupInetSockRelease, d.objs.SockRelease},
		{"connect4", ebpf.AttachCGroupInet4Connect, d.objs.Connect4},
		{"connect6", ebpf.AttachCGroupInet6Connect, d.objs.Connect6},
		{"getsockname4", ebpf.AttachCgroupInet4GetSockname, d.objs.Getsockname4},
		{"getsockname6", ebpf.AttachCgroupInet6GetSockname, d.objs.Getsockname6},
		{"getpeername4", ebpf.AttachCgroupInet4GetPeername, d.objs.Getpeername4},
		{"getpeername6", ebpf.AttachCgroupInet6GetPeername, d.objs.Getpeername6},
		{"setsockopt", ebpf.AttachCGroupSetsockopt, d.objs.Setsockopt},
		{"getsockopt", ebpf.AttachCGroupGetsockopt, d.objs.Getsockopt},
		{"sockops", ebpf.AttachCGroupSockOps, d.objs.TcpEvents},
	}
}

// attachCgroup brings every hook to this object's program: of the agent's cgroup, and of those that
// earlier agents had.
func (d *Datapath) attachCgroup() error {
	var st unix.Stat_t
	if err := unix.Stat(d.cfg.Cgroup, &st); err != nil {
		return fmt.Errorf("cgroup %s: %w", d.cfg.Cgroup, err)
	}
	if err := d.retireLinks(st.Ino); err != nil {
		return fmt.Errorf("hooks of earlier cgroups: %w", err)
	}
	for _, h := range d.hooks() {
		l, err := d.attachHook(h, st.Ino)
		if err != nil {
			return fmt.Errorf("attach %s to cgroup %s: %w", h.name, d.cfg.Cgroup, err)
		}
		d.links = append(d.links, l)
	}
	return nil
}

// attachHook updates the link pinned by an earlier agent, or makes and pins one.
func (d *Datapath) attachHook(h hook, cgroupID uint64) (link.Link, error) {
	pin := filepath.Join(d.cfg.PinDir, linkPin+h.name)
	old, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		if err := old.Update(h.prog); err != nil {
			_ = old.Close()
			return nil, fmt.Errorf("update pinned link: %w", err)
		}
		return old, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load pinned link: %w", err)
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: d.cfg.Cgroup, Attach: h.attach, Program: h.prog})
	if err != nil {
		return nil, err
	}
	if err := l.Pin(pin); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("pin link: %w", err)
	}
	return l, nil
}

// linkCgroup gives the id of the cgroup a link is attached to; 0 once the kernel has let go of
// that, which it does when the cgroup is removed and the last socket made in it is gone.
func linkCgroup(l link.Link) (uint64, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	c := info.Cgroup()
	if c == nil {
		return 0, errors.New("not the link of a cgroup")
	}
	return c.CgroupId, nil
}

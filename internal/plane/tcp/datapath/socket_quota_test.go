package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// enterCgroup has this process's new sockets belong to a cgroup of version 2, until leave is
// called.
func enterCgroup(t *testing.T, group string) (leave func()) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	home := ""
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			home = filepath.Join(filepath.Dir(group), strings.TrimSpace(path))
		}
	}
	move := func(to string) {
		if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0); err != nil {
			t.Fatal(err)
		}
	}
	move(group)
	return func() { move(home) }
}

// TestCountSocket asks for one socket after the other for this thread, as it is and as it is not.
func TestCountSocket(t *testing.T) {
	cfg := upgradeConfig(t)
	cfg.EndpointSockets = 3
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	e := model.Endpoint{ID: 5, Name: "e", Addrs: []netip.Addr{overlayB}}
	if err := d.SetEndpoint(e, 9, ContainerSide{}); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var ns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &ns); err != nil {
		t.Fatal(err)
	}
	me := model.Caller{Thread: uint32(unix.Gettid()), Netns: uint32(ns.Ino), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	with := func(change func(*model.Caller)) model.Caller {
		c := me
		change(&c)
		return c
	}
	defer enterCgroup(t, cfg.Cgroup)()
	count := func(c model.Caller) error {
		t.Helper()
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := d.TagSocket(fd, e.ID, false); err != nil {
			t.Fatal(err)
		}
		return d.CountSocket(fd, c)
	}
	counted := uint64(0)
	for _, c := range []struct {
		name   string
		caller model.Caller
		want   error
	}{
		{"another namespace", with(func(c *model.Caller) { c.Netns++ }), model.ErrOtherNetns},
		{"another user", with(func(c *model.Caller) { c.UID = 65533 }), model.ErrOtherOwner},
		{"another group", with(func(c *model.Caller) { c.GID = 65533 }), model.ErrOtherOwner},
		{"no such thread", with(func(c *model.Caller) { c.Thread = 1 << 30 }), model.ErrNoCaller},
		{"as it is", me, nil},
		{"any user, any namespace", model.Caller{Thread: me.Thread, AnyOwner: true}, nil},
		{"not compared", model.Caller{UID: 65533, Netns: 1}, nil},
		{"above the quota", me, model.ErrSocketQuota},
	} {
		want := c.want
		compared := want != nil && want != model.ErrSocketQuota
		if compared && !d.ComparesCallers() {
			t.Logf("%s: not compared here: %v", c.name, canCompareCallers(btf.NewCache()))
			continue
		}
		if err := count(c.caller); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", c.name, err, want)
		}
		if want == nil {
			counted++
		}
		if n, err := d.Sockets(e.ID); err != nil || n != counted {
			t.Errorf("%s: endpoint has %d sockets, %v; want %d", c.name, n, err, counted)
		}
	}
}

// TestTagSocket: a socket is tagged by who knows the agent's key, and by nobody else, not even in
// the agent's own process.
func TestTagSocket(t *testing.T) {
	cfg := upgradeConfig(t)
	cfg.EndpointSockets = 3
	d, err := Open(cfg)
	testutil.NoError(t, err)
	defer d.Close()
	e := model.Endpoint{ID: 5, Name: "e", Addrs: []netip.Addr{overlayB}}
	testutil.NoError(t, d.SetEndpoint(e, 9, ContainerSide{}))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer enterCgroup(t, cfg.Cgroup)()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer unix.Close(fd)
	look := func(what string, want heddleSockTag) { // the mark is not shown of one that is tagged
		t.Helper()
		var tag heddleSockTag
		if err := d.objs.TagBySock.Lookup(uint32(fd), &tag); ignoreAbsent(err) != nil || tag != want {
			t.Errorf("%s: tag %+v, %v; want %+v", what, tag, err, want)
		}
	}
	key := d.agentKey
	d.agentKey++
	if err := d.TagSocket(fd, e.ID, false); !errors.Is(err, unix.ENOPROTOOPT) {
		t.Errorf("tagged with another key: %v", err)
	}
	look("another key", heddleSockTag{})
	d.agentKey = key
	set, _ := d.set.Load(e.ID)
	want := heddleSockTag{EndpointId: uint32(e.ID), Incarnation: set.(heddleEndpoint).Incarnation}
	testutil.NoError(t, d.TagSocket(fd, e.ID, false))
	look("the key", want)
	want.Options = uint32(heddleSockTagOptionsOPTION_MPTCP)
	testutil.NoError(t, d.TagSocket(fd, e.ID, true))
	look("asked for as MPTCP", want)
}

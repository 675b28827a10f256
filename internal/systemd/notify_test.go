package systemd

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestNotify(t *testing.T) {
	t.Setenv(EnvSocket, "")
	if err := Notify(Ready); err != nil {
		t.Errorf("without a service manager: %v", err)
	}
	path := filepath.Join(t.TempDir(), "notify")
	t.Setenv(EnvSocket, path)
	if err := Notify(Ready); err == nil || !strings.Contains(err.Error(), "notify service manager") {
		t.Errorf("to nobody: %v", err)
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := Notify(Ready); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	n, err := conn.Read(got)
	if err != nil || string(got[:n]) != "READY=1" {
		t.Errorf("got %q, %v", got[:n], err)
	}
}

func TestExtendTimeout(t *testing.T) {
	if got := ExtendTimeout(90 * time.Second); got != "EXTEND_TIMEOUT_USEC=90000000" {
		t.Error(got)
	}
}

func TestDelegated(t *testing.T) {
	const (
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
		hybrid  = "30 23 0:25 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n31 30 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n" +
			"32 30 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		part = "30 23 0:26 /user.slice /mnt rw - cgroup2 cgroup2 rw\n30 23 0:26 /system.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	)
	for _, c := range []struct{ name, own, mounts, want string }{
		{"unified", "0::/system.slice/heddled.service\n", unified, "/sys/fs/cgroup/system.slice/heddled.service/agent"},
		{"hybrid", "2:cpu:/\n1:name=systemd:/system.slice/heddled.service\n0::/system.slice/heddled.service\n", hybrid, "/sys/fs/cgroup/unified/system.slice/heddled.service/agent"},
		{"there already", "0::/system.slice/heddled.service/agent\n", unified, "/sys/fs/cgroup/system.slice/heddled.service/agent"},
		{"mounted in part", "0::/system.slice/heddled.service\n", part, "/sys/fs/cgroup/heddled.service/agent"},
		{"version 1", "1:name=systemd:/system.slice/heddled.service\n", hybrid, "version 1 only"},
		{"the top one", "0::/\n", unified, "nobody delegated"},
		{"another namespace's", "0::/../x\n", unified, "nobody delegated"},
		{"not mounted", "0::/a\n", "", "no cgroup2 file system"},
	} {
		got, err := delegated(c.own, c.mounts)
		if got != c.want && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %q, %v, want %q", c.name, got, err, c.want)
		}
	}
}

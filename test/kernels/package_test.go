package kernels_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/machine"
)

// packageScript is what TestDebianPackage does without systemd, which these machines have not: the
// maintainer's scripts run all the same, and the programs that they call. What is missing of other
// packages is named by their dependencies' absence from dpkg's list, and forced: the files are there.
const packageScript = `set -e
cd /heddle/deb
export DEBIAN_FRONTEND=noninteractive
mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates
touch /var/lib/dpkg/status
agent() {
	heddled --node n1 --underlay 192.0.2.1 --store embedded >>/run/heddled.log 2>&1 &
	pid=$!
	for i in $(seq 600); do
		heddle status >/run/said 2>&1 && return
		kill -0 $pid || break
		sleep 1
	done
	cat /run/said /run/heddled.log
	exit 1
}
state() { dpkg-query -W -f '${db:Status-Abbrev}${Version} ${Architecture}\n' heddle; }
ip link add eth0 type veth peer name port0 && ip addr add 192.0.2.1/24 dev eth0 && ip link set eth0 up && ip link set port0 up

# A test that fails, alone or behind "!", ends the script only so.
is() { "$@" || { echo "it is not so: $*"; exit 1; }; }
fails() { if "$@" >/run/said 2>&1; then echo "it does not fail: $*"; exit 1; fi; }

dpkg -i --force-depends first.deb
is [ "$(state)" = "ii 7.0.0~first $ARCH" ]
for program in heddle heddled heddle-kube heddle-runtime; do $program --version; done
heddle doctor | sed -n '/^STATUS/,/^$/p'
agent
ip netns add a
heddle endpoints add a --netns /run/netns/a
echo installed

dpkg -i --force-depends other.deb
is [ "$(state)" = "ii 7.0.0~other $ARCH" ]
kill $pid && wait $pid || true
agent
heddle endpoints | grep -w a
fails dpkg -i --force-depends foreign.deb
grep 'cannot take over what the installed one has' /run/said
heddle status >/dev/null
echo upgraded

fails dpkg -r heddle
grep 'heddle: not removed' /run/said
is [ "$(state)" = "ri 7.0.0~other $ARCH" ] # installed; the "r" is what was asked for
heddle endpoints delete a
kill $pid && wait $pid || true
dpkg -r heddle
fails ls /usr/sbin/heddled
fails ls /sys/fs/bpf/heddle
is [ -e /var/lib/heddle ]
dpkg -P heddle
fails ls /var/lib/heddle
fails ls /etc/default/heddled
fails dpkg-query -W heddle
echo removed
`

// TestPackageARM64 installs, upgrades, refuses to upgrade and to remove, removes and purges
// HEDDLE_DEB, the package for arm64, in a machine that has the files of HEDDLE_ROOT: those of
// Debian's packages.
func TestPackageARM64(t *testing.T) {
	kernel, busybox, root, deb := os.Getenv("HEDDLE_KERNEL"), os.Getenv("HEDDLE_BUSYBOX"), os.Getenv("HEDDLE_ROOT"), os.Getenv("HEDDLE_DEB")
	if kernel == "" || busybox == "" || root == "" || deb == "" {
		t.Skip("HEDDLE_KERNEL, HEDDLE_BUSYBOX, HEDDLE_ROOT and HEDDLE_DEB do not name what is of arm64: make test-arm64-package gets it")
	}
	versions(t, deb, filepath.Join(root, "heddle/deb"))
	built, err := machine.Image{Kernel: kernel, BusyBox: busybox, Root: root}.Build(t.TempDir())
	testutil.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), sceneTimeout)
	defer cancel()
	var said strings.Builder
	console := machine.Lines(func(line string) {
		t.Log(line)
		said.WriteString(line + "\n")
	})
	script := fmt.Sprintf("export %s=20 ARCH=arm64\nmodprobe tun\n%s", patience.Variable, packageScript)
	code, err := built.Run(ctx, script, machine.Options{Megabytes: 4096, Processors: 2, OneThread: true, Console: console})
	testutil.NoError(t, err)
	for _, step := range []string{"installed\n", "upgraded\n", "removed\n"} {
		if !strings.Contains(said.String(), step) {
			t.Errorf("the package was not %s", strings.TrimSpace(step))
		}
	}
	if code != 0 {
		t.Errorf("the script ended with %d", code)
	}
}

// versions makes three packages of one in dir: first.deb, other.deb, a later version, and
// foreign.deb, whose maps have another layout.
func versions(t *testing.T, deb, dir string) {
	t.Helper()
	testutil.NoError(t, os.MkdirAll(dir, 0o755))
	root := filepath.Join(t.TempDir(), "root")
	run := func(name string, args ...string) {
		t.Helper()
		if said, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", name, err, said)
		}
	}
	edit := func(file, from, to string) {
		t.Helper()
		path := filepath.Join(root, "DEBIAN", file)
		raw, err := os.ReadFile(path)
		testutil.NoError(t, err)
		line := regexp.MustCompile(from)
		if !line.Match(raw) {
			t.Fatalf("%s has no %s", file, from)
		}
		testutil.NoError(t, os.WriteFile(path, line.ReplaceAll(raw, []byte(to)), 0o755))
	}
	run("dpkg-deb", "--raw-extract", deb, root)
	for _, v := range []struct{ name, version string }{{"first.deb", "7.0.0~first"}, {"other.deb", "7.0.0~other"}, {"foreign.deb", "8.0.0"}} {
		edit("control", `(?m)^Version: .*$`, "Version: "+v.version)
		if v.name == "foreign.deb" {
			edit("preinst", `(?m)^[0-9a-f]{64}\tflow_by_wire$`, strings.Repeat("0", 64)+"\tflow_by_wire")
		}
		run("dpkg-deb", "--root-owner-group", "-Znone", "--build", root, filepath.Join(dir, v.name))
	}
}

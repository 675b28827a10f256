package lifecycle

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// The versions of the two packages that are made: of one length, because the second is the first
// with another text in its programs.
const (
	firstVersion  = "7.0.0~first"
	secondVersion = "7.0.0~other"
)

// buildPackage builds the package as `make deb` does, and gives its path.
func buildPackage(t testing.TB, dir string) string {
	t.Helper()
	programs, err := os.ReadDir("../../cmd")
	testutil.NoError(t, err)
	args := []string{dir}
	for _, p := range programs {
		args = append(args, p.Name())
	}
	cmd := exec.Command("../../packaging/build-deb.sh", args...)
	cmd.Env = append(os.Environ(), "VERSION="+firstVersion, "COMPRESS=none", "SOURCE_DATE_EPOCH=1") // without a look at git
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("build-deb.sh: %v\n%s%s", err, out, err.(*exec.ExitError).Stderr)
	}
	return strings.TrimSpace(string(out))
}

// changedPackage makes another package of one, whose unpacked files edit changes.
func changedPackage(t testing.TB, from, to string, edit func(root string)) {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	if out, err := exec.Command("dpkg-deb", "-R", from, root).CombinedOutput(); err != nil {
		t.Fatalf("unpack: %v\n%s", err, out)
	}
	edit(root)
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "-Znone", "--build", root, to).CombinedOutput(); err != nil {
		t.Fatalf("pack: %v\n%s", err, out)
	}
}

// replaceIn replaces text in a file, which must have it.
func replaceIn(t testing.TB, path, from, to string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	testutil.NoError(t, err)
	if !strings.Contains(string(raw), from) {
		t.Fatalf("%s does not have %q", path, from)
	}
	st, err := os.Stat(path)
	testutil.NoError(t, err)
	testutil.NoError(t, os.WriteFile(path, []byte(strings.ReplaceAll(string(raw), from, to)), st.Mode()))
}

// checkBeside looks at what is made with a package: sums that are right, and a bill of materials
// that has parts in Go and Rust, and is in the package, too.
func checkBeside(t testing.TB, built string) {
	t.Helper()
	sums := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	sums.Dir = filepath.Dir(built)
	out, err := sums.CombinedOutput()
	if err != nil || !strings.Contains(string(out), filepath.Base(built)+": OK") {
		t.Errorf("SHA256SUMS: %v: %s", err, out)
	}
	bom, err := os.ReadFile(strings.TrimSuffix(built, ".deb") + ".cdx.json")
	testutil.NoError(t, err)
	for _, part := range []string{"pkg:golang/gvisor.dev/gvisor@", "pkg:cargo/smoltcp@", firstVersion} {
		if !strings.Contains(string(bom), part) {
			t.Errorf("the bill of materials does not have %s", part)
		}
	}
	list, err := exec.Command("dpkg-deb", "--contents", built).Output()
	testutil.NoError(t, err)
	if !strings.Contains(string(list), "/usr/share/doc/heddle/heddle.cdx.json") {
		t.Errorf("the package does not have it:\n%s", list)
	}
}

// packages makes the three packages of TestDebianPackage: first.deb, other.deb, of another version,
// and foreign.deb, a version whose maps have another layout.
func (m *machine) packages() {
	t := m.t
	t.Helper()
	at := func(name string) string { return filepath.Join(m.share, name) }
	built := buildPackage(t, t.TempDir())
	checkBeside(t, built)
	testutil.NoError(t, exec.Command("cp", built, at("first.deb")).Run())
	changedPackage(t, built, at("other.deb"), func(root string) {
		for _, f := range []string{"usr/sbin/heddled", "usr/bin/heddle", "DEBIAN/control"} {
			replaceIn(t, filepath.Join(root, f), firstVersion, secondVersion)
		}
		replaceIn(t, filepath.Join(root, "usr/lib/heddle/heddle-rdma"), "usage: heddle-rdma ", "usage  heddle-rdma ")
	})
	changedPackage(t, built, at("foreign.deb"), func(root string) {
		preinst := filepath.Join(root, "DEBIAN/preinst")
		raw, err := os.ReadFile(preinst)
		testutil.NoError(t, err)
		line := regexp.MustCompile(`(?m)^[0-9a-f]{64}\tflow_by_wire$`).FindString(string(raw))
		if line == "" {
			t.Fatalf("preinst has no layout of flow_by_wire:\n%s", raw)
		}
		replaceIn(t, preinst, line, strings.Repeat("0", 64)+"\tflow_by_wire")
		replaceIn(t, filepath.Join(root, "DEBIAN/control"), firstVersion, "8.0.0")
	})
}

// packageContainers are started in a machine, with a server in b.
const packageContainers = `set -e
for c in a b; do
	ip netns add $c
	heddle endpoints add $c --netns /run/netns/$c --verbs >/dev/null
	mkdir -p /root/$c/rootfs
	mount --bind / /root/$c/rootfs
	cd /root/$c
	runc spec
	python3 - $c <<'END'
import json, sys
name = sys.argv[1]
c = json.load(open("config.json"))
c["annotations"] = {"io.heddle.endpoint": name, "io.heddle.verbs": "true"}
next(n for n in c["linux"]["namespaces"] if n["type"] == "network")["path"] = "/run/netns/" + name
c["linux"].pop("resources", None)
c["process"].update(terminal=False, args=["sleep", "infinity"], rlimits=[], oomScoreAdj=0)
json.dump(c, open("config.json", "w"))
END
	heddle-runtime run --detach --bundle . $c </dev/null >log 2>&1 || { cat log; exit 1; }
done
heddle-runtime exec b python3 /usr/local/load.py serve </dev/null >/dev/null 2>&1 &
`

// packageLoad is a program for containers. As a client it keeps connections and makes new ones
// until its input ends.
const packageLoad = `import select, socket, sys, threading, time

def echo(c):
    while d := c.recv(100):
        c.sendall(d)

if sys.argv[1] == "serve":
    l = socket.create_server(("0.0.0.0", 8000), backlog=1000)
    while True:
        threading.Thread(target=echo, args=(l.accept()[0],), daemon=True).start()

where = (sys.argv[2], 8000)
while True:
    try:
        live = [socket.create_connection(where) for _ in range(20)]
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
made = said = 0
worst = 0.0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    began = time.monotonic()
    with socket.create_connection(where) as s:
        s.sendall(b"x")
        assert s.recv(1) == b"x"
    worst = max(worst, time.monotonic() - began)
    made += 1
    for c in live:
        c.sendall(b"y")
        assert c.recv(1) == b"y"
        said += 1
print(f"done: {made} connects, {said} exchanges, the longest connect {worst:.2f} s", flush=True)
`

// TestDebianPackage installs, configures, upgrades, refuses to upgrade and to remove, removes and
// purges the package on a machine that systemd runs, with containers that talk meanwhile.
func TestDebianPackage(t *testing.T) {
	m := startMachine(t)
	m.packages()
	m.write("load.py", packageLoad)
	m.write("containers.sh", packageContainers)
	before := m.traces()

	// Installed, it waits for its one setting.
	m.sh("dpkg -i --force-unsafe-io /mnt/deb/first.deb")
	m.fails("systemctl is-active heddled", "inactive")
	m.sh("systemctl is-enabled heddled; systemd-analyze verify --man=no heddled.service 2>&1 | (! grep heddled)")
	m.sh("systemctl show --property DeviceAllow heddled | grep -q /dev/net/tun")
	files := m.sh("dpkg -L heddle")
	for _, want := range []string{"man8/heddled.8.gz", "man8/heddle-uninstall.8.gz", "man8/heddle-runtime.8.gz", "/usr/share/heddle/monitoring/heddle-alerts.yaml", "/usr/share/heddle/monitoring/heddle-dashboard.json", "/usr/lib/heddle/libheddle-guest.so", "/usr/lib/heddle/libheddle-machine.so", "/usr/lib/heddle/libheddle-pool.so", "/usr/bin/heddle-machine", "/usr/lib/heddle/libheddle-verbs.so", "/usr/lib/heddle/heddle-rdma", "/usr/lib/heddle/heddle-stack", "/usr/lib/heddle/heddle-netstack", "/usr/lib/heddle/congestion/dctcp.bpf.o", "bash-completion/completions/heddle",
		"doc/heddle/copyright", "doc/heddle/changelog.gz", "bin/heddle-runtime",
		"man8/heddle-kube.8.gz", "sbin/heddle-kube", "system/heddle-kube.service", "kubernetes/heddle-package.yaml"} {
		if !strings.Contains(files, want+"\n") {
			t.Errorf("the package has no %s:\n%s", want, files)
		}
	}
	for _, program := range []string{"heddle", "heddled", "heddle-kube"} {
		if said := m.sh(program + " --version"); !strings.Contains(said, firstVersion) {
			t.Errorf("%s --version: %s", program, said)
		}
	}
	m.sh("sed -i 's/^#HEDDLED_UNDERLAY=.*/HEDDLED_UNDERLAY=192.0.2.1/' /etc/default/heddled && systemctl start heddled")
	m.sh("heddle connections") // for which the agent has its process start that waits for locks
	if procs := m.sh("cat /sys/fs/cgroup/system.slice/heddled.service/agent/cgroup.procs"); len(strings.Fields(procs)) != 3 {
		t.Errorf("processes in the delegated cgroup: %q, want agent, fd keeper and heddled-lockwait", procs)
	}
	if log := m.journal(); strings.Contains(log, "level=ERROR") || strings.Contains(log, "level=WARN") {
		t.Errorf("the agent complains in its sandbox:\n%s", log)
	}

	m.kube()
	m.sh("cp /mnt/deb/load.py /usr/local/ && sh /mnt/deb/containers.sh")
	m.upgrade()
	m.refusals()
	m.bothEnd()
	m.longNames()
	m.remove(before)
}

// journal is what the agent has said.
func (m *machine) journal() string {
	return m.sh("journalctl --no-pager --output cat --unit heddled")
}

// kube starts heddle-kube, which is not started by default. There is no API server: it says so, and
// answers heddle-cni all the same.
func (m *machine) kube() {
	t := m.t
	t.Helper()
	m.fails("systemctl is-enabled heddle-kube", "disabled")
	m.sh("systemd-analyze verify --man=no heddle-kube.service 2>&1 | (! grep heddle)")
	m.sh("systemctl start heddle-kube; ! systemctl is-active heddle-kube && journalctl --no-pager -o cat -u heddle-kube | grep 'kubeconfig is not there'")
	m.write("kubeconfig", `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
		"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}], "users": [{"name": "u", "user": {"token": "t"}}]}`)
	m.sh("install -m 600 /mnt/deb/kubeconfig /etc/heddle/kubeconfig && systemctl enable --now heddle-kube 2>&1")
	testutil.Eventually(t, "heddle-kube", func() (bool, string) {
		said, _ := m.try("systemctl is-active heddle-kube; journalctl --no-pager -o cat -u heddle-kube; test -S /run/heddle/kube.sock && echo there")
		return strings.HasPrefix(said, "active\n") && strings.HasSuffix(said, "there\n") && strings.Contains(said, "connection refused"), said
	})
	if said := m.sh("journalctl --no-pager -o cat -u heddle-kube"); strings.Contains(said, "permission denied") || strings.Contains(said, "not permitted") {
		t.Errorf("heddle-kube complains in its sandbox:\n%s", said)
	}
}

// upgrade replaces the package under load.
func (m *machine) upgrade() {
	t := m.t
	t.Helper()
	keeper, kube := m.sh("pgrep -f 'heddled [p]ark'"), m.sh("systemctl show -P MainPID heddle-kube")
	router, pingpong := m.sh("pgrep -f '[h]eddle-rdma --agent'"), m.opensDevice()
	m.sh("mkfifo /run/go")
	wait := m.background("heddle-runtime exec a python3 /usr/local/load.py load 10.244.0.3 </run/go >/run/load.out 2>&1; cat /run/load.out")
	m.sh("exec 3>/run/go; sleep infinity 3>/run/go </dev/null >/dev/null 2>&1 & echo $! >/run/go.pid")
	testutil.Eventually(t, "the load", func() (bool, string) {
		said, _ := m.try("cat /run/load.out")
		return strings.Contains(said, "ready"), said
	})
	m.sh("dpkg -i --force-unsafe-io /mnt/deb/other.deb")
	testutil.Eventually(t, "the new agent", func() (bool, string) {
		said, _ := m.try("heddle status")
		return strings.Contains(said, "heddled "+secondVersion), said
	})
	m.sh("heddle-runtime exec a python3 -c 'import socket; socket.create_connection((\"10.244.0.3\", 8000))'") // it answers
	m.sh("kill $(cat /run/go.pid)")
	said, err := wait()
	if err != nil || !strings.Contains(said, "done: ") {
		t.Errorf("the load over the upgrade: %v\n%s", err, said)
	}
	t.Logf("over the upgrade: %s", strings.TrimSpace(said))
	if now := m.sh("systemctl show -P MainPID heddle-kube"); now == kube || strings.TrimSpace(now) == "0" {
		t.Errorf("heddle-kube is process %s, was %s", now, kube)
	}
	if now := m.sh("pgrep -f 'heddled [p]ark'"); now != keeper {
		t.Errorf("fd keeper %s, was %s", now, keeper)
	}
	routers := func(is func(string) bool) {
		t.Helper()
		testutil.Eventually(t, "the routers of the verbs plane", func() (bool, string) {
			now, _ := m.try("pgrep -f '[h]eddle-rdma --agent'")
			return is(now), now + ", was " + router
		})
	}
	routers(func(now string) bool {
		return len(strings.Fields(now)) == 2 && strings.Contains(now, strings.TrimSpace(router))
	})
	m.sh("heddle-runtime exec a ibv_rc_pingpong -g 0 10.244.0.3")
	if said, err := pingpong(); err != nil || !strings.Contains(said, "usec/iter") {
		t.Errorf("a program that had its device open over the upgrade: %v\n%s", err, said)
	}
	routers(func(now string) bool { return len(strings.Fields(now)) == 1 && now != router })
}

// opensDevice starts a server in b that uses RDMA, and waits until it has its queue pair; wait
// gives what it said in the end.
func (m *machine) opensDevice() (wait func() (string, error)) {
	m.t.Helper()
	wait = m.background("heddle-runtime exec b ibv_rc_pingpong -g 0 </dev/null >/run/pingpong.out 2>&1; cat /run/pingpong.out")
	testutil.Eventually(m.t, "ibv_rc_pingpong to listen", func() (bool, string) {
		said, _ := m.try("heddle connections --all; cat /run/pingpong.out")
		return strings.Contains(said, ":18515"), said
	})
	return wait
}

// refusals: what would hurt the containers is refused, and nothing is changed.
func (m *machine) refusals() {
	m.t.Helper()
	m.fails("dpkg -i --force-unsafe-io /mnt/deb/foreign.deb", "another layout of flow_by_wire", "drain this node", "nothing was changed")
	m.fails("heddle uninstall", "an agent serves", "systemctl stop heddled")
	m.fails("dpkg -r heddle", "2 containers live", "heddle endpoints delete", "heddle: not removed")
	m.sh("systemctl is-active heddle-kube")
	if said := m.sh("heddle status && heddle-runtime exec a python3 -c 'import socket; socket.create_connection((\"10.244.0.3\", 8000))'"); !strings.Contains(said, secondVersion) {
		m.t.Errorf("after the refusals: %s", said)
	}
}

// bothEnd kills the agent and the fd keeper at once: a program that runs gets sockets all the same,
// because systemd has kept its listener.
func (m *machine) bothEnd() {
	t := m.t
	t.Helper()
	const program = `import socket, sys
print("ready", flush=True)
sys.stdin.readline()
socket.create_connection(("10.244.0.3", 8000))
print("connected", flush=True)
`
	m.write("late.py", program)
	m.sh("cp /mnt/deb/late.py /usr/local/; mkfifo /run/late; sleep infinity 3<>/run/late </dev/null >/dev/null 2>&1 & echo $! >/run/late.pid")
	wait := m.background("heddle-runtime exec a python3 /usr/local/late.py </run/late >/run/late.out 2>&1; cat /run/late.out")
	testutil.Eventually(t, "the program", func() (bool, string) {
		said, _ := m.try("cat /run/late.out")
		return strings.Contains(said, "ready"), said
	})
	before := m.sh("cat /sys/fs/cgroup/system.slice/heddled.service/agent/cgroup.procs")
	m.sh("systemctl kill --kill-who=all --signal=KILL heddled")
	testutil.Eventually(t, "another agent, fd keeper, router with its opener, and heddled-lockwait", func() (bool, string) {
		said, err := m.try("heddle status && heddle connections")
		now, _ := m.try("cat /sys/fs/cgroup/system.slice/heddled.service/agent/cgroup.procs")
		for _, pid := range strings.Fields(now) {
			if slices.Contains(strings.Fields(before), pid) {
				return false, now
			}
		}
		return err == nil && len(strings.Fields(now)) == 5, said + now
	})
	m.sh("echo go >/run/late")
	if said, err := wait(); err != nil || !strings.Contains(said, "connected") {
		t.Errorf("a program whose agent and fd keeper were killed: %v\n%s\n%s", err, said, m.journal())
	}
	m.sh("kill $(cat /run/late.pid)")
}

// longNames: what an earlier agent gave systemd to keep under long names is more than the kernel
// would pass to a new agent. The upgrade starts it all the same, and the fd keeper stays.
func (m *machine) longNames() {
	t := m.t
	t.Helper()
	const store = `import os, socket
open("/sys/fs/cgroup/system.slice/heddled.service/agent/cgroup.procs", "w").write(str(os.getpid()))
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect("/run/systemd/notify")
for i in range(1200):
    for part in "listener", "page", "label":
        fd = os.memfd_create(part)
        socket.send_fds(s, [b"FDSTORE=1\nFDNAME=%s-%032x" % (part.encode(), i)], [fd])
        os.close(fd)
read, write = os.pipe()
socket.send_fds(s, [b"BARRIER=1"], [write])
os.close(write)
os.read(read, 1)
`
	m.write("store.py", store)
	m.sh("mkdir -p /run/systemd/system/heddled.service.d && printf '[Service]\\nNotifyAccess=all\\n' >/run/systemd/system/heddled.service.d/all.conf && systemctl daemon-reload")
	keeper, agent := m.sh("pgrep -f 'heddled [p]ark'"), m.sh("systemctl show -P MainPID heddled")
	m.sh("python3 /mnt/deb/store.py; [ $(systemctl show -P NFileDescriptorStore heddled) -gt 3600 ]")
	m.sh("rm -r /run/systemd/system/heddled.service.d && /var/lib/dpkg/info/heddle.postinst configure " + firstVersion)
	testutil.Eventually(t, "an agent that has what the fd keeper keeps stored", func() (bool, string) {
		said, err := m.try("heddle status >/dev/null && systemctl show -P MainPID heddled && systemctl show -P NFileDescriptorStore heddled && pgrep -f 'heddled [p]ark'")
		now := strings.Fields(said)
		if err != nil || len(now) != 3 {
			return false, said
		}
		stored, err := strconv.Atoi(now[1])
		return err == nil && stored > 2 && stored < 100 && now[0] != strings.TrimSpace(agent) && now[2] == strings.TrimSpace(keeper), said
	})
	m.sh("heddle-runtime exec a python3 -c 'import socket; socket.create_connection((\"10.244.0.3\", 8000))'")
}

// traces lists what of Heddle's is in the machine's kernel and files, but for dpkg's own memory.
func (m *machine) traces() string {
	m.t.Helper()
	return m.sh(`ip -br link | cut -d' ' -f1; ip rule; ip -6 rule; ip route show table all proto 72; ip -6 route show table all proto 72
nft list tables; tc qdisc show | grep clsact; ls /sys/fs/bpf; find /sys/fs/cgroup -name '*heddle*'
find /etc /lib/systemd /opt /run /usr/bin /usr/lib/cni /usr/sbin /usr/share /var/lib -xdev -name '*heddle*' -not -path '/var/lib/dpkg/*' 2>/dev/null
pgrep -la heddle; true`)
}

// remove ends the containers, removes the package, installs it again, and purges it.
func (m *machine) remove(before string) {
	t := m.t
	t.Helper()
	m.sh("for c in a b; do heddle-runtime delete -f $c; heddle endpoints delete $c; ip netns del $c; umount /root/$c/rootfs; done")
	instance := m.sh("cat /var/lib/heddle/instance")
	said := m.sh("dpkg -r heddle")
	for _, want := range []string{"removed fd keeper", "removed router of the verbs plane", "removed device heddle-vx0", "removed nftables table inet heddle", "pins of BPF programs"} {
		if !strings.Contains(said, want) {
			t.Errorf("removal does not say %q:\n%s", want, said)
		}
	}
	m.sh("test -s /var/lib/heddle/join.pem && test -s /etc/default/heddled && ! ls /sys/fs/bpf/heddle && ! ip link show heddle-vx0 && ! pgrep heddle")

	// Installed again it is the same node, because its state was kept.
	m.sh("dpkg -i --force-unsafe-io /mnt/deb/other.deb")
	testutil.Eventually(t, "the agent", func() (bool, string) {
		said, err := m.try("heddle status")
		return err == nil, said
	})
	if now := m.sh("cat /var/lib/heddle/instance"); now != instance {
		t.Errorf("instance %s, was %s", now, instance)
	}

	// Half installed: parts are missing, the agent and its fd keeper were killed. Then again, with
	// nothing left.
	m.sh("systemctl kill --kill-who=all --signal=KILL heddled; systemctl stop heddled; rm -rf /sys/fs/bpf/heddle/link_* /run/heddle/seccomp.sock /var/lib/heddle/trust; ip link del heddle-vx0")
	m.fails("heddle uninstall", "heddle-kube serves /run/heddle/kube.sock")
	m.sh("systemctl stop heddle-kube; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/run/heddle/kube.sock\")'") // as one that was killed leaves it
	if said := m.sh("heddle uninstall"); !strings.Contains(said, "removed device heddle-hd0") || !strings.Contains(said, "removed /var/lib/heddle\n") {
		t.Errorf("uninstall of half a node:\n%s", said)
	}
	if said := m.sh("heddle uninstall"); said != "nothing of Heddle's is here\n" {
		t.Errorf("uninstall again: %s", said)
	}
	m.sh("dpkg -P heddle")
	if after := m.traces(); after != before {
		t.Errorf("after purge:\n%s\n--- before the installation:\n%s", after, before)
	}
}

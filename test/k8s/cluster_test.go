package k8s_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// machine is a Kubernetes node of the test: a namespace of each kind but users', with places of its
// own where containerd, the kubelet and Heddle keep things, so that they run as on a machine of
// their own, at the usual paths. Its processes end with its first one, and with them go its mounts
// and devices.
type machine struct {
	name, addr string
	pid        int // of its first process
}

// machineInit makes the places. What a machine mounts, its pods see: all is shared, as systemd has
// it.
const machineInit = `set -e
mount --make-rprivate /
mount --make-rshared /
for d in /run /opt /var/lib /var/log; do mount -t tmpfs none $d; done
mkdir /run/upper /run/work
mount -t overlay none -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
mount -t bpf none /sys/fs/bpf
rm -rf /etc/cni /etc/containerd
mkdir -p /etc/containerd /opt/cni/bin /run/netns
cp "$1" /opt/cni/bin/
ip link set lo up
touch "$2"
exec sleep infinity`

// loopback is a plugin that containerd 1.6 asks for itself, whatever the network.
const loopback = "/usr/lib/cni/loopback"

// startMachine starts a machine that ends with the test.
func startMachine(t *testing.T, dir, name, addr string) *machine {
	t.Helper()
	ready := filepath.Join(dir, name+".ready")
	cmd := exec.Command("unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child",
		"sh", "-c", machineInit, "sh", loopback, ready)
	d := startDaemon(t, dir, name, cmd)
	m := &machine{name: name, addr: addr}
	testutil.EventuallyNil(t, "machine "+name, func() error {
		select {
		case <-d.done:
			log, _ := os.ReadFile(d.log)
			t.Fatalf("machine %s ended: %s", name, log)
		default:
		}
		if _, err := os.Stat(ready); err != nil {
			return err
		}
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
		if err == nil {
			_, err = fmt.Sscan(string(raw), &m.pid)
		}
		return err
	})
	return m
}

// command gives one that runs on the machine.
func (m *machine) command(argv ...string) *exec.Cmd {
	return exec.Command("nsenter", slices.Concat([]string{"--target", fmt.Sprint(m.pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--"}, argv)...)
}

// try runs a command to its end.
func (m *machine) try(argv ...string) (string, error) {
	var out, errs bytes.Buffer
	cmd := m.command(argv...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s on %s: %w: %s", strings.Join(argv, " "), m.name, err, errs.String())
	}
	return out.String(), nil
}

// run is try that must not fail.
func (m *machine) run(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := m.try(argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// removeCgroups removes the control groups of these names, in every hierarchy. They stay when all
// their processes have ended; for wait at most, these may still be ending.
func removeCgroups(wait time.Duration, names ...string) error {
	var errs []error
	deadline := time.Now().Add(wait)
	for _, name := range names {
		tops, err := filepath.Glob("/sys/fs/cgroup/*/" + name)
		errs = append(errs, err)
		for _, top := range append(tops, "/sys/fs/cgroup/"+name) {
			var dirs []string
			errs = append(errs, filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			}))
			for _, d := range slices.Backward(dirs) {
				for {
					err := os.Remove(d)
					if err == nil || errors.Is(err, fs.ErrNotExist) {
						break
					}
					if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
						errs = append(errs, err)
						break
					}
					time.Sleep(10 * time.Millisecond)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// testImage is the pods' image, and that of the process that holds a pod's namespaces.
const testImage = "heddle.test/busybox:1"

// greeting is what the pods' web servers say.
const greeting = "hello from a pod"

// writeImage makes an image of busybox, and these files of the machine at their places, as a file
// that `ctr images import` takes.
func writeImage(t *testing.T, path, name string, files ...string) {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skipf("no image for pods: %v (`make test-k8s` installs busybox-static)", err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	add := func(w *tar.Writer, h tar.Header, content []byte) {
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin/", "www/", "tmp/", "etc/"} {
		add(w, tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(w, tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, busybox)
	for _, tool := range []string{"sh", "wget", "httpd", "nc", "sleep", "cat", "seq", "timeout", "touch", "mkfifo"} {
		add(w, tar.Header{Name: "bin/" + tool, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
	}
	add(w, tar.Header{Name: "www/index.html", Typeflag: tar.TypeReg, Mode: 0o644}, []byte(greeting))
	for _, file := range files {
		content, err := os.ReadFile(file)
		testutil.NoError(t, err)
		add(w, tar.Header{Name: strings.TrimPrefix(file, "/"), Typeflag: tar.TypeReg, Mode: 0o755}, content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(layer.Bytes())
	var image bytes.Buffer
	w = tar.NewWriter(&image)
	add(w, tar.Header{Name: "config.json", Mode: 0o644}, fmt.Appendf(nil, `{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin:/usr/bin"],"Cmd":["/bin/sleep","2147483647"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}`,
		hex.EncodeToString(sum[:])))
	add(w, tar.Header{Name: "manifest.json", Mode: 0o644}, fmt.Appendf(nil, `[{"Config":"config.json","RepoTags":[%q],"Layers":["layer.tar"]}]`, name))
	add(w, tar.Header{Name: "layer.tar", Mode: 0o644}, layer.Bytes())
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, image.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// containerdConfig is what docs/howto/kubernetes.md says, and what only this kind of machine needs:
// images without a registry, no CAP_SYS_RESOURCE.
const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + testImage + `"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.heddle]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["io.heddle.intercept", "io.heddle.verbs", "io.heddle.verbs-spin-us"]
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.heddle.options]
      BinaryName = "/opt/heddle/bin/heddle-runtime"
`

// kubeletConfig does without what a container of a hybrid host cannot give.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
localStorageCapacityIsolation: false
maxOpenFiles: 20000
oomScoreAdj: 0
evictionHard: {}
resolvConf: ""
syncFrequency: 5s
`

// cluster is a Kubernetes of two machines; the control plane is on the first.
type cluster struct {
	dir      string
	machines []*machine
	kubectl  []string
	programs []*daemon
	chained  bool   // Heddle stands behind another network
	ref      string // name of Heddle's image
}

// needPrograms skips a test without what comes from Debian's packages.
func needPrograms(t *testing.T) {
	t.Helper()
	for _, p := range []string{"containerd", "ctr", "runc", "unshare", "nsenter", "ip"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s is not installed (`make test-k8s` does)", p)
		}
	}
	if _, err := os.Stat(loopback); err != nil {
		t.Skipf("%v (`make test-k8s` installs containernetworking-plugins)", err)
	}
}

// startCluster starts a whole Kubernetes without a network. It ends with the test.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	needPrograms(t)
	c := &cluster{dir: t.TempDir()}
	etcd, apiserver, manager, scheduler, kubelet := program(t, "etcd"), program(t, "kube-apiserver"), program(t, "kube-controller-manager"), program(t, "kube-scheduler"), program(t, "kubelet")
	// Of Heddle's agents, and of containerd's containers.
	groups := []string{"heddle-k8s-n1", "heddle-k8s-n2", "k8s.io"}
	if err := removeCgroups(0, groups...); err != nil {
		t.Skipf("control groups of a containerd that runs, or of a run of this test: %v", err)
	}
	t.Cleanup(func() {
		if err := removeCgroups(waitTimeout, groups...); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	n1, n2 := startMachine(t, c.dir, "n1", "10.77.0.1"), startMachine(t, c.dir, "n2", "10.77.0.2")
	c.machines = []*machine{n1, n2}
	link := exec.Command("ip", "link", "add", "u0", "netns", fmt.Sprint(n1.pid), "type", "veth", "peer", "name", "u0", "netns", fmt.Sprint(n2.pid))
	if out, err := link.CombinedOutput(); err != nil {
		t.Fatalf("link of the machines: %v: %s", err, out)
	}
	for _, m := range c.machines {
		m.run(t, "ip", "addr", "add", m.addr+"/24", "dev", "u0")
		m.run(t, "ip", "link", "set", "u0", "up")
	}

	file := func(name string) string { return filepath.Join(c.dir, name) }
	writeKey(t, file("sa.key"))
	write(t, file("tokens.csv"), "test-token,admin,1,system:masters\n")
	write(t, file("kubeconfig"), `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://10.77.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: test-token}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`)
	write(t, file("kubelet.yaml"), kubeletConfig)
	write(t, file("config.toml"), containerdConfig)
	writeImage(t, file("image.tar"), testImage)
	writeImage(t, file("verbs.tar"), verbsImage, filesOf(t, "ib_write_bw")...)
	c.kubectl = []string{program(t, "kubectl"), "--kubeconfig", file("kubeconfig"), "--cache-dir", file("cache")}

	c.start(t, "etcd", n1.command(etcd, "--data-dir", file("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2381", "--advertise-client-urls", "http://127.0.0.1:2381"))
	c.start(t, "kube-apiserver", n1.command(apiserver, "--etcd-servers=http://127.0.0.1:2381", "--bind-address=10.77.0.1", "--secure-port=6443",
		"--advertise-address=10.77.0.1", "--cert-dir="+file("certs"), "--service-account-key-file="+file("sa.key"), "--service-account-signing-key-file="+file("sa.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file="+file("tokens.csv"),
		"--authorization-mode=RBAC", "--kubelet-preferred-address-types=InternalIP", "--allow-privileged"))
	testutil.EventuallyNil(t, "API server ready", func() error {
		_, err := c.try("", "get", "--raw=/readyz")
		return err
	})
	c.start(t, "kube-controller-manager", n1.command(manager, "--kubeconfig", file("kubeconfig"), "--leader-elect=false",
		"--service-account-private-key-file="+file("sa.key"), "--root-ca-file="+file("certs/apiserver.crt")))
	c.start(t, "kube-scheduler", n1.command(scheduler, "--kubeconfig", file("kubeconfig"), "--leader-elect=false"))
	for _, m := range c.machines {
		m.run(t, "cp", file("config.toml"), "/etc/containerd/config.toml")
		c.start(t, "containerd-"+m.name, m.command("containerd"))
		testutil.EventuallyNil(t, "containerd on "+m.name, func() error {
			_, err := m.try("ctr", "version")
			return err
		})
		m.run(t, "ctr", "-n", "k8s.io", "images", "import", file("image.tar"))
		m.run(t, "ctr", "-n", "k8s.io", "images", "import", file("verbs.tar"))
		c.start(t, "kubelet-"+m.name, m.command(kubelet, "--kubeconfig", file("kubeconfig"), "--config", file("kubelet.yaml"),
			"--hostname-override", m.name, "--node-ip", m.addr, "--root-dir", "/var/lib/kubelet"))
	}
	t.Cleanup(c.stop)
	return c
}

// start runs a program on a machine until the test ends.
func (c *cluster) start(t *testing.T, name string, cmd *exec.Cmd) {
	t.Helper()
	c.programs = append(c.programs, startDaemon(t, c.dir, name, cmd))
}

// stop ends the machines with all that runs there, before the programs that only wait for what they
// have started there.
func (c *cluster) stop() {
	for _, m := range c.machines {
		_ = syscall.Kill(m.pid, syscall.SIGKILL)
	}
	late := time.After(waitTimeout)
	for _, p := range c.programs {
		select {
		case <-p.done:
		case <-late: // it is killed by its own cleanup
		}
	}
}

// try runs kubectl with input, and gives what it printed.
func (c *cluster) try(input string, args ...string) (string, error) {
	return kubectlOutput(c.machines[0].command(slices.Concat(c.kubectl, args)...), input)
}

// run is try that must not fail.
func (c *cluster) run(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, err := c.try(input, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

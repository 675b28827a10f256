package baseline

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/netns"
)

// How long parts of Docker may take, on a busy machine.
const (
	dockerReady = 2 * time.Minute
	dockerPoll  = 50 * time.Millisecond
)

const (
	overlayNetwork = "peers"
	overlaySubnet  = "10.210.0.0/24"
	image          = "peers"
)

// docker is a swarm of two dockerds, one on each host. n1/c1 is on the overlay network and the
// first host's bridge, n1/c2 on that bridge, n2/c1 on the overlay network.
type docker struct {
	hosts     [2]Host
	daemons   []*daemon
	made      []string              // of fixedDirs
	addresses map[string]netip.Addr // of servers, by the lab's name of the container
}

// daemon is a dockerd that runs.
type daemon struct {
	cmd   *exec.Cmd
	ended chan struct{}
	log   string
}

// startDocker starts Docker on two hosts, makes its networks and starts the containers.
func startDocker(ctx context.Context, hosts [2]Host, program string) (d *docker, err error) {
	d = &docker{hosts: hosts, addresses: map[string]netip.Addr{}}
	for _, p := range []string{"dockerd", "docker", "containerd", "iptables"} {
		if _, err := exec.LookPath(p); err != nil {
			return nil, fmt.Errorf("%s is not installed (Debian: docker.io, iptables)", p)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.stop())
		}
	}()
	if d.made, err = makeFixedDirs(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dockerReady)
	defer cancel()
	for _, h := range hosts {
		one, err := startDaemon(h)
		if err != nil {
			return nil, err
		}
		d.daemons = append(d.daemons, one)
	}
	root, err := emptyRoot()
	if err != nil {
		return nil, err
	}
	prepare := func(i int) func() error {
		return func() error {
			if err := d.await(ctx, i); err != nil {
				return err
			}
			_, err := d.cli(ctx, i, root, "import", "-", image)
			return err
		}
	}
	if err := together(prepare(0), prepare(1)); err != nil {
		return nil, err
	}
	return d, d.wire(ctx, program)
}

// together calls functions at the same time.
func together(fns ...func() error) error {
	errs := make([]error, len(fns))
	var wg sync.WaitGroup
	for i, fn := range fns {
		wg.Go(func() { errs[i] = fn() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// wire makes the networks and the containers on them.
func (d *docker) wire(ctx context.Context, program string) error {
	first := d.hosts[0].Underlay.Addr().String()
	if _, err := d.cli(ctx, 0, "", "swarm", "init", "--advertise-addr", first, "--listen-addr", first+":2377", "--data-path-addr", first); err != nil {
		return err
	}
	token, err := d.cli(ctx, 0, "", "swarm", "join-token", "-q", "worker")
	if err != nil {
		return err
	}
	second := d.hosts[1].Underlay.Addr().String()
	if _, err := d.cli(ctx, 1, "", "swarm", "join", "--advertise-addr", second, "--listen-addr", second+":2377", "--data-path-addr", second,
		"--token", token, first+":2377"); err != nil {
		return err
	}
	if _, err := d.cli(ctx, 0, "", "network", "create", "-d", "overlay", "--attachable", "--subnet", overlaySubnet, overlayNetwork); err != nil {
		return err
	}
	start := func(host int, name, network string) func() error {
		return func() error {
			_, err := d.cli(ctx, host, "", "run", "-d", "--name", name, "--network", network, "--security-opt", "seccomp=unconfined",
				"--ulimit", "nofile=20000:20000",
				"-v", "/usr:/usr:ro", "-v", "/tmp:/tmp", "-v", program+":"+program+":ro", image, "sleep", "infinity")
			return err
		}
	}
	if err := together(start(0, "c1", overlayNetwork), start(0, "c2", "bridge"), start(1, "c1", overlayNetwork)); err != nil {
		return err
	}
	if _, err := d.cli(ctx, 0, "", "network", "connect", "bridge", "c1"); err != nil {
		return err
	}
	for container, at := range map[string]struct {
		host          int
		name, network string
	}{"n1/c2": {0, "c2", "bridge"}, "n2/c1": {1, "c1", overlayNetwork}} {
		text, err := d.cli(ctx, at.host, "", "inspect", "-f", "{{(index .NetworkSettings.Networks \""+at.network+"\").IPAddress}}", at.name)
		if err != nil {
			return err
		}
		if d.addresses[container], err = netip.ParseAddr(text); err != nil {
			return fmt.Errorf("address of %s on network %s: %w", at.name, at.network, err)
		}
	}
	return nil
}

func (h Host) dockerSocket() string { return "unix://" + filepath.Join(h.Dir, "docker.sock") }

// fixedDirs are where containerd's shims have their sockets and Docker's networks their files,
// whatever they are told.
var fixedDirs = []string{"/run/containerd", "/var/lib/docker"}

// makeFixedDirs makes those that are not there and gives them.
func makeFixedDirs() (made []string, err error) {
	for _, dir := range fixedDirs {
		if err := os.Mkdir(dir, 0o711); err == nil {
			made = append(made, dir)
		} else if !errors.Is(err, os.ErrExist) {
			return made, err
		}
	}
	return made, nil
}

// startDaemon starts dockerd on a host. The shell enters the host's cgroup first, so that nothing
// of it is ever found anywhere else. Mounts are its own, and the folders that cannot be chosen:
// killed with everything it started, it leaves nothing.
func startDaemon(h Host) (*daemon, error) {
	d := &daemon{ended: make(chan struct{}), log: filepath.Join(h.Dir, "dockerd.log")}
	log, err := os.Create(d.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	config := filepath.Join(h.Dir, "daemon.json") // not the machine's
	if err := os.WriteFile(config, []byte("{}\n"), 0o600); err != nil {
		return nil, err
	}
	mounts := ""
	for _, dir := range fixedDirs {
		mounts += "mount -t tmpfs tmpfs " + dir + " && "
	}
	words := joined(h.Cgroups[:1], "unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", mounts+`exec "$@"`, "sh",
		"dockerd", "--data-root", filepath.Join(h.Dir, "data"), "--exec-root", filepath.Join(h.Dir, "exec"),
		"--pidfile", filepath.Join(h.Dir, "pid"), "-H", h.dockerSocket(), "--cgroup-parent", h.Cgroup, "--storage-driver", "overlay2",
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--config-file", config)
	d.cmd = exec.Command(words[0], words[1:]...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // ^C is the bench's to pass on
	if err := netns.Start(h.Netns, d.cmd); err != nil {
		return nil, fmt.Errorf("start dockerd: %w", err)
	}
	go func() {
		_ = d.cmd.Wait() // how it ends shows in what it answers
		close(d.ended)
	}()
	return d, nil
}

// await waits until the dockerd of host i answers.
func (d *docker) await(ctx context.Context, i int) error {
	for {
		_, err := d.cli(ctx, i, "", "version", "--format", "{{.Server.Version}}")
		if err == nil {
			return nil
		}
		select {
		case <-d.daemons[i].ended:
			return fmt.Errorf("dockerd ended: %s", lastLines(d.daemons[i].log))
		case <-ctx.Done():
			return fmt.Errorf("dockerd does not answer: %w: %s", err, lastLines(d.daemons[i].log))
		case <-time.After(dockerPoll):
		}
	}
}

// lastLines gives the end of a log.
func lastLines(path string) string {
	const limit = 600
	raw, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(raw[max(0, len(raw)-limit):]))
}

// command gives Docker's command line for host i.
func (d *docker) command(ctx context.Context, i int, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "docker", append([]string{"-H", d.hosts[i].dockerSocket()}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+d.hosts[i].Dir, "DOCKER_CONTEXT=", "DOCKER_HOST=")
	return cmd
}

// cli runs Docker's command line to its end.
func (d *docker) cli(ctx context.Context, i int, in string, args ...string) (string, error) {
	cmd := d.command(ctx, i, args...)
	cmd.Stdin = strings.NewReader(in)
	var out, complaint strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", strings.Join(args[:min(2, len(args))], " "), err, strings.TrimSpace(complaint.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// at gives the host and the name of the container that stands for one of the lab's.
func (d *docker) at(container string) (host int, name string) {
	node, name, _ := strings.Cut(container, "/")
	if node == "n2" {
		host = 1
	}
	return host, name
}

// Exec runs args in a container by `docker exec`.
func (d *docker) Exec(ctx context.Context, _ bench.Mode, container string, args ...string) *exec.Cmd {
	host, name := d.at(container)
	return d.command(ctx, host, append([]string{"exec", "-i", name}, args...)...)
}

// IP gives a server's address: on one host the bridge's, between hosts the overlay network's.
func (d *docker) IP(_ context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	a, ok := d.addresses[container]
	if !ok {
		return a, fmt.Errorf("mode %s has no server %s", mode, container)
	}
	return a, nil
}

// stop kills the daemons. What they started, and whatever is left in their hosts, goes with those,
// by their cgroups: asked to end, they would take seconds for nothing.
func (d *docker) stop() error {
	var errs []error
	for _, one := range d.daemons {
		if err := one.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			errs = append(errs, err)
		}
		<-one.ended
	}
	for _, dir := range d.made {
		// Somebody else's Docker may have come to use it.
		if err := os.Remove(dir); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EBUSY) && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	d.daemons, d.made = nil, nil
	return errors.Join(errs...)
}

// settings gives versions and networks for the report.
func (d *docker) settings(ctx context.Context) ([]string, error) {
	version, err := d.cli(ctx, 0, "", "version", "--format", "dockerd {{.Server.Version}}{{range .Server.Components}}{{if ne .Name \"Engine\"}}, {{.Name}} {{.Version}}{{end}}{{end}}")
	if err != nil {
		return nil, err
	}
	rules, err := run(ctx, "iptables", "--version")
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, network := range []string{overlayNetwork, "bridge"} {
		text, err := d.cli(ctx, 0, "", "network", "inspect", "-f", "network {{.Name}}: driver {{.Driver}}, options {{json .Options}}", network)
		if err != nil {
			return nil, err
		}
		lines = append(lines, text)
	}
	return append([]string{version + "; " + rules + "; swarm of two nodes, traffic not encrypted; containers without seccomp filter, programs by `docker exec`"}, lines...), nil
}

// pid gives the first process of a container on host i.
func (d *docker) pid(ctx context.Context, i int, name string) (string, error) {
	return d.cli(ctx, i, "", "inspect", "-f", "{{.State.Pid}}", name)
}

// emptyRoot is a root file system as a tar archive: directories, and links into /usr, which is the
// machine's own.
func emptyRoot() (string, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var errs []error
	for _, dir := range []string{"usr", "etc", "tmp", "root", "proc", "sys", "dev"} {
		errs = append(errs, w.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}))
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		errs = append(errs, w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeSymlink, Linkname: "usr/" + dir}))
	}
	if err := errors.Join(append(errs, w.Close())...); err != nil {
		return "", fmt.Errorf("make image: %w", err)
	}
	return b.String(), nil
}

// Package migrate moves a stopped container to another node and times each step: table 4 of the
// Slim paper.
package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/netns"
)

// Steps are the steps of a migration in the order of the report, from the stop of the container to
// the first byte that peers get from it at its new node.
var Steps = []string{
	"stop the container", "extract its file system into an image", "transfer the image", "restore the file system",
	"heddle migrate", "attach to the new node", "start the container", "first byte at peers on both nodes",
}

// Result is what Run found.
type Result struct {
	// ImageBytes is the size of the container's image.
	ImageBytes int64 `json:"image_bytes"`
	// Steps are the times of each of Steps by mode, in seconds, one a run; Total those from stop to
	// first byte.
	Steps map[bench.Mode][][]float64 `json:"steps"`
	Total map[bench.Mode][]float64   `json:"total"`
}

// Options are Run's.
type Options struct {
	Runs    int
	Sockets [2]string // of the agents of n1 and n2
	Netns   [2]string // paths of these nodes' network namespaces
	Runtime string    // heddle-runtime
	// ImageBytes is how large the container's image is to be; the program that it runs is the
	// least.
	ImageBytes int64
}

// name is the endpoint's, and the container's.
const name = "bench-migrate"

// Run moves a stopped container with its address between two nodes of the lab, and says what each
// step took, with interception (Heddle) and without (Overlay). words are those that run
// loadgen.Main in containers of the lab.
func Run(ctx context.Context, place bench.Place, words []string, o Options, log io.Writer) (r Result, err error) {
	dir, err := os.MkdirTemp("", "heddle-bench-")
	if err != nil {
		return r, fmt.Errorf("make directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r = Result{Steps: make(map[bench.Mode][][]float64), Total: make(map[bench.Mode][]float64)}
	for run := range o.Runs {
		for i := range 2 {
			mode := []bench.Mode{bench.Overlay, bench.Heddle}[(run+i)%2] // what the machine does meanwhile falls on both
			m := migration{Options: o, place: place, words: words, mode: mode, dir: filepath.Join(dir, fmt.Sprintf("%s-%d", mode, run))}
			steps, err := m.measure(ctx)
			if err != nil {
				return r, fmt.Errorf("%s, run %d: %w", mode, run+1, err)
			}
			total := 0.0
			for _, s := range steps {
				total += s
			}
			r.ImageBytes = m.image
			r.Steps[mode], r.Total[mode] = append(r.Steps[mode], steps), append(r.Total[mode], total)
			fmt.Fprintf(log, "%s, run %d: %.3f s\n", mode, run+1, total)
		}
	}
	return r, nil
}

// Median gives the median of step i's times in a mode.
func (r Result) Median(mode bench.Mode, i int) float64 {
	var all []float64
	for _, run := range r.Steps[mode] {
		all = append(all, run[i])
	}
	return bench.Median(all)
}

// MedianTotal gives the median of the whole.
func (r Result) MedianTotal(mode bench.Mode) float64 { return bench.Median(r.Total[mode]) }

// migration is one run.
type migration struct {
	Options
	place bench.Place
	words []string
	mode  bench.Mode
	dir   string
	image int64
	addr  netip.Addr
}

// on are the files and names of a node, 0 or 1.
func (m *migration) on(node int) (root, bundle, space string) {
	bundle = filepath.Join(m.dir, fmt.Sprint("n", node+1))
	return filepath.Join(bundle, "rootfs"), bundle, fmt.Sprintf("heddle-bench-%d-%d", os.Getpid(), node)
}

// measure starts the container on the first node and moves it to the second. It leaves nothing
// behind.
func (m *migration) measure(ctx context.Context) (steps []float64, err error) {
	defer func() { err = errors.Join(err, m.clean(context.WithoutCancel(ctx))) }()
	if err := m.makeRoot(); err != nil {
		return nil, err
	}
	if err := m.attach(ctx, 0); err != nil {
		return nil, err
	}
	server, err := m.start(ctx, 0)
	if err != nil {
		return nil, err
	}
	if err := netns.Create(last(m.on(1))); err != nil { // the new node's can be there before
		return nil, err
	}
	step := func(do func() error) {
		if err == nil {
			began := time.Now()
			err = do()
			steps = append(steps, time.Since(began).Seconds())
		}
	}
	image := filepath.Join(m.dir, "image.tar")
	root, _, _ := m.on(0)
	newRoot, _, _ := m.on(1)
	step(func() error { return m.stop(ctx, 0, server) })
	step(func() error { return proc.Run(ctx, "tar", "-C", root, "-cf", image, ".") })
	step(func() error { return m.transfer(image, image+".2") })
	step(func() error {
		return errors.Join(os.MkdirAll(newRoot, 0o755), proc.Run(ctx, "tar", "-C", newRoot, "-xf", image+".2"))
	})
	step(func() error {
		_, err := m.agent(0).Migrate(ctx, name, api.MigrateRequest{To: "n2"})
		return err
	})
	step(func() error { return m.attach(ctx, 1) })
	if err != nil {
		return nil, err
	}
	waits, err := m.await(ctx)
	if err != nil {
		return nil, err
	}
	step(func() error { server, err = m.start(ctx, 1); return err })
	ready := time.Now()
	reached, err := waits()
	if err != nil {
		return nil, err
	}
	return append(steps, max(reached.Sub(ready).Seconds(), 0)), m.stop(ctx, 1, server)
}

func last(_, _, c string) string { return c }

func (m *migration) agent(node int) *api.Client { return api.Dial(m.Sockets[node]) }

// makeRoot makes the container's files: the program it runs, and more up to the size asked for.
func (m *migration) makeRoot() error {
	root, _, _ := m.on(0)
	for _, d := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	program, err := os.ReadFile(m.words[0])
	if err != nil {
		return fmt.Errorf("the container's program: %w", err)
	}
	m.image = max(m.ImageBytes, int64(len(program)))
	return errors.Join(os.WriteFile(filepath.Join(root, "heddle"), program, 0o755),
		os.WriteFile(filepath.Join(root, "data"), make([]byte, m.image-int64(len(program))), 0o644))
}

// attach makes the endpoint on a node.
func (m *migration) attach(ctx context.Context, node int) error {
	_, _, space := m.on(node)
	if !netns.Exists(space) {
		if err := netns.Create(space); err != nil {
			return err
		}
	}
	e, err := m.agent(node).CreateEndpoint(ctx, api.EndpointRequest{Name: name, NetnsPath: netns.Path(space), Intercepted: m.mode == bench.Heddle})
	if err != nil {
		return err
	}
	if m.addr.IsValid() && e.Addr4() != m.addr {
		return fmt.Errorf("endpoint has address %s at its new node, want %s", e.Addr4(), m.addr)
	}
	m.addr = e.Addr4()
	return nil
}

// port is where the container's server listens.
const port = "7777"

// start runs the container, and returns when its server listens.
func (m *migration) start(ctx context.Context, node int) (*proc.Server, error) {
	_, bundle, space := m.on(node)
	config := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{"cwd": "/", "user": map[string]int{"uid": 0, "gid": 0},
			"args": []string{"/heddle", "bench", "peer", "server", "--listen", "0.0.0.0:" + port}},
		"root": map[string]any{"path": "rootfs"},
		"linux": map[string]any{"namespaces": []map[string]string{{"type": "mount"}, {"type": "pid"},
			{"type": "network", "path": netns.Path(space)}}},
		"mounts": []map[string]string{{"destination": "/proc", "type": "proc", "source": "proc"}},
	}
	program := "runc"
	if m.mode == bench.Heddle {
		program = m.Runtime
		config["annotations"] = map[string]string{"io.heddle.endpoint": name,
			"io.heddle.seccomp-socket": filepath.Join(filepath.Dir(m.Sockets[node]), "seccomp.sock")}
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o644); err != nil {
		return nil, err
	}
	return proc.Start(ctx, exec.CommandContext(ctx, program, "--root", filepath.Join(m.dir, "runc"), "run", "--bundle", bundle, name), loadgen.Ready)
}

// stop kills the container and waits until nothing of it is left.
func (m *migration) stop(ctx context.Context, _ int, server *proc.Server) error {
	err := proc.Run(ctx, "runc", "--root", filepath.Join(m.dir, "runc"), "kill", name, "KILL")
	if err != nil {
		return err
	}
	_ = server.Stop() // a killed server ends with a code of its own
	return nil
}

// transfer sends a file from the first node to the second, over one TCP connection of the underlay.
func (m *migration) transfer(from, to string) (err error) {
	var l net.Listener
	at, err := underlayOf(m.Netns[1])
	if err != nil {
		return err
	}
	if err := netns.Do(m.Netns[1], func() error { l, err = net.Listen("tcp", net.JoinHostPort(at, "0")); return err }); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	received := make(chan error, 1)
	go func() { received <- receiveFile(l, to) }()
	var c net.Conn
	if err := netns.Do(m.Netns[0], func() error { c, err = net.Dial("tcp", l.Addr().String()); return err }); err != nil {
		return err
	}
	f, err := os.Open(from)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	_, err = io.Copy(c, f)
	return errors.Join(err, c.Close(), f.Close(), <-received)
}

func receiveFile(l net.Listener, to string) error {
	c, err := l.Accept()
	if err != nil {
		return err
	}
	f, err := os.Create(to)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	_, err = io.Copy(f, c)
	return errors.Join(err, f.Close(), c.Close())
}

// underlayOf gives the IPv4 address of the lab's fabric device in a node's namespace.
func underlayOf(space string) (addr string, err error) {
	err = netns.Do(space, func() error {
		i, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := i.Addrs()
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
				addr = n.IP.String()
			}
		}
		return err
	})
	if err == nil && addr == "" {
		err = errors.New("the node has no IPv4 address on eth0")
	}
	return addr, err
}

// await starts clients on both nodes that connect until the server answers; done gives when the
// last of them was.
func (m *migration) await(ctx context.Context) (done func() (time.Time, error), err error) {
	to := net.JoinHostPort(m.addr.String(), port)
	var clients []*proc.Server
	for _, container := range []string{"n1/c1", "n2/c1"} {
		c, err := proc.Start(ctx, m.place.Exec(ctx, m.mode, container, bench.Command(m.words, "await", "--to", to)...), loadgen.Ready)
		if err != nil {
			return nil, err
		}
		clients = append(clients, c)
	}
	return func() (latest time.Time, err error) {
		for _, c := range clients {
			if err := <-c.Exited; err != nil {
				return latest, c.Explain(err)
			}
			var r loadgen.Reached
			lines := strings.Split(c.Output.String(), "\n")
			if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil {
				return latest, fmt.Errorf("await: %w", c.Explain(err))
			}
			if at := time.Unix(0, r.At); at.After(latest) {
				latest = at
			}
		}
		return latest, nil
	}, nil
}

// clean takes away whatever a run left.
func (m *migration) clean(ctx context.Context) error {
	_ = proc.Run(ctx, "runc", "--root", filepath.Join(m.dir, "runc"), "delete", "-f", name) // it has mostly gone
	var errs []error
	for node := range 2 {
		if err := m.agent(node).DeleteEndpoint(ctx, name); err != nil && !errors.Is(err, api.ErrNotFound) {
			errs = append(errs, err)
		}
		if _, _, space := m.on(node); netns.Exists(space) {
			errs = append(errs, netns.Delete(space))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(m.dir))...)
}

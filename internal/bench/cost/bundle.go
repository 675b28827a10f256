package cost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/netns"
)

// container is a container that the bench starts itself, in a network namespace with an endpoint.
type container struct {
	options  Options
	endpoint string // its name, and the container's
	space    string // name of the network namespace
	dir      string // has rootfs and, once it was written, config.json
	args     []string
}

// newCostContainer makes the endpoint, and a root file system with one program: path is its name
// there.
func newCostContainer(ctx context.Context, o Options, dir, endpoint string, intercepted bool, path string, program []byte) (c *container, err error) {
	c = &container{options: o, endpoint: endpoint, space: fmt.Sprintf("heddle-%s-%d", endpoint, os.Getpid()), dir: dir, args: []string{path}}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.remove(context.WithoutCancel(ctx)))
		}
	}()
	for _, d := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(dir, "rootfs", d), 0o755); err != nil {
			return c, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "rootfs", path), program, 0o755); err != nil {
		return c, fmt.Errorf("the container's program: %w", err)
	}
	if err := netns.Create(c.space); err != nil {
		return c, err
	}
	_, err = c.agent().CreateEndpoint(ctx, api.EndpointRequest{Name: endpoint, NetnsPath: netns.Path(c.space), Intercepted: intercepted})
	return c, err
}

func (c *container) agent() *api.Client { return api.Dial(c.options.Nodes[0].APISocket) }

// remove takes everything away. ctx must not be over.
func (c *container) remove(ctx context.Context) error {
	_ = proc.Run(ctx, "runc", "--root", c.root(), "delete", "-f", c.endpoint) // it has mostly gone
	err := c.agent().DeleteEndpoint(ctx, c.endpoint)
	if errors.Is(err, api.ErrNotFound) {
		err = nil
	}
	if netns.Exists(c.space) {
		err = errors.Join(err, netns.Delete(c.space))
	}
	return errors.Join(err, os.RemoveAll(c.dir))
}

// root is where runc keeps its state.
func (c *container) root() string { return filepath.Join(c.dir, "runc") }

// annotated are the annotations of a container that is Heddle's.
func (c *container) annotated() map[string]string {
	return map[string]string{"io.heddle.endpoint": c.endpoint, "io.heddle.seccomp-socket": c.options.Nodes[0].SeccompSocket}
}

// write writes the container's configuration anew. seccomp is its profile, nil for none.
func (c *container) write(annotations map[string]string, seccomp any) error {
	linux := map[string]any{"namespaces": []map[string]string{{"type": "mount"}, {"type": "pid"}, {"type": "network", "path": netns.Path(c.space)}}}
	if seccomp != nil {
		linux["seccomp"] = seccomp
	}
	return c.replace(map[string]any{
		"ociVersion":  "1.0.2",
		"process":     map[string]any{"cwd": "/", "user": map[string]int{"uid": 0, "gid": 0}, "args": c.args},
		"root":        map[string]any{"path": "rootfs"},
		"annotations": annotations,
		"linux":       linux,
		"mounts":      []map[string]string{{"destination": "/proc", "type": "proc", "source": "proc"}},
	})
}

func (c *container) replace(config any) error {
	raw, err := json.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.dir, "config.json"), raw, 0o600)
}

// read gives the configuration as it is: the wrapper edits it.
func (c *container) read() (config map[string]any, err error) {
	raw, err := os.ReadFile(filepath.Join(c.dir, "config.json"))
	if err != nil {
		return nil, err
	}
	return config, json.Unmarshal(raw, &config)
}

// pidFile has the container's first process, some time after that began.
func (c *container) pidFile() string { return filepath.Join(c.dir, "pid") }

// pid waits for the container's first process. The pid file must not be an earlier run's.
func (c *container) pid(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, proc.ReadyTimeout)
	defer cancel()
	for {
		raw, err := os.ReadFile(c.pidFile())
		if err == nil {
			return strconv.Atoi(strings.TrimSpace(string(raw)))
		}
		if !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return 0, fmt.Errorf("runc wrote no pid file: %w", ctx.Err())
		}
	}
}

// run gives the command that runs the container by a runtime.
func (c *container) run(ctx context.Context, runtime string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, runtime, "--root", c.root(), "run", "--pid-file", c.pidFile(), "--bundle", c.dir, c.endpoint)
	// The caller's own settings of the wrapper are not what is measured.
	cmd.Env = append(os.Environ(), "HEDDLE_RUNC=", "HEDDLE_SECCOMP_SOCKET=", "HEDDLE_INTERCEPT=")
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

package cost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/netns"
)

// The names of Result.Starts. All but the last nine are until the first instruction of the
// container's program.
const (
	StartProgram   = "the program without a container"
	StartRunc      = "runc, endpoint not intercepted"
	StartOverlay   = "heddle-runtime, endpoint not intercepted"
	StartFiltered  = "runc, Heddle's filter without a listener"
	StartHeddle    = "heddle-runtime, intercepted"
	StartWrapper   = "heddle-runtime until it becomes runc"
	StartFeatures  = "runc features"
	WholeRunc      = "runc, endpoint not intercepted: until it is deleted"
	WholeHeddle    = "heddle-runtime, intercepted: until it is deleted"
	EndpointNetns  = "network namespace made"
	EndpointMade   = "endpoint made, intercepted"
	EndpointGone   = "endpoint deleted, intercepted"
	EndpointPlain  = "endpoint made, not intercepted"
	EndpointNoMore = "endpoint deleted, not intercepted"
	CNIAdd         = "CNI ADD"
	CNIDel         = "CNI DEL"
)

var startNames = []string{StartProgram, StartRunc, StartOverlay, StartFiltered, StartHeddle, StartWrapper, StartFeatures, WholeRunc, WholeHeddle,
	EndpointNetns, EndpointMade, EndpointGone, EndpointPlain, EndpointNoMore, CNIAdd, CNIDel}

// starter measures starts. One goroutine uses it.
type starter struct {
	options        Options
	stamp          string // path of the program
	plain, trapped *container
	withFilter     map[string]any // trapped's configuration as the wrapper left it, without the listener
	ms             map[string][]float64
}

// measureStarts starts containers, and makes endpoints, in turn.
func (r *Result) measureStarts(ctx context.Context, o Options, dir string) (err error) {
	program, err := stampProgram()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	s := &starter{options: o, stamp: filepath.Join(dir, "stamp"), ms: make(map[string][]float64)}
	if err := os.WriteFile(s.stamp, program, 0o755); err != nil {
		return fmt.Errorf("the container's program: %w", err)
	}
	defer func() {
		for _, c := range []*container{s.plain, s.trapped} {
			if c != nil {
				err = errors.Join(err, c.remove(context.WithoutCancel(ctx)))
			}
		}
	}()
	if s.plain, err = newCostContainer(ctx, o, filepath.Join(dir, "plain"), "bench-plain", false, "/stamp", program); err != nil {
		return err
	}
	if s.trapped, err = newCostContainer(ctx, o, filepath.Join(dir, "trapped"), "bench-trapped", true, "/stamp", program); err != nil {
		return err
	}
	// The end of a network namespace keeps the kernel busy for a while, so endpoints are made after
	// all starts.
	for _, steps := range [][]func(context.Context) error{
		{s.program, s.runc, s.overlay, s.heddle, s.filtered, s.wrapper, s.features},
		{s.endpoints, s.cni},
	} {
		if err := s.rounds(ctx, steps); err != nil {
			return err
		}
	}
	for _, name := range startNames {
		if len(s.ms[name]) > 0 {
			r.Starts = append(r.Starts, Duration{name, bench.SpreadOf(s.ms[name]), s.ms[name]})
		}
	}
	return nil
}

// rounds takes all steps in turn, as often as there are to be starts, and once before: that finds
// nothing in the page cache and is not counted. What comes before a step leaves its traces, so the
// order is now one, now the other.
func (s *starter) rounds(ctx context.Context, steps []func(context.Context) error) error {
	counted := s.ms
	defer func() { s.ms = counted }()
	for round := range s.options.Starts + 1 {
		if s.ms = counted; round == 0 {
			s.ms = make(map[string][]float64)
		}
		for i := range steps {
			at := (i + round/2) % len(steps)
			if round%2 == 1 {
				at = len(steps) - 1 - at
			}
			if err := steps[at](ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *starter) note(name string, took time.Duration) {
	s.ms[name] = append(s.ms[name], float64(took)/float64(time.Millisecond))
}

// timed notes how long f takes.
func (s *starter) timed(name string, f func() error) error {
	start := time.Now()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.note(name, time.Since(start))
	return nil
}

// stamped runs cmd, whose end is the program, and notes the time until its first instruction, and
// until cmd's end if whole is not "".
func (s *starter) stamped(name, whole string, cmd *exec.Cmd) error {
	start, err := monotonic()
	if err != nil {
		return err
	}
	out, err := proc.Output(cmd)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	end, err := monotonic()
	if err != nil {
		return err
	}
	first, err := readStamp(out)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.note(name, first-start)
	if whole != "" {
		s.note(whole, end-start)
	}
	return nil
}

func (s *starter) program(ctx context.Context) error {
	return s.stamped(StartProgram, "", exec.CommandContext(ctx, s.stamp))
}

func (s *starter) runc(ctx context.Context) error {
	if err := s.plain.write(nil, nil); err != nil {
		return err
	}
	return s.stamped(StartRunc, WholeRunc, s.plain.run(ctx, "runc"))
}

// overlay has the wrapper find out that the container is not to be intercepted.
func (s *starter) overlay(ctx context.Context) error {
	annotations := s.plain.annotated()
	delete(annotations, "io.heddle.endpoint") // else it would be intercepted whatever its endpoint is
	if err := s.plain.write(annotations, nil); err != nil {
		return err
	}
	return s.stamped(StartOverlay, "", s.plain.run(ctx, s.options.Runtime))
}

// heddle starts an intercepted container.
func (s *starter) heddle(ctx context.Context) error {
	if err := s.trapped.write(s.trapped.annotated(), nil); err != nil {
		return err
	}
	if err := s.stamped(StartHeddle, WholeHeddle, s.trapped.run(ctx, s.options.Runtime)); err != nil || s.withFilter != nil {
		return err
	}
	config, err := s.trapped.read()
	if err != nil {
		return err
	}
	s.withFilter = config
	return withoutListener(config)
}

// filtered starts a container with the same filter, and nobody to hand it to. The first round has
// made its configuration.
func (s *starter) filtered(ctx context.Context) error {
	if err := s.trapped.replace(s.withFilter); err != nil {
		return err
	}
	return s.stamped(StartFiltered, "", s.trapped.run(ctx, "runc"))
}

// withoutListener takes the listener out of a configuration: calls that it would get are refused.
func withoutListener(config map[string]any) error {
	linux, _ := config["linux"].(map[string]any)
	profile, _ := linux["seccomp"].(map[string]any)
	rules, _ := profile["syscalls"].([]any)
	if len(rules) == 0 || profile["listenerPath"] == nil {
		return errors.New("the wrapper left no filter in the container's configuration")
	}
	delete(profile, "listenerPath")
	delete(profile, "listenerMetadata")
	delete(profile, "flags") // of listeners
	for _, r := range rules {
		if rule, _ := r.(map[string]any); rule["action"] == "SCMP_ACT_NOTIFY" {
			rule["action"] = "SCMP_ACT_ERRNO"
		}
	}
	return nil
}

// wrapper has the program in runc's place: what is left is the wrapper, with what it asks its
// runtime.
func (s *starter) wrapper(ctx context.Context) error {
	if err := s.trapped.write(s.trapped.annotated(), nil); err != nil {
		return err
	}
	return s.stamped(StartWrapper, "", s.trapped.run(ctx, s.options.Runtime, "HEDDLE_RUNC="+s.stamp))
}

// features is the question that the wrapper asks runc.
func (s *starter) features(ctx context.Context) error {
	return s.timed(StartFeatures, func() error {
		_, err := proc.Output(exec.CommandContext(ctx, "runc", "features"))
		return err
	})
}

// endpoints makes and deletes an endpoint of each kind.
func (s *starter) endpoints(ctx context.Context) error {
	const name = "bench-endpoint"
	agent := s.plain.agent()
	for _, k := range []struct {
		intercepted bool
		made, gone  string
	}{{true, EndpointMade, EndpointGone}, {false, EndpointPlain, EndpointNoMore}} {
		err := s.inSpace(func(space string) error {
			err := s.timed(k.made, func() error {
				_, err := agent.CreateEndpoint(ctx, api.EndpointRequest{Name: name, NetnsPath: netns.Path(space), Intercepted: k.intercepted})
				return err
			})
			if err != nil {
				return errors.Join(err, ignoreAbsent(agent.DeleteEndpoint(context.WithoutCancel(ctx), name)))
			}
			return s.timed(k.gone, func() error { return agent.DeleteEndpoint(context.WithoutCancel(ctx), name) })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, api.ErrNotFound) {
		return nil
	}
	return err
}

// inSpace runs f while there is a network namespace for it.
func (s *starter) inSpace(f func(space string) error) (err error) {
	space := fmt.Sprintf("heddle-bench-endpoint-%d", os.Getpid())
	if err := s.timed(EndpointNetns, func() error { return netns.Create(space) }); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, netns.Delete(space)) }()
	return f(space)
}

// cni has the plugin do the same.
func (s *starter) cni(ctx context.Context) error {
	if s.options.CNI == "" {
		return nil
	}
	conf, err := json.Marshal(map[string]string{"cniVersion": "1.0.0", "name": "bench", "type": "heddle-cni", "socket": s.options.Nodes[0].APISocket})
	if err != nil {
		return err
	}
	return s.inSpace(func(space string) error {
		call := func(ctx context.Context, verb string) error {
			cmd := exec.CommandContext(ctx, s.options.CNI)
			cmd.Stdin = strings.NewReader(string(conf))
			cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID=bench-cni", "CNI_NETNS="+netns.Path(space), "CNI_IFNAME=eth0",
				"CNI_PATH="+filepath.Dir(s.options.CNI))
			out := &proc.Tail{Limit: proc.TailLimit}
			cmd.Stdout, cmd.Stderr = out, out
			proc.Prepare(cmd)
			if err := netns.Start(s.options.Nodes[0].Netns, cmd); err != nil {
				return err
			}
			if err := cmd.Wait(); err != nil {
				return proc.WithOutput(err, out)
			}
			return nil
		}
		err := s.timed(CNIAdd, func() error { return call(ctx, "ADD") })
		return errors.Join(err, s.timed(CNIDel, func() error { return call(context.WithoutCancel(ctx), "DEL") }))
	})
}

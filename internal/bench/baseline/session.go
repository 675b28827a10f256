package baseline

import (
	"context"
	"errors"
	"slices"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/lab/fabric"
)

// removeTimeout bounds how long hosts take to go, also when the benchmark was interrupted.
const removeTimeout = 2 * time.Minute

// With runs measure with the baselines up that are among modes, on hosts of their own on the fabric
// of the session's lab. They go with measure, however it ends.
func With(ctx context.Context, s *session.Session, modes []bench.Mode, measure func(bench.Place, *Site) error) (err error) {
	o := Options{Modes: modes, Program: s.Program[0], Progress: func(line string) { s.Say("%s", line) }}
	if n := HostsOf(modes); n > 0 {
		l, err := s.Lab.Open()
		if err != nil {
			return err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
			defer cancel()
			err = errors.Join(err, l.RemoveGuests(ctx))
		}()
		if o.Hosts, err = hostsOn(ctx, l, n); err != nil {
			return err
		}
	}
	site, err := Start(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	if slices.Contains(modes, bench.Native) {
		native, down, err := startNative(ctx, s)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, down()) }()
		site.Places[bench.Native] = native
	}
	if slices.Contains(modes, bench.Floor) {
		site.Places[bench.Floor] = floor{s.Lab}
	}
	return measure(bench.Places{Place: s.Lab, Of: site.Places}, site)
}

// hostsOn makes guests of a lab.
func hostsOn(ctx context.Context, l lab.Lab, n int) (hosts []Host, err error) {
	guests, err := l.AddGuests(ctx, n)
	if err != nil {
		return nil, err
	}
	for _, g := range guests {
		hosts = append(hosts, Host{
			Netns: g.Netns, Underlay: g.Underlay, Device: fabric.Device, Dir: g.Dir, Cgroup: g.Cgroup, Cgroups: g.Cgroups, Container: g.Container,
		})
	}
	return hosts, nil
}

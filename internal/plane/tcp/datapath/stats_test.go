package datapath

import (
	"slices"
	"testing"
)

// TestPrograms finds the programs of one of two nodes, and counts what one of them runs.
func TestPrograms(t *testing.T) {
	cfg, other := upgradeConfig(t), upgradeConfig(t)
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := OpenPrograms(other.PinDir); err == nil {
		t.Error("programs of a node that has none")
	}
	neighbour, err := Open(other)
	if err != nil {
		t.Fatal(err)
	}
	defer neighbour.Close()

	p, err := OpenPrograms(cfg.PinDir)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	stop, err := CountRuns()
	if err != nil {
		t.Fatal(err)
	}
	defer stop.Close()
	find := func(name string) ProgramStats {
		t.Helper()
		all, err := p.Read()
		if err != nil {
			t.Fatal(err)
		}
		var found []ProgramStats
		for _, s := range all {
			if s.Name == name {
				found = append(found, s)
			}
		}
		if len(found) != 1 {
			t.Fatalf("%d programs %s among %d, want one", len(found), name, len(all))
		}
		return found[0]
	}
	for _, h := range append(d.hooks(), hook{name: "tcp_events"}) {
		if h.name == "sockops" {
			continue // the hook of tcp_events
		}
		if s := find(h.name); s.Instructions == 0 || s.ID == 0 {
			t.Errorf("%s: %+v", h.name, s)
		}
	}
	before := find("from_underlay")
	const runs = 100
	if _, _, err := d.objs.FromUnderlay.Benchmark(make([]byte, 64), runs, nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := neighbour.objs.FromUnderlay.Benchmark(make([]byte, 64), runs, nil); err != nil {
		t.Fatal(err)
	}
	after := find("from_underlay")
	if n := after.Runs - before.Runs; n != runs {
		t.Errorf("%d runs counted, want %d", n, runs)
	}
	if after.RunTime <= before.RunTime {
		t.Errorf("run time %s, was %s", after.RunTime, before.RunTime)
	}
	ns, err := EmptyRun()
	if err != nil || ns <= 0 {
		t.Errorf("empty run: %g ns, %v", ns, err)
	}
	if all, err := p.Read(); err != nil || slices.ContainsFunc(all, func(s ProgramStats) bool { return s.Name == "empty" }) {
		t.Errorf("an empty program is taken for the node's: %v", err)
	}
}

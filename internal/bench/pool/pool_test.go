package pool

import (
	"slices"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
)

func TestPoolPlace(t *testing.T) {
	p := Place{Lab: session.Lab{Heddle: "heddle", Name: "x"}, Client: "/tmp/c"}
	for mode, want := range map[bench.Mode][]string{
		bench.Pooled: {"--mode", "heddle", "n1/c1", "--", "/tmp/c", "-to", "a"},
		bench.Heddle: {"--mode", "heddle", "n1/c1", "--", "env", "-u", "LD_PRELOAD", "/tmp/c", "-to", "a"},
		bench.Host:   {"--mode", "host", "n1/c1", "--", "/tmp/c", "-to", "a"},
	} {
		got := p.Exec(t.Context(), mode, "n1/c1", "peer", "x", "crr", "-to", "a").Args
		if i := slices.Index(got, "--mode"); i < 0 || !slices.Equal(got[i:], want) {
			t.Errorf("%s: %q, want %q at the end", mode, got, want)
		}
	}
	if got := p.Exec(t.Context(), bench.Pooled, "n1/c1", "peer", "server").Args; !slices.Equal(got[len(got)-2:], []string{"peer", "server"}) {
		t.Errorf("server: %q", got)
	}
}

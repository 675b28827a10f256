package policy

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench/plot"
)

func TestWritePolicy(t *testing.T) {
	result := CapsResult{UnitBPS: 1e8, Limited: "n1/c1", Other: "n1/c2",
		Phases: []CapsPhase{{What: "no <limits>", EndS: 2}, {What: "cap", StartS: 2, EndS: 4, CapBPS: 15e8}},
		Samples: []CapsSample{{Container: "n1/c1", AtS: 0.5, BPS: 2e9}, {Container: "n1/c2", AtS: 0.6, BPS: 1e9},
			{Container: "n1/c1", AtS: 99, BPS: 1e9}, {Container: "n1/c2", AtS: 0, BPS: 1e9}},
	}
	var out strings.Builder
	if err := WriteCapsPlot(&out, result, plot.Text{Title: "A & B"}); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Count(out.String(), plot.HostColour); got != 2 { // the cap and the legend
		t.Errorf("%d lines of caps, want 1 and the legend's", got)
	}
	if err := WriteCapsPlot(io.Discard, CapsResult{}, plot.Text{}); err == nil {
		t.Error("drew nothing")
	}
}

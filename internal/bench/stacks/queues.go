package stacks

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// Queue is what the service of queues measured of itself: nanoseconds of an nqe, or Gb/s of writes
// over the machine's loopback.
type Queue struct {
	// What is "nqe", or "write".
	What string `json:"what"`
	// Of is the threads of an nqe and how many go at a time, or a write's bytes and who sends them,
	// queues or kernel.
	Of    [2]string    `json:"of"`
	Value bench.Spread `json:"value"`
}

// queues has heddle-stack measure so many times.
func queues(ctx context.Context, s *session.Session) ([]Queue, error) {
	var order [][3]string
	values := map[[3]string][]float64{}
	for range s.Runs {
		program := s.Lab.Sibling("heddle-stack")
		out, err := exec.CommandContext(ctx, program, "--measure", strconv.FormatInt(s.Duration.Milliseconds(), 10)).Output()
		if err != nil {
			return nil, fmt.Errorf("measure queues: %s: %w", program, err)
		}
		for line := range strings.Lines(string(out)) {
			key, value, err := parseQueue(line)
			if err != nil {
				return nil, err
			}
			if values[key] == nil {
				order = append(order, key)
			}
			values[key] = append(values[key], value)
		}
	}
	all := make([]Queue, 0, len(order))
	for _, key := range order {
		all = append(all, Queue{key[0], [2]string{key[1], key[2]}, bench.SpreadOf(values[key])})
	}
	return all, nil
}

// parseQueue reads a line of heddle-stack --measure.
func parseQueue(line string) (key [3]string, value float64, err error) {
	words := strings.Fields(line)
	if len(words) != 4 || words[0] != "nqe" && words[0] != "write" {
		return key, 0, fmt.Errorf("heddle-stack --measure says %q", line)
	}
	value, err = strconv.ParseFloat(words[3], 64)
	return [3]string(words), value, err
}

// queueGrid is the table of them.
func (r Result) queueGrid() report.Grid {
	g := report.Grid{Title: "Queues: an nqe, and writes over loopback by a ring and by the kernel", Rows: [][]string{{"", "", "", "ns, or Gb/s"}}}
	for _, q := range r.Queues {
		one, two := q.Of[0]+" threads", q.Of[1]+" at a time"
		if q.What == "write" {
			one, two = q.Of[0]+" bytes", q.Of[1]
		}
		g.Add(q.What, one, two, q.Value.Text())
	}
	return g
}

package rdma

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Figure is what a program of perftest, or rstream, says of its run.
type Figure struct {
	BytesPerS    float64
	MessagesPerS float64
	LatencyUs    float64 // half a round trip: the typical one, or the mean of a run by time
	LatencyP99Us float64
}

// The heads of perftest's tables, without their blanks, and the columns that are read.
var heads = []struct {
	head    string
	columns int
	read    func([]float64) Figure
}{
	{"#bytes#iterationsBWpeak[MB/sec]BWaverage[MB/sec]MsgRate[Mpps]", 5, func(v []float64) Figure {
		return Figure{BytesPerS: v[3] * (1 << 20), MessagesPerS: v[4] * 1e6} // its MB are 2^20 bytes
	}},
	{"#bytes#iterationst_min[usec]t_max[usec]t_typical[usec]t_avg[usec]t_stdev[usec]99%percentile[usec]99.9%percentile[usec]", 9, func(v []float64) Figure {
		return Figure{LatencyUs: v[4], LatencyP99Us: v[7]}
	}},
	{"#bytes#iterationst_avg[usec]tpsaverage", 4, func(v []float64) Figure {
		return Figure{LatencyUs: v[2]}
	}},
}

// ParsePerftest reads what a client of perftest prints: the one row beneath the table's head.
func ParsePerftest(out []byte) (f Figure, err error) {
	var read func([]float64) Figure
	columns := 0
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if read != nil {
			values, err := numbers(fields, columns)
			if err != nil {
				return f, fmt.Errorf("perftest: row %q: %w", line, err)
			}
			return read(values), nil
		}
		for _, h := range heads {
			if strings.Join(fields, "") == h.head {
				read, columns = h.read, h.columns
			}
		}
	}
	return f, fmt.Errorf("perftest: no table with a row: %q", bytes.TrimSpace(out))
}

func numbers(fields []string, want int) (values []float64, err error) {
	if len(fields) != want {
		return nil, fmt.Errorf("%d columns, want %d", len(fields), want)
	}
	for _, field := range fields {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil || v < 0 || math.IsInf(v, 0) || math.IsNaN(v) {
			return nil, fmt.Errorf("%q is no number of zero or more", field)
		}
		values = append(values, v)
	}
	return values, nil
}

// ParseRstream reads what rstream prints: one row, with throughput before the last column.
func ParseRstream(out []byte) (f Figure, err error) {
	head := []string{"name", "bytes", "xfers", "iters", "total", "time", "Gb/sec", "usec/xfer"}
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		if !slices.Equal(strings.Fields(lines.Text()), head) || !lines.Scan() {
			continue
		}
		fields := strings.Fields(lines.Text())
		if len(fields) != len(head) {
			break
		}
		values, err := numbers(fields[6:7], 1)
		if err != nil {
			return f, fmt.Errorf("rstream: %w", err)
		}
		return Figure{BytesPerS: values[0] * 1e9 / 8}, nil
	}
	return f, fmt.Errorf("rstream: no table with a row: %q", bytes.TrimSpace(out))
}

package paper

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench"
)

// An operation of iperf3 is a megabyte.
const (
	bitsPerOperation  = 8e6
	operationsPerGbit = 1e9 / bitsPerOperation
)

// MetricThroughput is iperf3's, in bits a second.
const MetricThroughput = "throughput_bps"

// IperfEntries gives the entries of iperf3 that were measured, the slowest first.
func IperfEntries(r Result) (entries []Entry) {
	for _, a := range iperfApps() {
		if e, ok := r.Find(a.Name); ok {
			entries = append(entries, e)
		}
	}
	return entries
}

// keptShare is the most of a fixed rate that may be missing for it to count as kept.
const keptShare = 0.03

// HighestKept gives the entry with the highest fixed rate that a mode kept.
func HighestKept(entries []Entry, mode bench.Mode) (highest Entry, ok bool) {
	for _, e := range entries {
		unkept, measured := e.Median(mode, MetricUnkept)
		if e.Rate > highest.Rate && measured && unkept <= keptShare {
			highest, ok = e, true
		}
	}
	return highest, ok
}

// iperfRates are the points of figure 6a, in Gbit/s; 0 is as fast as it goes.
var iperfRates = []float64{1, 2, 4, 6, 8, 10, 0}

// iperfApps are one connection at each rate.
func iperfApps() (apps []App) {
	for _, gbit := range iperfRates {
		name, title := fmt.Sprintf("iperf3-%gg", gbit), fmt.Sprintf("iperf3, one connection at %g Gbit/s", gbit)
		if gbit == 0 {
			name, title = "iperf3-free", "iperf3, one connection"
		}
		apps = append(apps, App{
			Name: name, Title: title, Rate: gbit * operationsPerGbit, family: "iperf3",
			programs: []tool{program("iperf3", "iperf3")},
			warmUp:   time.Second,
			server:   func(l launch) []string { return []string{"iperf3", "-s", "-p", port(l)} },
			client: func(l launch) []string {
				seconds := int((l.warmUp + l.duration + clientTail + time.Second - 1) / time.Second)
				words := []string{"iperf3", "-c", l.address.Addr().String(), "-p", port(l), "-t", strconv.Itoa(seconds), "-J",
					"--connect-timeout", "5000", "-A", fmt.Sprintf("%d,%d", l.cpus.Client, l.cpus.Server)}
				if l.rate > 0 {
					words = append(words, "-b", strconv.FormatFloat(l.rate*bitsPerOperation, 'f', 0, 64))
				}
				return words
			},
			read: readIperfRate,
		})
	}
	return apps
}

func readIperfRate(o output) (s sample, err error) {
	var out struct {
		Error string `json:"error"`
		End   struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(o.stdout, &out); err != nil {
		return s, fmt.Errorf("read iperf3: %w", err)
	}
	switch {
	case out.Error != "":
		return s, fmt.Errorf("iperf3: %s", strings.TrimSpace(out.Error))
	case out.End.Received.BitsPerSecond <= 0:
		return s, errors.New("iperf3: nothing received")
	}
	s.metrics = map[string]float64{
		MetricThroughput: out.End.Received.BitsPerSecond,
		MetricRate:       out.End.Received.BitsPerSecond / bitsPerOperation,
	}
	s.addUnkept(o.launch.rate)
	return s, nil
}

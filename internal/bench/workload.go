package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// Unit is the unit of a metric's values, as it stands in JSON.
type Unit string

// The units.
const (
	BitsPerSecond Unit = "bit/s"
	SecondsPerGB  Unit = "s/GB" // seconds of processor time for 1e9 bytes of payload
	Microseconds  Unit = "us"
	PerSecond     Unit = "1/s"
)

// Metric is one figure a workload yields.
type Metric struct {
	Name   string // as it stands in JSON
	Title  string // in tables and plots
	Unit   Unit
	Higher bool // higher is better
	Plot   bool // worth a group of bars
}

// Workload is a client and a server, and how to read what the client prints.
type Workload struct {
	Name    string
	Title   string
	Metrics []Metric
	// Optional workloads run only when they are asked for by name.
	Optional bool

	server func(Launch) []string
	ready  string // what the server prints, as part of a line, once it listens
	client func(Launch) []string
	read   func(stdout []byte) (Sample, error)
}

// Launch is what the command lines of one measurement are made from.
type Launch struct {
	Program  []string       // runs loadgen.Main
	Address  netip.AddrPort // where the server listens, or what the client dials
	duration time.Duration  // of the measured phase
	Lifetime time.Duration  // of a server, at most
	CPUs     machine.Pinning
}

// Sample is what one run yields: a value for each metric of the workload, by name.
type Sample map[string]float64

// Workloads lists every workload in the order of reports.
var Workloads = slices.Concat([]Workload{
	{
		Name: "iperf3", Title: "throughput of one TCP stream (iperf3)",
		Metrics: byteMetrics(""),
		server:  iperfServer, ready: "Server listening", client: iperfClient, read: ReadIperf,
	},
	{
		Name: "rr", Title: "round trips of 32 bytes on one connection",
		Metrics: tripMetrics(""),
		server:  ServerWords, ready: loadgen.Ready, client: peerClient("rr", "-size", "32"), read: readRoundTrips,
	},
	connectWorkload("crr", 1),
	connectWorkload("crr8", 8),
	connectWorkload("crr64", 64),
	streams("flows1", "one stream of 8 KiB writes", 1, 8<<10),
	streams("flows2", "two streams of 8 KiB writes", 2, 8<<10),
	streams("flows3", "three streams of 8 KiB writes", 3, 8<<10),
	streams("writes512", "one stream of 512-byte writes", 1, 512),
	streams("writes4k", "one stream of 4 KiB writes", 1, 4<<10),
	streams("writes64k", "one stream of 64 KiB writes", 1, 64<<10),
	redis(),
}, packetWorkloads())

// connectWorkload is new connections, made by so many threads at the same time. Those of more than
// one are optional.
func connectWorkload(name string, callers int) Workload {
	title, of := "new connections, one byte there and back on each", ""
	if callers > 1 {
		of = fmt.Sprintf(", %d callers", callers)
		title += of + " at a time"
	}
	return Workload{
		Name: name, Title: title, Optional: callers > 1,
		Metrics: []Metric{
			{Name: "socket_connect_p50_us", Title: "socket+connect p50" + of, Unit: Microseconds, Plot: true},
			{Name: "socket_connect_p99_us", Title: "socket+connect p99" + of, Unit: Microseconds},
			{Name: "socket_p50_us", Title: "socket p50" + of, Unit: Microseconds},
			{Name: "connections_per_s", Title: "connection rate" + of, Unit: PerSecond, Higher: true, Plot: true},
			{Name: "cpu_us_per_connection", Title: "CPU per connection" + of, Unit: Microseconds, Plot: true},
		},
		server: ServerWords, ready: loadgen.Ready, client: peerClient("crr", "-callers", strconv.Itoa(callers)), read: readConnections,
	}
}

// connects reports whether the workload is new connections.
func (w Workload) connects() bool {
	return slices.ContainsFunc(w.Metrics, func(m Metric) bool { return m.Name == "connections_per_s" })
}

// ParseWorkloads reads names of workloads and gives them in the order of reports; no names means
// all that are not optional.
func ParseWorkloads(names []string) ([]Workload, error) {
	var known, standard []string
	for _, w := range Workloads {
		known = append(known, w.Name)
		if !w.Optional {
			standard = append(standard, w.Name)
		}
	}
	if len(names) == 0 {
		names = standard
	}
	picked, err := parse("--workloads", names, known)
	if err != nil {
		return nil, err
	}
	var workloads []Workload
	for _, name := range picked {
		workloads = append(workloads, WorkloadNamed(name))
	}
	return workloads, nil
}

// WorkloadNamed gives a workload of the table; the zero Workload for a name that is not in it.
func WorkloadNamed(name string) Workload {
	for _, w := range Workloads {
		if w.Name == name {
			return w
		}
	}
	return Workload{}
}

// MetricNamed finds a metric of a workload.
func MetricNamed(workload, metric string) (Metric, bool) {
	for _, m := range WorkloadNamed(workload).Metrics {
		if m.Name == metric {
			return m, true
		}
	}
	return Metric{}, false
}

// Command appends args to the words a program is started by, without touching them.
func Command(program []string, args ...string) []string {
	return append(append(make([]string, 0, len(program)+len(args)), program...), args...)
}

func ServerWords(l Launch) []string { return serverWords("server")(l) }

func peerClient(name string, args ...string) func(Launch) []string {
	return func(l Launch) []string {
		return append(Command(l.Program, name, "-to", l.Address.String(), "-duration", l.duration.String(),
			"-cpu", strconv.Itoa(l.CPUs.Client)), args...)
	}
}

func iperfServer(l Launch) []string {
	return Command(l.Program, "guard", "-lifetime", l.Lifetime.String(), "--",
		"iperf3", "-s", "-1", "--forceflush", "-p", strconv.Itoa(int(l.Address.Port())))
}

// iperfClient rounds the duration up to the whole seconds iperf3 knows. It pins the server, too.
func iperfClient(l Launch) []string {
	seconds := int(math.Ceil(l.duration.Seconds()))
	return Command(l.Program, "meter", "-lifetime", (time.Duration(seconds)*time.Second + proc.ClientSlack).String(), "--",
		"iperf3", "-c", l.Address.Addr().String(), "-p", strconv.Itoa(int(l.Address.Port())),
		"-t", strconv.Itoa(seconds), "-J", "--connect-timeout", "5000",
		"-A", fmt.Sprintf("%d,%d", l.CPUs.Client, l.CPUs.Server))
}

// ReadIperf reads what iperf3 -J printed below meter: throughput and the machine's processor time.
func ReadIperf(stdout []byte) (Sample, error) {
	var m loadgen.Metered
	if err := json.Unmarshal(stdout, &m); err != nil {
		return nil, fmt.Errorf("read meter: %w", err)
	}
	var out struct {
		Error string `json:"error"`
		End   struct {
			Received struct {
				Bytes         float64 `json:"bytes"`
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(m.Output), &out); err != nil {
		return nil, fmt.Errorf("read iperf3: %w", err)
	}
	received := out.End.Received
	switch {
	case out.Error != "":
		return nil, fmt.Errorf("iperf3: %s", strings.TrimSpace(out.Error))
	case received.Bytes <= 0:
		return nil, errors.New("iperf3: nothing received")
	}
	return Sample{
		"throughput_bps": received.BitsPerSecond,
		"cpu_s_per_gb":   m.BusyCPUS / received.Bytes * 1e9,
	}, nil
}

func readRoundTrips(stdout []byte) (Sample, error) {
	var r loadgen.RoundTrips
	if err := json.Unmarshal(stdout, &r); err != nil {
		return nil, fmt.Errorf("read rr: %w", err)
	}
	if r.Transactions <= 0 || r.ElapsedS <= 0 {
		return nil, errors.New("rr: no transactions")
	}
	return Sample{
		"rtt_p50_us":             r.RTTP50Us,
		"rtt_p99_us":             r.RTTP99Us,
		"transactions_per_s":     float64(r.Transactions) / r.ElapsedS,
		"cpu_us_per_transaction": r.BusyCPUS * 1e6 / float64(r.Transactions),
	}, nil
}

func readConnections(stdout []byte) (Sample, error) {
	var c loadgen.Connections
	if err := json.Unmarshal(stdout, &c); err != nil {
		return nil, fmt.Errorf("read crr: %w", err)
	}
	if c.Connections <= 0 || c.ElapsedS <= 0 {
		return nil, errors.New("crr: no connections")
	}
	return Sample{
		"socket_connect_p5_us":  c.SocketConnectP5Us,
		"socket_connect_p50_us": c.SocketConnectP50Us,
		"socket_connect_p99_us": c.SocketConnectP99Us,
		"socket_p50_us":         c.SocketP50Us,
		"connections_per_s":     float64(c.Connections) / c.ElapsedS,
		"cpu_us_per_connection": c.BusyCPUS * 1e6 / float64(c.Connections),
	}, nil
}

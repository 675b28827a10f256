package bench

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
)

// StackWorkloads are what stacks are compared by, beside new connections: figure 4 of the NetKernel
// paper (flows that write 8 KiB at a time), writes of other sizes, and redis.
var StackWorkloads = []string{"flows1", "flows2", "flows3", "writes512", "writes4k", "writes64k", "redis"}

// streams is so many streams of iperf3 whose program writes so many bytes at a time.
func streams(name, title string, flows, bytes int) Workload {
	w := Workload{
		Name: name, Title: title, Optional: true,
		Metrics: []Metric{
			{Name: "throughput_bps", Title: "throughput of " + title, Unit: BitsPerSecond, Higher: true, Plot: true},
			{Name: "cpu_s_per_gb", Title: "CPU per GB of " + title, Unit: SecondsPerGB},
		},
		server: iperfServer, ready: "Server listening", read: ReadIperf,
	}
	w.client = func(l Launch) []string {
		return append(iperfClient(l), "-P", strconv.Itoa(flows), "-l", strconv.Itoa(bytes))
	}
	return w
}

// redisRequests are made in a run, redisClients at a time.
const redisRequests, redisClients = 40_000, 20

// redis is GET of redis-benchmark.
func redis() Workload {
	return Workload{
		Name: "redis", Title: fmt.Sprintf("GET of redis-benchmark, %d connections", redisClients), Optional: true,
		Metrics: []Metric{
			{Name: "requests_per_s", Title: "GET of redis-benchmark", Unit: PerSecond, Higher: true, Plot: true},
			{Name: "cpu_us_per_request", Title: "CPU per request", Unit: Microseconds},
		},
		server: func(l Launch) []string {
			return Command(l.Program, "guard", "-lifetime", l.Lifetime.String(), "--",
				"redis-server", "--port", strconv.Itoa(int(l.Address.Port())), "--save", "", "--protected-mode", "no")
		},
		ready: "eady to accept connections",
		client: func(l Launch) []string {
			return Command(l.Program, "meter", "-lifetime", (l.duration + time.Second + proc.ClientSlack).String(), "--",
				"redis-benchmark", "-h", l.Address.Addr().String(), "-p", strconv.Itoa(int(l.Address.Port())),
				"-t", "get", "-n", strconv.Itoa(redisRequests), "-c", strconv.Itoa(redisClients), "--csv")
		},
		read: readRedis,
	}
}

// readRedis reads what redis-benchmark --csv printed below meter.
func readRedis(stdout []byte) (Sample, error) {
	var m loadgen.Metered
	if err := json.Unmarshal(stdout, &m); err != nil {
		return nil, fmt.Errorf("read meter: %w", err)
	}
	reader := csv.NewReader(strings.NewReader(m.Output))
	reader.FieldsPerRecord = -1
	rows, err := reader.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("read redis-benchmark: %w", err)
	}
	for _, row := range rows {
		if len(row) < 2 || row[0] != "GET" {
			continue
		}
		rate, err := strconv.ParseFloat(row[1], 64)
		if err != nil {
			return nil, fmt.Errorf("read redis-benchmark: %w", err)
		}
		return Sample{"requests_per_s": rate, "cpu_us_per_request": m.BusyCPUS * 1e6 / redisRequests}, nil
	}
	return nil, errors.New("redis-benchmark: no line of GET")
}

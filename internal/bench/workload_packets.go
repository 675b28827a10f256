package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
)

// PacketWorkloads are what networks are compared by for all that is not TCP.
var PacketWorkloads = []string{"udprr", "udp64", "udp1200", "udpgso", "quic", "quicrr", "quicc", "dns"}

// The sizes of datagrams: QUIC's, and one that is small.
const (
	smallDatagram = 64
	quicDatagram  = 1200
)

// packetWorkloads makes them; all are optional, and the first metric of each is plotted.
func packetWorkloads() []Workload {
	workloads := []Workload{
		{
			Name: "udprr", Title: "round trips of 32 bytes by UDP",
			Metrics: tripMetrics("UDP "), server: datagramWords(), ready: loadgen.Ready,
			client: peerClient("datagram-rr", "-size", "32"), read: readRoundTrips,
		},
		datagramFlow("udp64", smallDatagram),
		datagramFlow("udp1200", quicDatagram),
		{
			Name: "udpgso", Title: "datagrams of 1,200 bytes that the kernel cuts and joins (UDP_SEGMENT, UDP_GRO)",
			Metrics: byteMetrics("segments of UDP "), server: datagramWords("-segments"), ready: loadgen.Ready,
			client: peerClient("flow", "-segments", "-size", strconv.Itoa(quicDatagram)), read: readSegments,
		},
		{
			Name: "quic", Title: "throughput of one QUIC stream (quic-go)",
			Metrics: byteMetrics("QUIC "), server: serverWords("quic-server"), ready: loadgen.Ready,
			client: peerClient("quic"), read: readStream,
		},
		{
			Name: "quicrr", Title: "requests of QUIC, a stream each (quic-go)",
			Metrics: tripMetrics("QUIC "), server: serverWords("quic-server"), ready: loadgen.Ready,
			client: peerClient("quic-rr", "-size", "32"), read: readRoundTrips,
		},
		quicInC(),
		dns(),
	}
	for i := range workloads {
		workloads[i].Optional = true
		for k := range workloads[i].Metrics {
			workloads[i].Metrics[k].Plot = k == 0
		}
	}
	return workloads
}

func tripMetrics(of string) []Metric {
	return []Metric{
		{Name: "rtt_p50_us", Title: of + "round trip p50", Unit: Microseconds, Plot: true},
		{Name: "rtt_p99_us", Title: of + "round trip p99", Unit: Microseconds},
		{Name: "transactions_per_s", Title: of + "transaction rate", Unit: PerSecond, Higher: true},
		{Name: "cpu_us_per_transaction", Title: of + "CPU per transaction", Unit: Microseconds, Plot: true},
	}
}

func byteMetrics(of string) []Metric {
	return []Metric{
		{Name: "throughput_bps", Title: of + "throughput", Unit: BitsPerSecond, Higher: true, Plot: true},
		{Name: "cpu_s_per_gb", Title: of + "CPU per GB", Unit: SecondsPerGB, Plot: true},
	}
}

// serverWords runs a server of loadgen.
func serverWords(name string, args ...string) func(Launch) []string {
	return func(l Launch) []string {
		return append(Command(l.Program, name, "-listen", l.Address.String(), "-lifetime", l.Lifetime.String(),
			"-cpu", strconv.Itoa(l.CPUs.Server)), args...)
	}
}

func datagramWords(args ...string) func(Launch) []string { return serverWords("datagrams", args...) }

// datagramFlow is datagrams of so many bytes, each by a call of its own, as fast as they are taken.
func datagramFlow(name string, size int) Workload {
	title := fmt.Sprintf("datagrams of %d bytes", size)
	return Workload{
		Name: name, Title: title,
		Metrics: []Metric{
			{Name: "packets_per_s", Title: title, Unit: PerSecond, Higher: true},
			{Name: "cpu_us_per_packet", Title: "CPU per datagram of " + strconv.Itoa(size) + " bytes", Unit: Microseconds},
		},
		server: datagramWords(), ready: loadgen.Ready, client: peerClient("flow", "-size", strconv.Itoa(size)), read: readFlow,
	}
}

// parseFlow reads what flow printed.
func parseFlow(stdout []byte) (f loadgen.Flow, err error) {
	if err := json.Unmarshal(stdout, &f); err != nil {
		return f, fmt.Errorf("read flow: %w", err)
	}
	if f.Datagrams <= 0 || f.ElapsedS <= 0 {
		return f, errors.New("flow: nothing was received")
	}
	return f, nil
}

func readFlow(stdout []byte) (Sample, error) {
	f, err := parseFlow(stdout)
	return Sample{
		"packets_per_s":     float64(f.Datagrams) / f.ElapsedS,
		"cpu_us_per_packet": f.BusyCPUS * 1e6 / float64(f.Datagrams),
	}, err
}

func readSegments(stdout []byte) (Sample, error) {
	f, err := parseFlow(stdout)
	return bytesSample(float64(f.Datagrams)*float64(f.Size), f.ElapsedS, f.BusyCPUS), err
}

func bytesSample(bytes, elapsed, busy float64) Sample {
	return Sample{"throughput_bps": bytes * 8 / elapsed, "cpu_s_per_gb": busy / bytes * 1e9}
}

func readStream(stdout []byte) (Sample, error) {
	var s loadgen.Stream
	if err := json.Unmarshal(stdout, &s); err != nil {
		return nil, fmt.Errorf("read quic: %w", err)
	}
	if s.Bytes <= 0 || s.ElapsedS <= 0 {
		return nil, errors.New("quic: nothing was received")
	}
	return bytesSample(float64(s.Bytes), s.ElapsedS, s.BusyCPUS), nil
}

// wrappedServer is a server of others below guard, on its processor, with what guard provides.
func wrappedServer(l Launch, provide, until string, command ...string) []string {
	return Command(l.Program, append([]string{"guard", "-lifetime", l.Lifetime.String(), "-cpu", strconv.Itoa(l.CPUs.Server),
		"-listen", l.Address.String(), "-provide", provide, "-until", until, "--"}, command...)...)
}

// wrappedClient is a client of others below meter, on its processor.
func wrappedClient(l Launch, options []string, command ...string) []string {
	words := append([]string{"meter", "-lifetime", (l.duration + proc.ClientSlack).String(), "-cpu", strconv.Itoa(l.CPUs.Client)}, options...)
	return Command(l.Program, append(append(words, "--"), command...)...)
}

// ngtcp2Bytes is what its client fetches: some tenths of a second's.
const ngtcp2Bytes = 40_000_000

// quicInC is a download by ngtcp2's example programs, which are C++ on its library in C and GnuTLS.
func quicInC() Workload {
	return Workload{
		Name: "quicc", Title: fmt.Sprintf("download of %d MB by HTTP/3, with the handshake (ngtcp2)", ngtcp2Bytes/1_000_000),
		Metrics: byteMetrics("ngtcp2 "),
		server: func(l Launch) []string {
			port := strconv.Itoa(int(l.Address.Port()))
			return wrappedServer(l, "certificate", "udp/"+port, "/usr/sbin/gtlsserver", "-q", "--mime-types-file=/dev/null",
				"--max-dyn-length=1G", l.Address.Addr().String(), port, "{}/key.pem", "{}/certificate.pem")
		},
		ready: loadgen.Ready,
		client: func(l Launch) []string {
			to, port := l.Address.Addr().String(), strconv.Itoa(int(l.Address.Port()))
			return wrappedClient(l, nil, "/usr/bin/gtlsclient", "-q", "--no-http-dump", "--exit-on-all-streams-close", to, port,
				fmt.Sprintf("https://bench/%d", ngtcp2Bytes))
		},
		read: func(stdout []byte) (Sample, error) {
			var m loadgen.Metered
			if err := json.Unmarshal(stdout, &m); err != nil {
				return nil, fmt.Errorf("read meter: %w", err)
			}
			if m.ElapsedS <= 0 {
				return nil, errors.New("ngtcp2: no time went by")
			}
			return bytesSample(ngtcp2Bytes, m.ElapsedS, m.BusyCPUS), nil
		},
	}
}

// dns is queries of dnsperf, 20 at a time, that unbound answers from what it was told.
func dns() Workload {
	return Workload{
		Name: "dns", Title: "queries of dnsperf to unbound, 20 at a time",
		Metrics: []Metric{
			{Name: "queries_per_s", Title: "DNS queries", Unit: PerSecond, Higher: true},
			{Name: "latency_us", Title: "DNS latency", Unit: Microseconds},
			{Name: "cpu_us_per_query", Title: "CPU per DNS query", Unit: Microseconds},
		},
		server: func(l Launch) []string {
			return wrappedServer(l, "zone", "udp/"+strconv.Itoa(int(l.Address.Port())), "/usr/sbin/unbound", "-d", "-c", "{}/unbound.conf")
		},
		ready: loadgen.Ready,
		client: func(l Launch) []string {
			return wrappedClient(l, []string{"-provide", "queries"}, "/usr/bin/dnsperf", "-s", l.Address.Addr().String(),
				"-p", strconv.Itoa(int(l.Address.Port())), "-d", "{}/queries", "-c", "4", "-T", "1", "-q", "20",
				"-l", strconv.Itoa(int(math.Ceil(l.duration.Seconds()))))
		},
		read: readDNS,
	}
}

// What dnsperf says at its end.
var (
	dnsCompleted = regexp.MustCompile(`Queries completed: +(\d+)`)
	dnsRate      = regexp.MustCompile(`Queries per second: +([\d.]+)`)
	dnsLatency   = regexp.MustCompile(`Average Latency \(s\): +([\d.]+)`)
	dnsAnswers   = regexp.MustCompile(`NOERROR \d+ \(100\.00%\)`)
)

func readDNS(stdout []byte) (Sample, error) {
	var m loadgen.Metered
	if err := json.Unmarshal(stdout, &m); err != nil {
		return nil, fmt.Errorf("read meter: %w", err)
	}
	var figures [3]float64
	for i, each := range []*regexp.Regexp{dnsCompleted, dnsRate, dnsLatency} {
		found := each.FindStringSubmatch(m.Output)
		if found == nil {
			return nil, fmt.Errorf("read dnsperf: nothing like %q in %q", each, m.Output)
		}
		var err error
		if figures[i], err = strconv.ParseFloat(found[1], 64); err != nil {
			return nil, fmt.Errorf("read dnsperf: %w", err)
		}
	}
	if figures[0] <= 0 || !dnsAnswers.MatchString(m.Output) {
		return nil, fmt.Errorf("dnsperf: not all queries were answered: %q", m.Output)
	}
	return Sample{
		"queries_per_s": figures[1], "latency_us": figures[2] * float64(time.Second/time.Microsecond),
		"cpu_us_per_query": m.BusyCPUS * 1e6 / figures[0],
	}, nil
}

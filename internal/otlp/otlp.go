// Package otlp sends a node's flows to a collector of OpenTelemetry, as log records by OTLP over
// HTTP. It keeps nobody waiting: what finds no room in the queue, and what the collector does not
// take, is lost and counted by why.
package otlp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"heddle.dev/heddle/internal/flow"
)

// Bounds of what is sent.
const (
	// Queued is how many flows may wait for the collector: some 10 MB.
	Queued = 16384
	// batch is how many go in one request.
	batch = 512
	// maxHeaders bounds the file with headers.
	maxHeaders = 64 << 10
)

// Loss names why a flow did not get there.
type Loss string

// The losses.
const (
	LossQueueFull  Loss = "queue_full" // as many as may wait did
	LossRefused    Loss = "refused"    // the collector did not take it
	LossUnanswered Loss = "unanswered" // the collector was asked again for a minute
)

// Losses lists them.
var Losses = []Loss{LossQueueFull, LossRefused, LossUnanswered}

// Config says where flows go.
type Config struct {
	// Endpoint is the URL of the collector; without a path, /v1/logs is asked.
	Endpoint string
	// CA is a PEM file of who signed the collector's certificate; empty: the machine's authorities.
	// Cert and Key are those that the collector asks for; both may be empty.
	CA, Cert, Key string
	// HeadersFile has lines "Name: value" for each request; empty: none.
	HeadersFile string
	// Node and Version are whose flows these are.
	Node, Version string
	// Failed is told of an error when sending begins to fail, and of nil when it works again. It
	// may be nil.
	Failed func(error)
	Log    *slog.Logger
}

// Source is a queue of flows.
type Source interface {
	// Flows gives them as they come.
	Flows() <-chan *flow.Flow
	// Lost gives how many found no room since it was last asked.
	Lost() uint64
}

// Stats is what has become of flows.
type Stats struct {
	// Endpoint is the collector's URL, without what it may have of secrets.
	Endpoint string
	Sent     uint64
	// Lost has every loss.
	Lost map[Loss]uint64
}

// Exporter sends flows.
type Exporter struct {
	cfg     Config
	url     *url.URL
	header  http.Header
	client  *http.Client
	timing  timing
	failing bool // of the goroutine of Run

	mu    sync.Mutex // guards what follows
	sent  uint64
	lost  map[Loss]uint64
	queue Source
}

// timing is for tests to be quick.
type timing struct {
	gather time.Duration // how long a batch waits for more
	first  time.Duration // before the second try; twice as long before each further one
	most   time.Duration // between tries
	giveUp time.Duration // from the first try on
	answer time.Duration // how long a collector may take
	flush  time.Duration // for what waits when the agent ends
}

var usual = timing{gather: time.Second, first: time.Second, most: 15 * time.Second, giveUp: time.Minute, answer: 10 * time.Second, flush: time.Second}

// Open checks what is configured and reads its files. Nothing is sent before Run.
func Open(cfg Config) (*Exporter, error) {
	u, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("--otlp-endpoint %s: %w", redacted(cfg.Endpoint), err)
	}
	secure, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	if u.Scheme == "http" && secure.used {
		return nil, errors.New("--otlp-ca, --otlp-cert, --otlp-key: --otlp-endpoint is not https, so that they would be of no use")
	}
	header, err := readHeaders(cfg.HeadersFile)
	if err != nil {
		return nil, fmt.Errorf("--otlp-headers-file: %w", err)
	}
	e := &Exporter{cfg: cfg, url: u, header: header, timing: usual, lost: make(map[Loss]uint64)}
	e.client = &http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: usual.answer}).DialContext, TLSClientConfig: secure.config,
			ForceAttemptHTTP2: true, MaxConnsPerHost: 1, IdleConnTimeout: time.Minute,
		},
		// Where it leads may be anybody's; the headers are the collector's.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return e, nil
}

// parseEndpoint reads a collector's URL. What containers do is told to nobody on the way: without
// TLS it must not leave the node.
func parseEndpoint(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("no URL; write https://HOST:4318")
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, errors.New("neither https nor http; write https://HOST:4318")
	case u.Hostname() == "":
		return nil, errors.New("has no host; write https://HOST:4318")
	case u.User != nil:
		return nil, errors.New("has a user; put an Authorization header into --otlp-headers-file, which others cannot read")
	case u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("has a query or fragment; leave it out")
	case u.Scheme == "http" && !isLoopback(u.Hostname()):
		return nil, errors.New("would send flows through the network in the clear; use https, or a collector at 127.0.0.1")
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/v1/logs"
	}
	return u, nil
}

func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.IsLoopback()
}

// redacted quotes an endpoint without its user's password.
func redacted(s string) string {
	if u, err := url.Parse(s); err == nil {
		s = u.Redacted()
	}
	return fmt.Sprintf("%.200q", s)
}

type tlsConfig struct {
	config *tls.Config
	used   bool
}

// tls reads the certificates. The client's is read anew for each connection: it may be renewed.
func (c Config) tls() (tlsConfig, error) {
	out := tlsConfig{config: &tls.Config{MinVersion: tls.VersionTLS12}, used: c.CA != "" || c.Cert != "" || c.Key != ""}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return out, fmt.Errorf("--otlp-ca: %w", err)
		}
		out.config.RootCAs = x509.NewCertPool()
		if !out.config.RootCAs.AppendCertsFromPEM(pem) {
			return out, fmt.Errorf("--otlp-ca %s: has no certificate in PEM", c.CA)
		}
	}
	if (c.Cert == "") != (c.Key == "") {
		return out, errors.New("--otlp-cert, --otlp-key: one without the other; give both or none")
	}
	if c.Cert != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
			if err != nil {
				return nil, fmt.Errorf("--otlp-cert, --otlp-key: %w", err)
			}
			return &pair, nil
		}
		if _, err := load(); err != nil {
			return out, err
		}
		out.config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return out, nil
}

// reserved are headers that are the exporter's.
var reserved = map[string]bool{"Content-Type": true, "Content-Encoding": true, "Content-Length": true, "Host": true, "Transfer-Encoding": true, "Connection": true}

// readHeaders reads lines "Name: value"; empty ones and those that begin with # are left out.
func readHeaders(path string) (http.Header, error) {
	header := make(http.Header)
	if path == "" {
		return header, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxHeaders {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are taken", path, info.Size(), maxHeaders)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s can be read by others (mode %04o): chmod 600 it", path, info.Mode().Perm())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		name, value = http.CanonicalHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
		switch {
		case !ok || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value):
			return nil, fmt.Errorf("%s, line %d: no header; write Name: value", path, number)
		case reserved[name]:
			return nil, fmt.Errorf("%s, line %d: %s is not yours to set; leave it out", path, number, name)
		}
		header.Add(name, value)
	}
	return header, nil
}

// Stats gives the counts; they never fall.
func (e *Exporter) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.queue != nil {
		e.lost[LossQueueFull] += e.queue.Lost()
	}
	s := Stats{Endpoint: e.url.String(), Sent: e.sent, Lost: make(map[Loss]uint64, len(Losses))}
	for _, l := range Losses {
		s.Lost[l] = e.lost[l]
	}
	return s
}

func (e *Exporter) count(sent, lost int, why Loss) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sent += uint64(sent)
	if lost > 0 {
		e.lost[why] += uint64(lost)
	}
}

// Run sends what queue gives until ctx ends, and then once what is in it.
func (e *Exporter) Run(ctx context.Context, queue Source) {
	e.mu.Lock()
	e.queue = queue
	e.mu.Unlock()
	defer e.client.CloseIdleConnections()
	for {
		flows := e.gather(ctx, queue)
		if ctx.Err() == nil {
			flows = e.deliver(ctx, flows)
		}
		if ctx.Err() != nil {
			e.last(flows, queue)
			return
		}
	}
}

// gather waits for a flow, and then for as many as go in a request, but not for long.
func (e *Exporter) gather(ctx context.Context, queue Source) (flows []*flow.Flow) {
	var enough <-chan time.Time
	for len(flows) < batch {
		select {
		case f := <-queue.Flows():
			if flows = append(flows, f); enough == nil {
				timer := time.NewTimer(e.timing.gather)
				defer timer.Stop()
				enough = timer.C
			}
		case <-enough:
			return flows
		case <-ctx.Done():
			return flows
		}
	}
	return flows
}

// last sends, once, what is there when the agent ends.
func (e *Exporter) last(flows []*flow.Flow, queue Source) {
	ctx, cancel := context.WithTimeout(context.Background(), e.timing.flush)
	defer cancel()
	for {
		for len(flows) < batch && len(queue.Flows()) > 0 {
			flows = append(flows, <-queue.Flows())
		}
		if len(flows) == 0 {
			return
		}
		a := e.try(ctx, flows)
		if a.err != nil {
			lost := len(flows) + len(queue.Flows())
			e.count(0, lost, LossUnanswered)
			e.cfg.Log.Warn("flows are lost with the agent's end", "collector", e.url, "flows", lost, "err", a.err)
			return
		}
		e.count(len(flows)-a.rejected, a.rejected, LossRefused)
		flows = nil
	}
}

package otlp

import (
	"cmp"
	"compress/gzip"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	"google.golang.org/protobuf/proto"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/testutil"
)

// receiver is a collector: it reads requests as the protocol has them, and answers as it is told.
type receiver struct {
	t      *testing.T
	answer func(try int, w http.ResponseWriter) (taken bool)

	mu     sync.Mutex
	tries  int
	first  int // flows of the first request
	header http.Header
	got    []*collector.ExportLogsServiceRequest
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	z, err := gzip.NewReader(req.Body)
	if err != nil {
		r.t.Errorf("no gzip: %v", err)
		return
	}
	raw, err := io.ReadAll(z)
	var got collector.ExportLogsServiceRequest
	if err = errors.Join(err, proto.Unmarshal(raw, &got)); err != nil || req.Method != http.MethodPost || req.Header.Get("Content-Type") != "application/x-protobuf" {
		r.t.Errorf("%s %s, %s: %v", req.Method, req.URL, req.Header, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tries++; r.tries == 1 {
		r.first = len(got.ResourceLogs[0].ScopeLogs[0].LogRecords)
	}
	r.header = req.Header
	if r.answer == nil || r.answer(r.tries, w) {
		r.got = append(r.got, &got)
	}
}

// records gives all that was taken.
func (r *receiver) records() (all []*logs.LogRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.got {
		all = append(all, g.ResourceLogs[0].ScopeLogs[0].LogRecords...)
	}
	return all
}

// queue is a Source of a length.
type queue struct {
	flows chan *flow.Flow
	lost  uint64 // taken by Lost; of the test's goroutine, before Run
}

func (q *queue) Flows() <-chan *flow.Flow { return q.flows }
func (q *queue) Lost() (n uint64)         { n, q.lost = q.lost, 0; return n }

// queueOf gives one in which n flows wait; more find no room.
func queueOf(size, n int) *queue {
	q := &queue{flows: make(chan *flow.Flow, size)}
	for i := range n {
		select {
		case q.flows <- &flow.Flow{Time: time.Unix(1, 0), Event: flow.Open, Verdict: flow.Allowed, Socket: uint64(i + 1)}:
		default:
			q.lost++
		}
	}
	return q
}

// quick is a timing for tests: nothing that a test waits for is long.
var quick = timing{gather: time.Millisecond, first: time.Millisecond, most: time.Millisecond, giveUp: time.Hour, answer: time.Minute, flush: time.Minute}

// start runs an exporter to url until the test ends or it is told to.
func start(t *testing.T, cfg Config, q *queue, change func(*timing)) (e *Exporter, end func()) {
	t.Helper()
	cfg.Node, cfg.Version, cfg.Log = "n1", "1.2", slog.New(slog.DiscardHandler)
	e, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e.timing = quick
	if change != nil {
		change(&e.timing)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); e.Run(ctx, q) }()
	end = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(end)
	return e, end
}

// lost gives the losses of one kind, and complains of others.
func lost(t *testing.T, e *Exporter, why Loss) uint64 {
	t.Helper()
	s := e.Stats()
	for l, n := range s.Lost {
		if l != why && n != 0 {
			t.Errorf("%d lost by %s", n, l)
		}
	}
	return s.Lost[why]
}

// TestRecords: a collector gets all that heddle observe shows of a flow, by TLS, with the headers.
func TestRecords(t *testing.T) {
	r := &receiver{t: t}
	srv := httptest.NewTLSServer(r)
	defer srv.Close()
	dir := t.TempDir()
	ca, headers := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "headers")
	testutil.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o644))
	testutil.NoError(t, os.WriteFile(headers, []byte("# of ours\nauthorization: Bearer x\n\n"), 0o600))
	q := queueOf(10, 0)
	q.flows <- &flow.Flow{
		Time: time.Unix(5, 7), Node: "n1", Event: flow.Deny, Verdict: flow.Denied, Protocol: "tcp", SeenBy: flow.SideFrom,
		From:   flow.Peer{Endpoint: "n1/c1", Node: "n1", Addr: netip.MustParseAddr("10.244.0.2"), Port: 40000, Labels: map[string]string{"b": "2", "a": "1"}},
		To:     flow.Peer{Addr: netip.MustParseAddr("fd48::1"), Port: 80},
		Reason: "refuse_policy_rejected", ReasonKind: "refusal", Policy: "p", Rule: "by \xff rule 0", BytesSent: 3, RTT: 9,
	}
	e, _ := start(t, Config{Endpoint: srv.URL, CA: ca, HeadersFile: headers}, q, nil)
	testutil.EventuallyTrue(t, "the flow is there", func() bool { return e.Stats().Sent == 1 })
	if got := r.header.Get("Authorization"); got != "Bearer x" {
		t.Errorf("Authorization %q", got)
	}
	resource := attributes(r.got[0].ResourceLogs[0].Resource.Attributes)
	if resource["service.name"] != "heddled" || resource["host.name"] != "n1" || resource["service.version"] != "1.2" {
		t.Errorf("resource %v", resource)
	}
	rec := r.records()[0]
	want := map[string]string{
		"heddle.event": "deny", "heddle.verdict": "denied", "network.transport": "tcp", "heddle.seen_by": "from", "heddle.reason": "refuse_policy_rejected",
		"heddle.reason_kind": "refusal", "heddle.policy": "p", "heddle.rule": "by ? rule 0", "source.address": "10.244.0.2", "source.port": "40000",
		"heddle.source.endpoint": "n1/c1", "heddle.source.node": "n1", "heddle.source.labels": "a=1 b=2 ", "destination.address": "fd48::1", "destination.port": "80",
		"network.type": "ipv6", "heddle.bytes_sent": "3", "heddle.bytes_received": "0", "heddle.retransmits": "0", "heddle.rtt_ns": "9",
	}
	got := attributes(rec.Attributes)
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s is %q, want %q", name, got[name], value)
		}
	}
	if len(got) != len(want) {
		t.Errorf("attributes %v", got)
	}
	if rec.TimeUnixNano != 5e9+7 || rec.SeverityText != "WARN" || rec.EventName != "heddle.flow" || rec.Body.GetStringValue() != "deny n1/c1:40000 to [fd48::1]:80, refuse_policy_rejected, by ? rule 0" {
		t.Errorf("record %v", rec)
	}
}

// attributes gives them as text.
func attributes(list []*common.KeyValue) map[string]string {
	out := make(map[string]string)
	for _, kv := range list {
		switch v := kv.Value.Value.(type) {
		case *common.AnyValue_StringValue:
			out[kv.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			out[kv.Key] = fmt.Sprint(v.IntValue)
		case *common.AnyValue_KvlistValue:
			for _, pair := range v.KvlistValue.Values {
				out[kv.Key] += pair.Key + "=" + pair.Value.GetStringValue() + " "
			}
		}
	}
	return out
}

// TestTriesAgain: what a collector does not take for now it is sent again, each flow is taken once,
// and somebody hears of it both ways.
func TestTriesAgain(t *testing.T) {
	r := &receiver{t: t, answer: func(try int, w http.ResponseWriter) bool {
		switch try {
		case 1:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2:
			w.WriteHeader(http.StatusTooManyRequests)
		case 3:
			panic(http.ErrAbortHandler) // the connection breaks
		}
		return try > 3
	}}
	srv := httptest.NewServer(r)
	defer srv.Close()
	var mu sync.Mutex
	var told []string
	e, _ := start(t, Config{Endpoint: srv.URL, Failed: func(err error) { mu.Lock(); defer mu.Unlock(); told = append(told, fmt.Sprint(err)) }}, queueOf(batch+5, batch+5), nil)
	testutil.EventuallyTrue(t, "all are there", func() bool { return e.Stats().Sent == batch+5 })
	if n := lost(t, e, ""); n != 0 || len(r.records()) != batch+5 {
		t.Errorf("%d lost, %d taken", n, len(r.records()))
	}
	mu.Lock()
	defer mu.Unlock()
	if len(told) < 5 || !strings.Contains(told[0], "503") || !strings.Contains(told[1], "429") || told[2] == "<nil>" || told[3] != "<nil>" {
		t.Errorf("told %q", told)
	}
}

// TestLosses: what is lost is counted by why, and nothing else is lost with it.
func TestLosses(t *testing.T) {
	bad := func(status int) func(int, http.ResponseWriter) bool {
		return func(try int, w http.ResponseWriter) bool {
			if try == 1 {
				w.WriteHeader(status)
			}
			return try > 1
		}
	}
	for _, c := range []struct {
		name   string
		why    Loss
		lost   int // 0: all of the first request
		answer func(int, http.ResponseWriter) bool
		size   int
		change func(*timing)
	}{
		{name: "refused", why: LossRefused, size: batch + 3, answer: bad(http.StatusBadRequest)},
		{name: "redirected", why: LossRefused, size: batch + 3, answer: bad(http.StatusFound)},
		{name: "in part", why: LossRefused, lost: 2, size: batch + 3, answer: func(try int, w http.ResponseWriter) bool {
			if try == 1 {
				raw, err := proto.Marshal(&collector.ExportLogsServiceResponse{PartialSuccess: &collector.ExportLogsPartialSuccess{RejectedLogRecords: 2, ErrorMessage: "too old"}})
				testutil.NoError(t, err)
				_, _ = w.Write(raw)
			}
			return true
		}},
		{name: "silent", why: LossUnanswered, size: batch + 3, answer: bad(http.StatusServiceUnavailable), change: func(t *timing) { t.giveUp = 0 }},
		{name: "queue full", why: LossQueueFull, lost: 7, size: batch - 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &receiver{t: t, answer: c.answer}
			srv := httptest.NewServer(r)
			defer srv.Close()
			e, _ := start(t, Config{Endpoint: srv.URL}, queueOf(c.size, batch+3), c.change)
			testutil.Eventually(t, "each flow is accounted for", func() (bool, string) {
				s := e.Stats()
				return s.Sent+lost(t, e, c.why) == batch+3, fmt.Sprintf("%+v", s)
			})
			r.mu.Lock()
			defer r.mu.Unlock()
			if n := lost(t, e, c.why); n != uint64(cmp.Or(c.lost, r.first)) || n == 0 {
				t.Errorf("%d lost by %s, want %d", n, c.why, cmp.Or(c.lost, r.first))
			}
		})
	}
}

// TestEnd: what waits when the agent ends is sent once more, and who does not answer holds nobody.
func TestEnd(t *testing.T) {
	r := &receiver{t: t}
	srv := httptest.NewServer(r)
	defer srv.Close()
	q := queueOf(2*batch, 2*batch)
	e, end := start(t, Config{Endpoint: srv.URL}, q, func(t *timing) { t.gather = time.Hour })
	end()
	if s := e.Stats(); s.Sent != 2*batch {
		t.Errorf("%d of %d were sent before the end", s.Sent, 2*batch)
	}
	gone := httptest.NewServer(r)
	gone.Close()
	e, end = start(t, Config{Endpoint: gone.URL}, queueOf(3, 3), func(t *timing) { t.gather = time.Hour })
	end()
	if n := lost(t, e, LossUnanswered); n != 3 {
		t.Errorf("%d are counted, want 3", n)
	}
}

// TestForeignCertificate: flows are for the collector alone. Who has no certificate of the authority
// gets none.
func TestForeignCertificate(t *testing.T) {
	r := &receiver{t: t}
	srv := httptest.NewUnstartedServer(r)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.StartTLS()
	defer srv.Close()
	failed := make(chan error, 1)
	e, end := start(t, Config{Endpoint: srv.URL, Failed: func(err error) {
		select {
		case failed <- err:
		default:
		}
	}}, queueOf(1, 1), nil)
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%v", err)
	}
	end()
	if s := e.Stats(); s.Sent != 0 || len(r.records()) != 0 {
		t.Errorf("sent all the same: %+v", s)
	}
}

// TestRefusals: what cannot work is refused before anything is sent, by the name of its flag, with
// a remedy.
func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		testutil.NoError(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	const local = "http://127.0.0.1:4318"
	for _, c := range []struct {
		cfg  Config
		want []string
	}{
		{Config{Endpoint: "collector:4318"}, []string{"--otlp-endpoint", "https://HOST:4318"}},
		{Config{Endpoint: "https://"}, []string{"--otlp-endpoint", "no host"}},
		{Config{Endpoint: "https://u:secret@h"}, []string{"--otlp-endpoint", "--otlp-headers-file"}},
		{Config{Endpoint: "https://h/?a=b"}, []string{"--otlp-endpoint", "query"}},
		{Config{Endpoint: "http://192.0.2.1:4318"}, []string{"--otlp-endpoint", "in the clear", "use https"}},
		{Config{Endpoint: local, CA: file("a.pem", "x", 0o644)}, []string{"--otlp-ca", "no certificate"}},
		{Config{Endpoint: local, Cert: "x"}, []string{"--otlp-cert", "give both"}},
		{Config{Endpoint: "https://h", Cert: "/none", Key: "/none"}, []string{"--otlp-cert", "/none"}},
		{Config{Endpoint: local, HeadersFile: file("open", "A: b", 0o644)}, []string{"--otlp-headers-file", "chmod 600"}},
		{Config{Endpoint: local, HeadersFile: file("none", "A b", 0o600)}, []string{"--otlp-headers-file", "line 1", "Name: value"}},
		{Config{Endpoint: local, HeadersFile: file("ours", "\nhost: b", 0o600)}, []string{"--otlp-headers-file", "line 2", "leave it out"}},
		{Config{Endpoint: local, HeadersFile: file("big", strings.Repeat("#\n", maxHeaders), 0o600)}, []string{"--otlp-headers-file", "bytes"}},
	} {
		_, err := Open(c.cfg)
		if err == nil {
			t.Errorf("%+v is taken", c.cfg)
			continue
		}
		if slices.ContainsFunc(c.want, func(w string) bool { return !strings.Contains(err.Error(), w) }) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
		}
	}
	for endpoint, want := range map[string]string{"https://h:4318": "https://h:4318/v1/logs", "https://h/otlp/logs": "https://h/otlp/logs", "http://[::1]:1/": "http://[::1]:1/v1/logs"} {
		e, err := Open(Config{Endpoint: endpoint})
		if err != nil || e.Stats().Endpoint != want {
			t.Errorf("%s: %v, %v", endpoint, e, err)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Duration{"": 0, "3": 3 * time.Second, "-3": 0, "soon": 0, "Sun, 29 Nov 2026 00:01:00 GMT": time.Minute, "Sun, 29 Nov 2020 00:01:00 GMT": 0} {
		if got := retryAfter(s, now); got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}

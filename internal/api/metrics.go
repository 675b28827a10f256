package api

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// scrapeTimeout bounds how long a scrape waits for the agent's status.
const scrapeTimeout = 5 * time.Second

// The metrics. docs/protocols/agent-api.md documents each; a test ties the two.
var (
	reasonDesc = prometheus.NewDesc("heddle_reason_total",
		"Connections, packets and calls by reason: paths taken, fallbacks, drops and refusals.", []string{"reason", "kind"}, nil)
	endpointsDesc = prometheus.NewDesc("heddle_endpoints", "Endpoints on this node.", nil, nil)
	peersDesc     = prometheus.NewDesc("heddle_peers", "Other nodes of the network.", nil, nil)
	storeDesc     = prometheus.NewDesc("heddle_store_healthy",
		"1 while the agent follows the store, 0 while it works from what it last saw.", nil, nil)
	revisionDesc  = prometheus.NewDesc("heddle_store_revision", "Store revision the agent has applied.", nil, nil)
	listenersDesc = prometheus.NewDesc("heddle_intercept_listeners", "Seccomp listeners held.", nil, nil)
	answeredDesc  = prometheus.NewDesc("heddle_intercept_answered_total",
		"Trapped calls answered with a socket of the node or with the container's own view.", nil, nil)
	continuedDesc = prometheus.NewDesc("heddle_intercept_continued_total",
		"Trapped calls left to the kernel because they do not concern TCP.", nil, nil)
	failedDesc = prometheus.NewDesc("heddle_intercept_failed_total",
		"Trapped calls that could not be answered, by cause.", []string{"cause"}, nil)
	premadeDesc = prometheus.NewDesc("heddle_intercept_premade_total",
		"Answers by whether a socket made ahead of need was there.", []string{"result"}, nil)
	featureDesc = prometheus.NewDesc("heddle_feature",
		"1 if the probed kernel feature or setting is there, 0 if not.", []string{"feature"}, nil)
	infoDesc = prometheus.NewDesc("heddle_agent_info", "1; its labels say which agent this is.",
		[]string{"node", "version"}, nil)
	startedDesc = prometheus.NewDesc("heddle_agent_start_time_seconds", "Unix time of the agent's start.", nil, nil)
)

var descs = []*prometheus.Desc{
	reasonDesc, endpointsDesc, peersDesc, storeDesc, revisionDesc, listenersDesc, answeredDesc, continuedDesc,
	failedDesc, premadeDesc, featureDesc, infoDesc, startedDesc,
}

// NewCollector turns what status gives into Heddle's metrics, once a scrape. If status fails, so does
// the scrape: half the metrics would look like a reset.
func NewCollector(status func(context.Context) (Status, error)) prometheus.Collector {
	return collector{status}
}

type collector struct {
	status func(context.Context) (Status, error)
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	st, err := c.status(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(reasonDesc, err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for _, r := range st.Counters {
		counter(reasonDesc, r.Value, r.Name, string(r.Kind))
	}
	gauge(endpointsDesc, float64(st.Endpoints))
	gauge(peersDesc, float64(st.Peers))
	gauge(storeDesc, oneIf(st.Store.Healthy))
	gauge(revisionDesc, float64(st.Store.Revision))
	in := st.Interception
	gauge(listenersDesc, float64(in.Listeners))
	counter(answeredDesc, in.Answered)
	counter(continuedDesc, in.Continued)
	for _, cause := range slices.Sorted(maps.Keys(in.Failed)) {
		counter(failedDesc, in.Failed[cause], cause)
	}
	counter(premadeDesc, in.PremadeHits, "hit")
	counter(premadeDesc, in.PremadeMisses, "miss")
	for _, f := range st.Features {
		gauge(featureDesc, oneIf(f.Status == CheckOK), f.Name)
	}
	gauge(infoDesc, 1, st.Node.Name, st.Version)
	gauge(startedDesc, float64(st.Started.UnixMilli())/1e3)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

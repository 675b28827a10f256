package kube

import "github.com/prometheus/client_golang/prometheus"

// metrics are what heddle-kube tells of itself.
type metrics struct {
	registry    *prometheus.Registry
	changes     *prometheus.CounterVec // kind, change
	refused     *prometheus.GaugeVec   // kind
	failures    *prometheus.CounterVec // what
	watchErrors *prometheus.CounterVec // resource
	synced      prometheus.Gauge
	leader      prometheus.Gauge
	givenUp     prometheus.Counter
	asked       *prometheus.CounterVec // result
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "heddle_kube_changes_total",
			Help: "Changes that Kubernetes' objects led to in Heddle, by kind and change."}, []string{"kind", "change"}),
		refused: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "heddle_kube_refused",
			Help: "Objects that Heddle cannot honour as they are, by kind; each has an Event that says what and why."}, []string{"kind"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "heddle_kube_failures_total",
			Help: "Changes that the agent did not take, and that are tried again, by kind."}, []string{"kind"}),
		watchErrors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "heddle_kube_watch_errors_total",
			Help: "Failures to list or watch a resource of the API server."}, []string{"resource"}),
		synced: prometheus.NewGauge(prometheus.GaugeOpts{Name: "heddle_kube_synced",
			Help: "1 once the API server has told all there is."}),
		leader: prometheus.NewGauge(prometheus.GaugeOpts{Name: "heddle_kube_leader",
			Help: "1 while this one keeps the network's policies and namespaces."}),
		givenUp: prometheus.NewCounter(prometheus.CounterOpts{Name: "heddle_kube_lease_given_up_total",
			Help: "How often this one left the policies to another node, because its own agent did not take them."}),
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "heddle_kube_pods_asked_total",
			Help: "Questions of heddle-cni for a pod's labels, by result."}, []string{"result"}),
	}
	m.registry.MustRegister(m.changes, m.refused, m.failures, m.watchErrors, m.synced, m.leader, m.givenUp, m.asked)
	return m
}

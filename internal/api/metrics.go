package api

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"heddle.dev/heddle/internal/model"
)

// scrapeTimeout bounds how long a scrape waits for the agent's status.
const scrapeTimeout = 5 * time.Second

// The metrics. docs/protocols/agent-api.md documents each; a test ties the two.
var (
	reasonDesc = prometheus.NewDesc("heddle_reason_total",
		"Connections, packets and calls by reason: paths taken, fallbacks, drops, refusals and connections cut.", []string{"reason", "kind"}, nil)
	endpointsDesc = prometheus.NewDesc("heddle_endpoints", "Endpoints on this node.", nil, nil)
	peersDesc     = prometheus.NewDesc("heddle_peers", "Other nodes of the network.", nil, nil)
	peersAwayDesc = prometheus.NewDesc("heddle_peers_away", "Other nodes of the network whose agents do not run or do not reach the store.", nil, nil)
	directDesc    = prometheus.NewDesc("heddle_direct_paths", "Other nodes by what probes have shown of the direct path to them.", []string{"state"}, nil)
	probesDesc    = prometheus.NewDesc("heddle_probes_total", "Probes of direct paths by outcome.", []string{"outcome"}, nil)
	storeDesc     = prometheus.NewDesc("heddle_store_healthy",
		"1 while the agent follows the store, 0 while it works from what it last saw.", nil, nil)
	revisionDesc  = prometheus.NewDesc("heddle_store_revision", "Store revision the agent has applied.", nil, nil)
	listenersDesc = prometheus.NewDesc("heddle_intercept_listeners", "Seccomp listeners held.", nil, nil)
	readersDesc   = prometheus.NewDesc("heddle_intercept_readers", "Threads that answer trapped calls or wait for one.", nil, nil)
	answeredDesc  = prometheus.NewDesc("heddle_intercept_answered_total",
		"Trapped calls answered with a socket of the node or with the container's own view.", nil, nil)
	continuedDesc = prometheus.NewDesc("heddle_intercept_continued_total",
		"Trapped calls left to the kernel because they do not concern TCP.", nil, nil)
	ioctlsDesc = prometheus.NewDesc("heddle_intercept_ioctls_total",
		"ioctls of network devices that the agent made for their callers.", nil, nil)
	failedDesc = prometheus.NewDesc("heddle_intercept_failed_total",
		"Trapped calls that could not be answered, by cause.", []string{"cause"}, nil)
	premadeDesc = prometheus.NewDesc("heddle_intercept_premade_total",
		"Answers by whether a socket made ahead of need was there.", []string{"result"}, nil)
	batchesDesc      = prometheus.NewDesc("heddle_intercept_batches_total", "Trapped calls answered with a batch of sockets.", nil, nil)
	batchSocketsDesc = prometheus.NewDesc("heddle_intercept_batch_sockets_total", "Sockets given in batches.", nil, nil)
	// The names of these two before, for one release.
	oldBatchesDesc      = prometheus.NewDesc("heddle_intercept_crates_total", "Old name of heddle_intercept_batches_total.", nil, nil)
	oldBatchSocketsDesc = prometheus.NewDesc("heddle_intercept_crated_sockets_total", "Old name of heddle_intercept_batch_sockets_total.", nil, nil)
	unguardedDesc       = prometheus.NewDesc("heddle_intercept_unguarded",
		"Processes that hold sockets of an endpoint and whose ioctls act on the node.", nil, nil)
	featureDesc = prometheus.NewDesc("heddle_feature",
		"1 if the probed kernel feature or setting is there, 0 if not.", []string{"feature"}, nil)
	infoDesc = prometheus.NewDesc("heddle_agent_info", "1; its labels say which agent this is.",
		[]string{"node", "version"}, nil)
	policiesDesc       = prometheus.NewDesc("heddle_policies", "Policies of the network.", nil, nil)
	policyRulesDesc    = prometheus.NewDesc("heddle_policy_rules", "Rules of all policies.", nil, nil)
	policyHealthyDesc  = prometheus.NewDesc("heddle_policy_healthy", "1 while all that the store says of policy is understood and in force on this node, and what it forbids is ended.", nil, nil)
	policyRevisionDesc = prometheus.NewDesc("heddle_policy_revision", "Store revision whose policy is in force on this node.", nil, nil)
	policyUpdateDesc   = prometheus.NewDesc("heddle_policy_update_seconds", "How long the last change of policy took on this node.", nil, nil)
	policyPairsDesc    = prometheus.NewDesc("heddle_policy_pairs", "Pairs of classes with a verdict of their own in this node's tables.", nil, nil)
	policyCutDesc      = prometheus.NewDesc("heddle_policy_cut_total", "Live connections ended because a changed policy forbids them.", nil, nil)

	flowsDesc         = prometheus.NewDesc("heddle_flows_total", "Events of connections, by event and path, as `heddle observe` shows them.", []string{"event", "path"}, nil)
	flowsKeptDesc     = prometheus.NewDesc("heddle_flows_kept", "Events of connections in the agent's memory.", nil, nil)
	flowFollowersDesc = prometheus.NewDesc("heddle_flow_followers", "Who follows the node's flows.", nil, nil)
	flowsUnreadDesc   = prometheus.NewDesc("heddle_flows_unread_total", "Flows that a follower did not get because it read too slowly.", nil, nil)
	exportedDesc      = prometheus.NewDesc("heddle_flows_exported_total", "Flows that the collector of OpenTelemetry has taken.", nil, nil)
	exportLostDesc    = prometheus.NewDesc("heddle_flows_export_lost_total", "Flows that the collector of OpenTelemetry did not get, by why.", []string{"reason"}, nil)

	faultsDesc = prometheus.NewDesc("heddle_faults",
		"Things on this node that are not as they should be and are tried again, by reason.", []string{"reason"}, nil)
	encryptedPeersDesc = prometheus.NewDesc("heddle_encryption_peers",
		"Other nodes by how it is with encryption: encrypted, idle, no_handshake, or left_out.", []string{"state"}, nil)
	encryptedBytesDesc = prometheus.NewDesc("heddle_encryption_bytes_total",
		"Encrypted bytes exchanged with the other nodes, since a node's key was first known here.", []string{"direction"}, nil)
	encryptionKeyDesc = prometheus.NewDesc("heddle_encryption_key_time_seconds", "Unix time when the node's key in use was made.", nil, nil)

	startedDesc = prometheus.NewDesc("heddle_agent_start_time_seconds", "Unix time of the agent's start.", nil, nil)
)

// The metrics of one endpoint, and what any may have.
var (
	socketLimitDesc = prometheus.NewDesc("heddle_endpoint_socket_limit", "TCP sockets that an endpoint may have.", nil, nil)
	portLimitDesc   = prometheus.NewDesc("heddle_endpoint_port_limit", "Ephemeral ports of the node that an endpoint may hold by bind() or listen().", nil, nil)
	capDesc         = prometheus.NewDesc("heddle_endpoint_cap_bits_per_second",
		"What an endpoint may send or receive; without a cap there is none.", []string{"endpoint", "direction"}, nil)
	capBytesDesc = prometheus.NewDesc("heddle_endpoint_capped_bytes_total",
		"Bytes that an endpoint's caps let through.", []string{"endpoint", "direction"}, nil)
	capDroppedDesc = prometheus.NewDesc("heddle_endpoint_capped_dropped_total",
		"Packets for which there was no room in the queues of an endpoint's caps.", []string{"endpoint", "direction"}, nil)
	capBacklogDesc = prometheus.NewDesc("heddle_endpoint_capped_backlog_bytes",
		"Bytes that wait in the queues of an endpoint's caps.", []string{"endpoint", "direction"}, nil)
	openedDesc = prometheus.NewDesc("heddle_endpoint_opened_total",
		"Connections made by connect() of an endpoint's sockets.", []string{"endpoint"}, nil)
	acceptedDesc = prometheus.NewDesc("heddle_endpoint_accepted_total",
		"Connections taken by an endpoint's listeners.", []string{"endpoint"}, nil)
	connectFailedDesc = prometheus.NewDesc("heddle_endpoint_connect_failed_total",
		"Connects of an endpoint's sockets that ended without a connection, by cause.", []string{"endpoint", "cause"}, nil)
	closedDesc = prometheus.NewDesc("heddle_endpoint_closed_total",
		"Connections of an endpoint that have ended.", []string{"endpoint"}, nil)
	brokenDesc = prometheus.NewDesc("heddle_endpoint_broken_total",
		"Connections of an endpoint that have ended by an error: reset by the peer, timeout.", []string{"endpoint"}, nil)
	liveDesc = prometheus.NewDesc("heddle_endpoint_connections",
		"Connections of an endpoint that are established or closing, by path.", []string{"endpoint", "path"}, nil)
	socketsDesc = prometheus.NewDesc("heddle_endpoint_sockets",
		"TCP sockets of an endpoint: held by its programs, or waiting for accept().", []string{"endpoint"}, nil)
	portsDesc = prometheus.NewDesc("heddle_endpoint_ports",
		"Ephemeral ports of the node that an endpoint's sockets keep from all others by bind() or listen().", []string{"endpoint"}, nil)
	sentDesc = prometheus.NewDesc("heddle_endpoint_sent_bytes_total",
		"Payload that an endpoint's sockets sent and peers acknowledged.", []string{"endpoint"}, nil)
	receivedDesc = prometheus.NewDesc("heddle_endpoint_received_bytes_total",
		"Payload that an endpoint's sockets received in order.", []string{"endpoint"}, nil)
	retransmitsDesc = prometheus.NewDesc("heddle_endpoint_retransmits_total",
		"Segments that an endpoint's sockets sent again.", []string{"endpoint"}, nil)
)

// The metrics of RDMA.
var (
	rdmaRouterDesc   = prometheus.NewDesc("heddle_rdma_router_up", "1 while the router of RDMA runs and answers.", nil, nil)
	rdmaEndedDesc    = prometheus.NewDesc("heddle_rdma_router_ended_total", "Routers of RDMA that have ended.", nil, nil)
	rdmaObjectsDesc  = prometheus.NewDesc("heddle_rdma_objects", "What an endpoint has of RDMA, by kind.", []string{"endpoint", "object"}, nil)
	rdmaLimitDesc    = prometheus.NewDesc("heddle_rdma_object_limit", "What an endpoint may have of RDMA, by kind.", []string{"endpoint", "object"}, nil)
	rdmaPairsDesc    = prometheus.NewDesc("heddle_rdma_queue_pairs", "Queue pairs of an endpoint, by state.", []string{"endpoint", "state"}, nil)
	rdmaMessagesDesc = prometheus.NewDesc("heddle_rdma_messages_total",
		"Messages of an endpoint's queue pairs, by path and by role: requester, or responder and receiver.", []string{"endpoint", "path", "role"}, nil)
	rdmaSentDesc = prometheus.NewDesc("heddle_rdma_sent_bytes_total",
		"Bytes of messages that left an endpoint's memory, by path.", []string{"endpoint", "path"}, nil)
	rdmaReceivedDesc = prometheus.NewDesc("heddle_rdma_received_bytes_total",
		"Bytes of messages that came into an endpoint's memory, by path.", []string{"endpoint", "path"}, nil)
	rdmaErrorsDesc = prometheus.NewDesc("heddle_rdma_errors_total",
		"Completions with an error of an endpoint's queue pairs, flushed ones excepted.", []string{"endpoint"}, nil)
)

// The metrics of stack modules. Profiles are as many as the store has.
var (
	stackUpDesc          = prometheus.NewDesc("heddle_stack_module_up", "1 while the stack module runs.", []string{"stack"}, nil)
	stackEndedDesc       = prometheus.NewDesc("heddle_stack_module_ended_total", "Stack modules that have ended.", []string{"stack"}, nil)
	stackDrainDesc       = prometheus.NewDesc("heddle_stack_module_draining", "1 while another build of the stack module waits for its connections to end.", []string{"stack"}, nil)
	stackProcessorDesc   = prometheus.NewDesc("heddle_stack_module_processor_seconds_total", "Processor time of the stack module.", []string{"stack"}, nil)
	stackTenantTimeDesc  = prometheus.NewDesc("heddle_stack_module_endpoint_processor_seconds_total", "Processor time that the stack module has used for an endpoint, by its profile.", []string{"stack", "profile", "endpoint"}, nil)
	stackRetransmitsDesc = prometheus.NewDesc("heddle_stack_module_retransmits_total", "Segments that the stack module sent again.", []string{"stack"}, nil)
	stackDroppedDesc     = prometheus.NewDesc("heddle_stack_module_dropped_total", "Packets that came and the stack module dropped.", []string{"stack"}, nil)
	stackRefusedDesc     = prometheus.NewDesc("heddle_stack_module_refused_total", "What programs asked of the stack module and did not get.", []string{"stack"}, nil)
	stackTenantsDesc     = prometheus.NewDesc("heddle_stack_module_endpoints", "Endpoints that the stack module has, by profile.", []string{"stack", "profile"}, nil)
	stackMemoryDesc      = prometheus.NewDesc("heddle_stack_module_memory_bytes", "Memory of buffers in use, by profile.", []string{"stack", "profile"}, nil)
	stackConnectionsDesc = prometheus.NewDesc("heddle_stack_module_connections", "Connections of the stack module, by profile.", []string{"stack", "profile"}, nil)
	stackQueuedDesc      = prometheus.NewDesc("heddle_stack_module_queued_bytes", "Bytes that wait for the peer, or for the program, by profile.",
		[]string{"stack", "profile", "direction"}, nil)
)

var descs = []*prometheus.Desc{
	reasonDesc, endpointsDesc, peersDesc, peersAwayDesc, directDesc, probesDesc, storeDesc, revisionDesc, listenersDesc, readersDesc, answeredDesc, continuedDesc, ioctlsDesc,
	failedDesc, premadeDesc, batchesDesc, batchSocketsDesc, oldBatchesDesc, oldBatchSocketsDesc, unguardedDesc, featureDesc, infoDesc, startedDesc, faultsDesc, encryptedPeersDesc, encryptedBytesDesc, encryptionKeyDesc,
	policiesDesc, policyRulesDesc, policyHealthyDesc, policyRevisionDesc, policyUpdateDesc, policyPairsDesc, policyCutDesc,
	flowsDesc, flowsKeptDesc, flowFollowersDesc, flowsUnreadDesc, exportedDesc, exportLostDesc,
	socketLimitDesc, portLimitDesc, capDesc, capBytesDesc, capDroppedDesc, capBacklogDesc,
	openedDesc, acceptedDesc, connectFailedDesc, closedDesc, brokenDesc, liveDesc, socketsDesc, portsDesc, sentDesc, receivedDesc, retransmitsDesc,
	rdmaRouterDesc, rdmaEndedDesc, rdmaObjectsDesc, rdmaLimitDesc, rdmaPairsDesc, rdmaMessagesDesc, rdmaSentDesc, rdmaReceivedDesc, rdmaErrorsDesc,
	stackUpDesc, stackEndedDesc, stackDrainDesc, stackProcessorDesc, stackTenantTimeDesc, stackRetransmitsDesc, stackDroppedDesc, stackRefusedDesc, stackTenantsDesc, stackMemoryDesc,
	stackConnectionsDesc, stackQueuedDesc,
}

// Observed is what the metrics are made of; an [Agent] is one.
type Observed interface {
	Status(ctx context.Context) (Status, error)
	Traffic(ctx context.Context) ([]model.Traffic, error)
	LimitUse(ctx context.Context) ([]model.LimitUse, error)
	RDMA(ctx context.Context) (RDMA, error)
	Stacks(ctx context.Context) (Stacks, error)
}

// NewCollector turns what agent tells into Heddle's metrics, once a scrape. If it fails to tell, so
// does the scrape: half the metrics would look like a reset.
func NewCollector(agent Observed) prometheus.Collector {
	return collector{agent}
}

type collector struct {
	agent Observed
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
	st, err := c.agent.Status(ctx)
	var traffic []model.Traffic
	var limits []model.LimitUse
	if err == nil {
		traffic, err = c.agent.Traffic(ctx)
	}
	if err == nil {
		limits, err = c.agent.LimitUse(ctx)
	}
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
	gauge(peersAwayDesc, float64(len(st.PeersAway)))
	for state, n := range st.Direct.Peers {
		gauge(directDesc, float64(n), state.String())
	}
	for outcome, n := range st.Direct.Probes {
		counter(probesDesc, n, outcome)
	}
	gauge(storeDesc, oneIf(st.Store.Healthy))
	gauge(revisionDesc, float64(st.Store.Revision))
	collectPolicy(st.Policy, gauge, counter)
	collectFlows(st.Flows, gauge, counter)
	collectFaults(st, gauge)
	collectEncryption(st.Encryption, gauge, counter)
	collectInterception(st.Interception, gauge, counter)
	collectCaps(limits, gauge, counter)
	for _, f := range st.Features {
		gauge(featureDesc, oneIf(f.Status == CheckOK), f.Name)
	}
	gauge(infoDesc, 1, st.Node.Name, st.Version)
	gauge(startedDesc, float64(st.Started.UnixMilli())/1e3)
	for _, t := range traffic {
		collectTraffic(t, gauge, counter)
	}
	if st.Router != nil {
		// A router that says nothing is no reason to have no metrics of all else.
		rdma, err := c.agent.RDMA(ctx)
		gauge(rdmaRouterDesc, oneIf(err == nil && st.Router.State == RouterRuns))
		counter(rdmaEndedDesc, st.Router.Ended)
		collectRDMA(rdma, gauge, counter)
	}
	if stacks, err := c.agent.Stacks(ctx); err == nil {
		collectStacks(stacks.Modules, gauge, counter)
		collectStackTime(stacks.Modules, ch)
	}
}

func collectFaults(st Status, gauge func(d *prometheus.Desc, v float64, labels ...string)) {
	faults := make(map[FaultReason]int)
	for _, f := range st.Faults {
		faults[f.Reason]++
	}
	for _, r := range st.FaultReasons {
		faults[r] += 0 // without one, too
	}
	for r, n := range faults {
		gauge(faultsDesc, float64(n), string(r))
	}
}

// collectInterception gives the metrics of trapped calls.
func collectInterception(in Interception, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	gauge(listenersDesc, float64(in.Listeners))
	gauge(readersDesc, float64(in.Readers))
	counter(answeredDesc, in.Answered)
	counter(continuedDesc, in.Continued)
	counter(ioctlsDesc, in.Ioctls)
	for _, cause := range slices.Sorted(maps.Keys(in.Failed)) {
		counter(failedDesc, in.Failed[cause], cause)
	}
	counter(premadeDesc, in.PremadeHits, "hit")
	counter(premadeDesc, in.PremadeMisses, "miss")
	counter(batchesDesc, in.Batches)
	counter(batchSocketsDesc, in.BatchSockets)
	counter(oldBatchesDesc, in.Batches)
	counter(oldBatchSocketsDesc, in.BatchSockets)
	gauge(unguardedDesc, float64(len(in.Unguarded)))
	gauge(socketLimitDesc, float64(in.EndpointSockets))
	gauge(portLimitDesc, float64(in.EndpointPorts))
}

// collectCaps gives the metrics of endpoints that have caps, in the directions that have one.
func collectCaps(list []model.LimitUse, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	for _, l := range list {
		for _, d := range []struct {
			name      string
			all, each model.Rate // of the endpoint; of each connection
			use       model.QueueUse
		}{{"egress", l.Limits.Egress, l.Limits.ConnectionEgress, l.Egress}, {"ingress", l.Limits.Ingress, l.Limits.ConnectionIngress, l.Ingress}} {
			if d.all > 0 {
				gauge(capDesc, float64(d.all), l.Endpoint, d.name)
			}
			if d.all == 0 && d.each == 0 {
				continue
			}
			counter(capBytesDesc, d.use.Bytes, l.Endpoint, d.name)
			counter(capDroppedDesc, d.use.Dropped, l.Endpoint, d.name)
			gauge(capBacklogDesc, float64(d.use.BacklogBytes), l.Endpoint, d.name)
		}
	}
}

// collectStackTime gives the processor time of stack modules, whole and by endpoint.
func collectStackTime(modules []StackModule, ch chan<- prometheus.Metric) {
	for _, m := range modules {
		kind := string(m.Stack)
		ch <- prometheus.MustNewConstMetric(stackProcessorDesc, prometheus.CounterValue, m.Processor.Seconds(), kind)
		for _, t := range m.Tenants {
			ch <- prometheus.MustNewConstMetric(stackTenantTimeDesc, prometheus.CounterValue, t.Processor.Seconds(), kind, t.Profile, t.Endpoint)
		}
	}
}

// collectFlows gives the metrics of flows.
func collectFlows(f FlowStats, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	for _, c := range f.Counts {
		counter(flowsDesc, c.Count, string(c.Event), string(cmp.Or(c.Path, model.PathNone)))
	}
	gauge(flowsKeptDesc, float64(f.Kept))
	gauge(flowFollowersDesc, float64(f.Followers))
	counter(flowsUnreadDesc, f.Lost)
	if f.Export != nil {
		counter(exportedDesc, f.Export.Sent)
		for why, n := range f.Export.Lost {
			counter(exportLostDesc, n, why)
		}
	}
}

// collectStacks gives the metrics of stack modules. One that has not answered has few.
func collectStacks(modules []StackModule, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	for _, m := range modules {
		kind := string(m.Stack)
		gauge(stackUpDesc, oneIf(m.PID != 0), kind)
		counter(stackEndedDesc, m.Ended, kind)
		gauge(stackDrainDesc, oneIf(m.Drain != nil), kind)
		counter(stackRetransmitsDesc, m.Retransmits, kind)
		counter(stackDroppedDesc, m.Dropped, kind)
		counter(stackRefusedDesc, m.Refused, kind)
		use, tenants := make(map[string]StackUse), make(map[string]int)
		for _, t := range m.Tenants {
			u := use[t.Profile]
			u.Memory, u.Connections = u.Memory+t.Memory, u.Connections+t.Connections
			u.SendQueue, u.ReceiveQueue = u.SendQueue+t.SendQueue, u.ReceiveQueue+t.ReceiveQueue
			use[t.Profile] = u
			tenants[t.Profile]++
		}
		for profile, u := range use {
			gauge(stackTenantsDesc, float64(tenants[profile]), kind, profile)
			gauge(stackMemoryDesc, float64(u.Memory), kind, profile)
			gauge(stackConnectionsDesc, float64(u.Connections), kind, profile)
			gauge(stackQueuedDesc, float64(u.SendQueue), kind, profile, "send")
			gauge(stackQueuedDesc, float64(u.ReceiveQueue), kind, profile, "receive")
		}
	}
}

// collectRDMA gives the metrics of devices that the router has, and of their queue pairs.
func collectRDMA(r RDMA, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	for _, d := range r.Devices {
		if !d.Known {
			continue
		}
		for _, what := range RDMAObjects {
			gauge(rdmaObjectsDesc, float64(d.Used[what]), d.Endpoint, what)
			gauge(rdmaLimitDesc, float64(d.Limits[what]), d.Endpoint, what)
		}
		for path, t := range d.Traffic {
			counter(rdmaMessagesDesc, t.Requests, d.Endpoint, string(path), "requester")
			counter(rdmaMessagesDesc, t.Served, d.Endpoint, string(path), "responder")
			counter(rdmaSentDesc, t.BytesSent, d.Endpoint, string(path))
			counter(rdmaReceivedDesc, t.BytesReceived, d.Endpoint, string(path))
		}
		counter(rdmaErrorsDesc, d.Errors, d.Endpoint)
	}
	type kind struct{ endpoint, state string }
	pairs := make(map[kind]int)
	for _, q := range r.QueuePairs {
		pairs[kind{q.Endpoint, q.State}]++
	}
	for k, n := range pairs {
		gauge(rdmaPairsDesc, float64(n), k.endpoint, k.state)
	}
}

// collectTraffic gives the metrics of one endpoint. Paths that carry none of its connections have
// no series.
func collectTraffic(t model.Traffic, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	counter(openedDesc, t.Opened, t.Name)
	counter(acceptedDesc, t.Accepted, t.Name)
	counter(connectFailedDesc, t.Refused, t.Name, "refused")
	counter(connectFailedDesc, t.TimedOut, t.Name, "timed_out")
	counter(connectFailedDesc, t.Failed, t.Name, "other")
	counter(closedDesc, t.Closed, t.Name)
	counter(brokenDesc, t.Broken, t.Name)
	for path, n := range t.Live {
		gauge(liveDesc, float64(n), t.Name, string(path))
	}
	gauge(socketsDesc, float64(t.Sockets), t.Name)
	gauge(portsDesc, float64(t.Ports), t.Name)
	counter(sentDesc, t.BytesSent, t.Name)
	counter(receivedDesc, t.BytesReceived, t.Name)
	counter(retransmitsDesc, t.Retransmits, t.Name)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func collectPolicy(p Policy, gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, uint64, ...string)) {
	gauge(policiesDesc, float64(p.Policies))
	gauge(policyRulesDesc, float64(p.Rules))
	gauge(policyHealthyDesc, oneIf(p.Error == "" && p.CutError == "" && len(p.Faults) == 0))
	gauge(policyRevisionDesc, float64(p.Revision))
	gauge(policyUpdateDesc, p.Took.Seconds())
	gauge(policyPairsDesc, float64(p.Pairs))
	counter(policyCutDesc, p.Cut)
}

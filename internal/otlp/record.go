package otlp

import (
	"maps"
	"slices"
	"strings"

	collector "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"

	"heddle.dev/heddle/internal/flow"
)

// eventName is that of every record.
const eventName = "heddle.flow"

// request makes one of a node's flows. docs/howto/observe.md has the attributes: names of
// OpenTelemetry's conventions where there are some, heddle.* otherwise.
func request(cfg Config, flows []*flow.Flow) *collector.ExportLogsServiceRequest {
	records := make([]*logs.LogRecord, len(flows))
	for i, f := range flows {
		records[i] = record(f)
	}
	return &collector.ExportLogsServiceRequest{ResourceLogs: []*logs.ResourceLogs{{
		Resource: &resource.Resource{Attributes: []*common.KeyValue{
			text("service.name", "heddled"), text("service.version", cfg.Version), text("service.instance.id", cfg.Node), text("host.name", cfg.Node),
		}},
		ScopeLogs: []*logs.ScopeLogs{{Scope: &common.InstrumentationScope{Name: "heddle.dev/heddle/flow", Version: cfg.Version}, LogRecords: records}},
	}}}
}

// record makes one of a flow. What is zero or empty is absent, as in JSON.
func record(f *flow.Flow) *logs.LogRecord {
	at := uint64(max(f.Time.UnixNano(), 0))
	r := &logs.LogRecord{
		TimeUnixNano: at, ObservedTimeUnixNano: at, EventName: eventName,
		SeverityNumber: logs.SeverityNumber_SEVERITY_NUMBER_INFO, SeverityText: "INFO",
		Body: value(summary(f)),
	}
	if f.Verdict != flow.Allowed {
		r.SeverityNumber, r.SeverityText = logs.SeverityNumber_SEVERITY_NUMBER_WARN, "WARN"
	}
	add := func(kv *common.KeyValue) { r.Attributes = append(r.Attributes, kv) }
	texts := func(pairs ...string) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i+1] != "" {
				add(text(pairs[i], pairs[i+1]))
			}
		}
	}
	texts("heddle.event", string(f.Event), "heddle.verdict", string(f.Verdict), "network.transport", f.Protocol, "heddle.seen_by", string(f.SeenBy),
		"heddle.path", string(f.Path), "heddle.reason", f.Reason, "heddle.reason_kind", string(f.ReasonKind), "heddle.policy", f.Policy, "heddle.rule", f.Rule,
		"error.type", f.Error)
	for _, end := range []struct {
		conventional, own string
		peer              flow.Peer
	}{{"source", "heddle.source", f.From}, {"destination", "heddle.destination", f.To}} {
		if end.peer.Addr.IsValid() {
			texts(end.conventional+".address", end.peer.Addr.String())
		}
		if end.peer.Port != 0 {
			add(number(end.conventional+".port", int64(end.peer.Port)))
		}
		texts(end.own+".endpoint", end.peer.Endpoint, end.own+".node", end.peer.Node)
		if len(end.peer.Labels) > 0 {
			add(labels(end.own+".labels", end.peer.Labels))
		}
	}
	if f.To.Addr.IsValid() {
		family := "ipv6"
		if f.To.Addr.Unmap().Is4() {
			family = "ipv4"
		}
		texts("network.type", family)
	}
	if !f.Relayed {
		add(number("heddle.bytes_sent", int64(f.BytesSent)))
		add(number("heddle.bytes_received", int64(f.BytesReceived)))
		add(number("heddle.retransmits", int64(f.Retransmits)))
	}
	for name, ns := range map[string]int64{"heddle.rtt_ns": int64(f.RTT), "heddle.duration_ns": int64(f.Duration), "heddle.socket": int64(f.Socket)} {
		if ns != 0 {
			add(number(name, ns))
		}
	}
	return r
}

// summary is a flow for who reads logs.
func summary(f *flow.Flow) string {
	s := string(f.Event) + " " + f.From.String() + " to " + f.To.String()
	for _, why := range []string{f.Reason, f.Rule, f.Error} {
		if why != "" {
			s += ", " + why
		}
	}
	return strings.ToValidUTF8(s, "?")
}

func value(s string) *common.AnyValue {
	return &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: s}}
}

func text(name, s string) *common.KeyValue {
	return &common.KeyValue{Key: name, Value: value(strings.ToValidUTF8(s, "?"))}
}

func number(name string, n int64) *common.KeyValue {
	return &common.KeyValue{Key: name, Value: &common.AnyValue{Value: &common.AnyValue_IntValue{IntValue: n}}}
}

func labels(name string, of map[string]string) *common.KeyValue {
	list := &common.KeyValueList{}
	for _, k := range slices.Sorted(maps.Keys(of)) {
		list.Values = append(list.Values, text(k, of[k]))
	}
	return &common.KeyValue{Key: name, Value: &common.AnyValue{Value: &common.AnyValue_KvlistValue{KvlistValue: list}}}
}

package datapath

import (
	"testing"

	"heddle.dev/heddle/internal/model"
)

// BenchmarkRemember times packets whose verdict depends on what is remembered: a datagram that
// asks, its answer, and a segment of a connection, each way.
func BenchmarkRemember(b *testing.B) {
	d := loadFilter(b)
	own, peer := policyPlace(2, 2, false), policyPlace(1, 2, false)
	asks := model.PairVerdict{Default: model.VerdictDrop, Ports: []model.PortVerdict{
		{Protocol: model.ProtocolTCP, First: 50, Last: 60, Verdict: model.VerdictAllow}, {Protocol: model.ProtocolUDP, First: 53, Last: 53, Verdict: model.VerdictAllow},
	}}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: twoWays(own, peer, asks, model.PairVerdict{Default: model.VerdictDrop})}); err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		step
	}{
		{"SYN", step{prog: d.objs.FromEndpoint, frame: ip(own, peer, 6, segment(40, 55, tcpSYN))}},
		{"segment", step{prog: d.objs.FromEndpoint, frame: ip(own, peer, 6, segment(40, 55, tcpACK))}},
		{"segment back", step{prog: d.objs.FromOverlay, frame: ip(peer, own, 6, segment(55, 40, tcpACK))}},
		{"question", step{prog: d.objs.FromEndpoint, frame: ip(own, peer, 17, datagram(40, 53))}},
		{"answer", step{prog: d.objs.FromOverlay, frame: ip(peer, own, 17, datagram(53, 40))}},
	} {
		b.Run(c.name, func(b *testing.B) {
			_, took, err := c.prog.Benchmark(c.frame, b.N, b.ResetTimer)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}

package node

import (
	"context"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/otlp"
)

// openExport has flows wait for a collector from now on, if one is configured.
func (fl *flows) openExport() (err error) {
	cfg := fl.cfg.Export
	if cfg.Endpoint == "" {
		return nil
	}
	cfg.Node, cfg.Version, cfg.Log = fl.cfg.Name, fl.cfg.Version, fl.log
	cfg.Failed = func(err error) {
		if err != nil {
			fl.faults.Set(api.FaultExport, "", err)
		} else {
			fl.faults.Clear(api.FaultExport, "")
		}
	}
	if fl.export, err = otlp.Open(cfg); err == nil {
		fl.queued = fl.kept.Queue(otlp.Queued)
	}
	return err
}

// runExport sends them until ctx ends.
func (fl *flows) runExport(ctx context.Context) {
	if fl.export != nil {
		fl.export.Run(ctx, fl.queued)
	}
}

// stats says what became of flows.
func (fl *flows) stats() api.FlowStats {
	s := flowStats(fl.kept.Stats())
	if fl.export == nil {
		return s
	}
	e := fl.export.Stats()
	s.Export = &api.FlowExport{Endpoint: e.Endpoint, Sent: e.Sent, Lost: make(map[string]uint64, len(e.Lost))}
	for why, n := range e.Lost {
		s.Export.Lost[string(why)] = n
	}
	return s
}

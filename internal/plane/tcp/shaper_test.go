package tcp

import (
	"errors"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

func limited(id model.EndpointID, l model.Limits) model.Endpoint {
	return model.Endpoint{ID: id, Limits: &l}
}

// TestBlocks: a direction keeps its block, no two have the same, and one that is no longer needed
// is given again.
func TestBlocks(t *testing.T) {
	b := make(blocks)
	one, err := b.shape(limited(1, model.Limits{ConnectionEgress: 1e6, ConnectionIngress: 1e6}))
	if err != nil {
		t.Fatal(err)
	}
	if one.Egress.Block == one.Ingress.Block {
		t.Errorf("both directions have block %d", one.Egress.Block)
	}
	again, err := b.shape(limited(1, model.Limits{ConnectionEgress: 2e6, ConnectionIngress: 1e6}))
	if err != nil || again.Egress.Block != one.Egress.Block || again.Ingress.Block != one.Ingress.Block {
		t.Errorf("blocks %+v, then %+v (%v)", one, again, err)
	}
	for id := model.EndpointID(2); ; id++ {
		_, err := b.shape(limited(id, model.Limits{ConnectionEgress: 1e6}))
		var full *api.Error
		if errors.As(err, &full) {
			if full.Code != api.CodeExhausted || full.Field == "" || full.Remedy == "" || len(b) != netcfg.ShapeBlocks {
				t.Errorf("with %d blocks taken: %#v", len(b), full)
			}
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	b.trim([]model.Endpoint{limited(1, model.Limits{ConnectionEgress: 1e6}), limited(9, model.Limits{Egress: 1e6})})
	if len(b) != 1 {
		t.Errorf("blocks after trim: %v", b)
	}
	next, err := b.shape(limited(7, model.Limits{ConnectionIngress: 1e6}))
	if err != nil || next.Ingress.Block == one.Egress.Block {
		t.Errorf("block %d given twice (%v)", next.Ingress.Block, err)
	}
}

// TestLimitFor: what the programs are told names the classes that netcfg makes, and the tighter
// rate.
func TestLimitFor(t *testing.T) {
	b := make(blocks)
	e := limited(3, model.Limits{Egress: 5e6, Ingress: 9e6, ConnectionIngress: 4e6, Priority: model.PriorityLow})
	s, err := b.shape(e)
	if err != nil {
		t.Fatal(err)
	}
	l := limitFor(s, *e.Limits)
	if l.Egress.Class != 3 || l.Egress.Connections != 0 || l.Egress.Rate != 5e6 {
		t.Errorf("egress %+v", l.Egress)
	}
	if l.Ingress.Class == 0 || l.Ingress.Class != l.Ingress.Connections || l.Ingress.Rate != 4e6 {
		t.Errorf("ingress %+v", l.Ingress)
	}
	if l.Priority != model.PriorityLow || l.DSCP != nil {
		t.Errorf("marks %+v", l)
	}
}

// TestShapeAnyhow: limits for which there is no place left are tighter than asked for, never wider.
func TestShapeAnyhow(t *testing.T) {
	b := make(blocks)
	for n := range netcfg.ShapeBlocks - 1 {
		b[blockKey{model.EndpointID(100 + n), true}] = n
	}
	e := limited(1, model.Limits{Egress: 9e6, ConnectionEgress: 2e6, Ingress: 3e6, ConnectionIngress: 4e6})
	s, err := b.shapeAnyhow(e)
	var full *api.Error
	if !errors.As(err, &full) || full.Code != api.CodeExhausted {
		t.Errorf("%v, want that no place is left", err)
	}
	// The last place is for one direction.
	if want := (netcfg.ShapedDirection{Rate: 9e6, ConnectionRate: 2e6, Block: netcfg.ShapeBlocks - 1}); s.Egress != want {
		t.Errorf("egress %+v, want %+v", s.Egress, want)
	}
	if want := (netcfg.ShapedDirection{Rate: 3e6}); s.Ingress != want {
		t.Errorf("ingress %+v, want %+v", s.Ingress, want)
	}
	delete(b, blockKey{100, true})
	s, err = b.shapeAnyhow(e)
	if want := (netcfg.ShapedDirection{Rate: 3e6, ConnectionRate: 4e6}); err != nil || s.Ingress != want {
		t.Errorf("ingress %+v, %v, want %+v", s.Ingress, err, want)
	}
}

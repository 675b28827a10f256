package netcfg

import (
	"maps"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestShapeClasses: classes of different directions and endpoints never meet, and those of one
// direction never allow more than its caps.
func TestShapeClasses(t *testing.T) {
	owner := make(map[uint16]int)
	for i, s := range []Shape{
		{ID: 1, Egress: ShapedDirection{Rate: 5e6}, Ingress: ShapedDirection{Rate: 6e6}},
		{ID: model.MaxEndpointID, Egress: ShapedDirection{Rate: 5e6}, Ingress: ShapedDirection{Rate: 6e6}},
		{ID: 2, Egress: ShapedDirection{ConnectionRate: 5e6, Block: 0}, Ingress: ShapedDirection{Rate: 6e6, ConnectionRate: 7e6, Block: ShapeBlocks - 1}},
	} {
		classes := s.classes()
		byMinor := make(map[uint16]shapeClass)
		for _, c := range classes {
			if other, taken := owner[c.minor]; taken || c.minor == 0 {
				t.Errorf("shape %d: class %#x is shape %d's", i, c.minor, other)
			}
			owner[c.minor] = i
			if _, before := byMinor[c.parent]; c.parent != 0 && !before {
				t.Errorf("shape %d: class %#x comes before its parent", i, c.minor)
			}
			byMinor[c.minor] = c
			if c.rate > c.ceil || c.rate == 0 || c.queue == 0 != (c.ceil == c.rate && childless(classes, c.minor) == false) {
				t.Errorf("shape %d: %+v", i, c)
			}
		}
		for minor, parent := range byMinor {
			var sum model.Rate
			for c := range maps.Values(byMinor) {
				if c.parent == minor {
					sum += c.rate
				}
			}
			if sum > parent.rate {
				t.Errorf("shape %d: what is below class %#x may send %v, it %v", i, minor, sum, parent.rate)
			}
		}
		for _, first := range []uint16{second(s.EgressClasses()), second(s.IngressClasses())} {
			if first == 0 {
				continue
			}
			n, ok := ShapeBlockOf(first)
			if !ok || n != s.Egress.Block && n != s.Ingress.Block {
				t.Errorf("shape %d: block of class %#x is %d, %v", i, first, n, ok)
			}
		}
	}
}

func second(_, b uint16) uint16 { return b }

func childless(classes []shapeClass, minor uint16) bool {
	return !slices.ContainsFunc(classes, func(c shapeClass) bool { return c.parent == minor })
}

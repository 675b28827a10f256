package delayline

import (
	"math/rand/v2"
	"time"
)

// Shape is what one direction does to packets.
type Shape struct {
	// Rate is bits a second, 0 for as fast as it goes; Queue how many bytes may wait for it.
	Rate  float64
	Queue int
	Delay time.Duration
	// Loss is the part of the packets that is lost, each for itself.
	Loss float64
}

// shaper decides when each packet of a direction comes out. It has no clock of its own.
type shaper struct {
	Shape
	random *rand.Rand
	free   time.Time // the rate has nothing to do from then on
}

// take gives when a packet that comes now comes out; ok says that it does.
func (s *shaper) take(bytes int, now time.Time) (out time.Time, ok bool) {
	if s.Loss > 0 && s.random.Float64() < s.Loss {
		return out, false
	}
	if s.Rate == 0 {
		return now.Add(s.Delay), true
	}
	if s.free.Before(now) {
		s.free = now
	}
	if waiting := s.free.Sub(now).Seconds() * s.Rate / 8; int(waiting)+bytes > s.Queue {
		return out, false
	}
	s.free = s.free.Add(time.Duration(float64(bytes) * 8 / s.Rate * float64(time.Second)))
	return s.free.Add(s.Delay), true
}

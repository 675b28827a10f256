package paper

import (
	"errors"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
)

// cpuReading is the machine's processor time at an instant, and that of the two ends' processes.
type cpuReading struct {
	at             time.Time
	machine        loadgen.CPUTime
	server, client time.Duration
}

// readCPU reads what the processes at and below the two given have used.
func readCPU(server, client int) (r cpuReading, err error) {
	processes, err := machine.Processes("/proc")
	if err != nil {
		return r, err
	}
	r.server, r.client = machine.TreeTime(processes, server), machine.TreeTime(processes, client)
	if r.machine, err = loadgen.ReadCPUTime(); err != nil {
		return r, err
	}
	r.at = time.Now()
	return r, nil
}

// readingPause is the time between two readings: the window's ends are put between those around
// them, because who reads may be late on a machine that is busy.
const readingPause = 300 * time.Millisecond

// cpuWindow is the processor time of a window.
type cpuWindow struct {
	wall, busy     float64 // seconds
	split          loadgen.Split
	server, client float64 // seconds
}

// errBusy is why a measurement is none. A longer window may be.
var errBusy = errors.New("the machine is too busy")

// windowOf adds up the readings of a window. The parts of an interval that are outside count by
// their length.
func windowOf(readings []cpuReading, begin time.Time, length time.Duration) (w cpuWindow, err error) {
	end := begin.Add(length)
	for i := 1; i < len(readings); i++ {
		a, b := readings[i-1], readings[i]
		whole := b.at.Sub(a.at).Seconds()
		inside := earlier(b.at, end).Sub(later(a.at, begin)).Seconds()
		if whole <= 0 || inside <= 0 {
			continue
		}
		share := inside / whole
		split := b.machine.SplitSince(a.machine)
		w.wall += inside
		w.busy += share * b.machine.BusySince(a.machine).Seconds()
		w.split.User += time.Duration(share * float64(split.User))
		w.split.System += time.Duration(share * float64(split.System))
		w.split.SoftIRQ += time.Duration(share * float64(split.SoftIRQ))
		// A process that has gone takes its time with it.
		w.server += share * max(b.server-a.server, 0).Seconds()
		w.client += share * max(b.client-a.client, 0).Seconds()
	}
	if w.wall < length.Seconds()/2 {
		return w, fmt.Errorf("%.1f s of %s were watched: %w", w.wall, length, errBusy)
	}
	return w, nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// addTo adds the metrics of processors, and those that divide by the rate that is there already.
func (w cpuWindow) addTo(s *sample) error {
	rate := s.metrics[MetricRate]
	if w.busy <= 0 || rate <= 0 {
		return fmt.Errorf("%.3f operations/s, %.3f s of processors in %.3f s: nothing was measured", rate, w.busy, w.wall)
	}
	s.metrics[MetricCPU] = w.busy / w.wall
	s.metrics[MetricUser] = w.split.User.Seconds() / w.wall
	s.metrics[MetricSystem] = w.split.System.Seconds() / w.wall
	s.metrics[MetricSoftIRQ] = w.split.SoftIRQ.Seconds() / w.wall
	s.metrics[MetricServerCPU] = w.server / w.wall
	s.metrics[MetricClientCPU] = w.client / w.wall
	s.metrics[MetricCPUPerOp] = w.busy / w.wall / rate * 1e6
	return nil
}

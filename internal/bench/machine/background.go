package machine

import (
	"context"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
)

// backgroundWindow is how long Background watches: fifty times the resolution of processor time.
const backgroundWindow = 500 * time.Millisecond

// QuietMachine is the most that Background may find, in processors, for figures to be worth much:
// what else runs takes its share from every mode, but not the same share.
const QuietMachine = 0.1

// Background measures how many processors the machine keeps busy with other things than the bench.
func Background(ctx context.Context) (processors float64, err error) {
	before, err := loadgen.ReadCPUTime()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	select {
	case <-time.After(backgroundWindow):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	after, err := loadgen.ReadCPUTime()
	if err != nil {
		return 0, err
	}
	return after.BusySince(before).Seconds() / time.Since(start).Seconds(), nil
}

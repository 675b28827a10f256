// Package patience bounds waits for programs of this machine to get ready and to answer: those of
// the lab, of tests and of `heddle`, and an agent's for its fd keeper, its store, other agents and
// the programs that it starts. On machines slow beyond all measure, as emulated ones are,
// HEDDLE_PATIENCE makes every such bound that many times longer.
package patience

import (
	"os"
	"strconv"
	"sync"
	"time"
)

// Variable is the name of the environment variable, a whole number from 1 on.
const Variable = "HEDDLE_PATIENCE"

var factor = sync.OnceValue(func() time.Duration {
	n, err := strconv.Atoi(os.Getenv(Variable))
	if err != nil || n < 1 {
		return 1
	}
	return time.Duration(n)
})

// For gives the bound for what takes at most d on a machine of ordinary speed.
func For(d time.Duration) time.Duration { return d * factor() }

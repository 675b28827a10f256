package machine

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Pinning is the processors the ends of a connection run on: two, if the machine has them.
//
// Left alone, the scheduler puts both ends of a loopback connection now on one processor and now on
// two, and keeps to that for seconds: round trips then took 15 us or 50, on the same network. Two
// nodes never share a processor, so neither do the ends here, in any mode.
type Pinning struct{ Client, Server int }

// ChoosePinning picks the first and the last processor this process may use.
func ChoosePinning() (Pinning, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return Pinning{}, fmt.Errorf("read processors of this process: %w", err)
	}
	first, last := -1, -1
	for cpu := range len(set) * bitsPerWord {
		if !set.IsSet(cpu) {
			continue
		}
		if first < 0 {
			first = cpu
		}
		last = cpu
	}
	if first < 0 {
		return Pinning{}, errors.New("read processors of this process: none")
	}
	return Pinning{Client: first, Server: last}, nil
}

// bitsPerWord is the most bits a word of unix.CPUSet has; IsSet is false beyond the set.
const bitsPerWord = 64

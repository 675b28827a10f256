// Package machine reads what the machine of a benchmark is and does: its processors, its memory,
// and those of processes.
package machine

import (
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Describe says where and when a measurement is made.
func Describe() string {
	kernel := "?"
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	return fmt.Sprintf("Linux %s, %d processors; %s", kernel, runtime.NumCPU(), time.Now().Format(time.DateOnly))
}

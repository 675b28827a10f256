package stacks

import (
	"fmt"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// Row is a stack that is measured: a profile, which a pair of containers of its own has on each
// node.
type Row struct {
	Mode     bench.Mode
	Stack    stack.Kind
	Settings stack.Settings
	// Object is the file of a congestion control that is loaded for it, beside the program.
	Object string
	// Without says of workloads that it cannot run why not.
	Without map[string]string
	// Lab has it measured between the lab's nodes, Far over the bottleneck line.
	Lab, Far bool
	// Shared says that one process runs the stack for all containers of a node.
	Shared bool
}

// Rows are all of them, in the order of reports. Another stack is another line.
var Rows = []Row{
	{Mode: Profiled, Stack: stack.Kernel, Settings: harmless, Lab: true},
	{Mode: "paced", Stack: stack.Kernel, Settings: stack.Settings{PacingRate: 34_000_000_000}, Lab: true},
	{Mode: "cubic", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "cubic"}, Far: true},
	{Mode: "bbr", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "bbr"}, Lab: true, Far: true},
	{Mode: "dctcp", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "dctcp"}, Object: "dctcp.bpf.o", Lab: true},
	{Mode: "ledbat", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "ledbat"}, Object: "ledbat.bpf.o", Far: true},
	{Mode: "smoltcp", Stack: stack.Smoltcp, Lab: true, Far: true, Shared: true},
	{Mode: "netstack", Stack: stack.Netstack, Lab: true, Far: true},
}

// Profiled is the container of Heddle with a profile of settings that change nothing of what is
// measured: what it costs to have one.
const Profiled bench.Mode = "heddle+profile"

// harmless leaves pacing to a row of its own: TCP then sends by a timer, whatever the rate is.
var harmless = stack.Settings{
	Congestion: "cubic", InitialWindow: 10, UserTimeout: stack.Duration(time.Minute), NotsentLowat: 1 << 30,
	Keepalive: &stack.KeepaliveTimes{Idle: stack.Duration(time.Hour), Interval: stack.Duration(time.Minute), Count: 9},
}

// label says by its value which row's profile a container has.
const label = "bench-stacks"

// labContainers are those of a node: two without a profile, and two of each row.
var labContainers = 2 + 2*len(Rows)

// container gives the one of a row's that stands for c1 or c2 (second).
func container(row int, second bool) string {
	n := 3 + 2*row
	if second {
		n++
	}
	return fmt.Sprintf("c%d", n)
}

// rowOf gives the row of a mode; false if the mode is none.
func rowOf(mode bench.Mode) (int, bool) {
	for i, r := range Rows {
		if r.Mode == mode {
			return i, true
		}
	}
	return 0, false
}

// modes gives those of the rows that wanted selects.
func modes(wanted func(Row) bool) (all []bench.Mode) {
	for _, r := range Rows {
		if wanted(r) {
			all = append(all, r.Mode)
		}
	}
	return all
}

// profile gives the profile of a row.
func (r Row) profile(i int) *stack.Profile {
	value := rowLabel(i)
	return &stack.Profile{
		Name: label + "-" + value, Stack: r.Stack, Fallback: stack.Refuse, Settings: r.Settings,
		Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{label: value}}},
	}
}

package lab

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// Listed is a lab as List sees it.
type Listed struct {
	State
	// Down are parts of a lab that was up and is not whole any more: "agent of n1", "n1/c1
	// (overlay, host)".
	Down []string `json:"down,omitempty"`
}

// runs reports whether the first process of c in mode m runs. The modes share a process namespace,
// so whoever kills every process in a container ends the other modes with his own: all but the
// namespace's first process, which is mode heddle's.
func (l Lab) runs(groups cgroups, c container, m Mode) bool {
	pid, err := readPid(filepath.Join(l.containerDir(c), string(m), pidFile))
	if err != nil {
		return false
	}
	alive, err := processes(filepath.Join(groups.v2, l.cgroup(), c.suffix(), string(m)))
	return err == nil && slices.Contains(alive, pid)
}

// missing gives the parts of a lab that do not run.
func (l Lab) missing(s State, groups cgroups) (parts []string) {
	for _, n := range s.nodes() {
		if agents, _, err := agentProcesses(l.agentCgroup(groups, n)); err != nil || len(agents) == 0 {
			parts = append(parts, "agent of "+n)
		}
	}
	for _, c := range s.containers() {
		var modes []string
		for _, m := range Modes {
			if !l.runs(groups, c, m) {
				modes = append(modes, string(m))
			}
		}
		if len(modes) > 0 {
			parts = append(parts, fmt.Sprintf("%s (%s)", c, strings.Join(modes, ", ")))
		}
	}
	return parts
}

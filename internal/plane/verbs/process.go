package verbs

import (
	"path/filepath"
	"strconv"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// Program is the router's.
const Program = "heddle-rdma"

// Where a node has fewer processors, who looks for work keeps one from who would do it.
const spinProcessors = 4

// defaultSpinMicros is less than it takes to sleep and to be woken.
const defaultSpinMicros = 20

// DefaultSpinMicros is Config.SpinMicros of a node with so many processors whose operator says
// nothing.
func DefaultSpinMicros(processors int) uint32 {
	if processors < spinProcessors {
		return 0
	}
	return defaultSpinMicros
}

// Names of what the router has in the agent's state directory.
const (
	socketFile = "rdma.sock"
	logFile    = "rdma.log"
	// oldDir has the sockets of routers whose place another one has taken.
	oldDir = "rdma-old"
)

// StateFiles are the router's files in an agent's state directory.
var StateFiles = []string{socketFile, logFile, oldDir}

// program is the router of the agent self with this state directory.
func program(self, stateDir string) process.Program {
	return process.Program{Name: Program, Self: self, Socket: filepath.Join(stateDir, socketFile), Log: filepath.Join(stateDir, logFile)}
}

// Arguments are the first ones that the agent with this state directory starts its router with.
func Arguments(stateDir string) []string { return program("", stateDir).Arguments() }

// FindProgram gives the router's path, looking beside the program self first.
func FindProgram(self string) (string, error) { return program(self, "").Find() }

// reach connects to the router that runs, or starts one. It lives on when this process ends.
func (p *Plane) reach() (*link, error) {
	router := program(p.cfg.Self, p.cfg.StateDir)
	sockets, err := filepath.Abs(folder.All(p.cfg.SeccompSocket)) // it runs in another directory
	if err != nil {
		return nil, err
	}
	router.More = p.cfg.arguments(sockets)
	return process.Reach(router, dial)
}

// arguments are what a router is started with beside Arguments; endpoints' folders are below
// sockets.
func (c Config) arguments(sockets string) []string {
	args := []string{"--sockets", sockets}
	if c.Device != "" {
		args = append(args, "--device", c.Device)
	}
	if c.SpinMicros > 0 {
		args = append(args, "--spin-us", strconv.FormatUint(uint64(c.SpinMicros), 10))
	}
	return args
}

// adopt connects to a router that an earlier agent started.
func adopt(socket string) (*link, error) { return process.Adopt(socket, dial) }

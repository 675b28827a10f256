package node

import (
	"context"
	"fmt"
	"path/filepath"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/trap"
)

// listenForCalls makes ready for the calls that filters of containers trap, which the planes'
// handlers answer. From its return on runtimes may hand listeners over; Run serves them, and those
// that an earlier agent left.
func (a *Agent) listenForCalls() error {
	cfg := trap.Config{
		SocketPath: a.cfg.SeccompSocket, Log: a.log,
		Resolve: a.attachments.resolve, EndpointIn: a.docker.endpointIn, NetnsOf: a.known.netnsOf,
		Away: a.away.call, Resuming: a.resuming,
	}
	if exe := a.cfg.KeeperExe; exe != "" {
		socket := filepath.Join(a.cfg.StateDir, "holder.sock")
		runs := func() bool { return a.group.runs("park", "--socket", socket) }
		cfg.StartKeeper = func() error { return fdkeep.Ensure(exe, socket, runs) }
		if err := cfg.StartKeeper(); err != nil {
			return err
		}
		a.keeper = a.mirrored(fdkeep.NewClient(socket))
		cfg.Keeper = a.keeper
	}
	// An earlier agent's are there still.
	if services, err := a.planes.Services(); err != nil {
		return fmt.Errorf("services: %w", err)
	} else if len(services) > 0 {
		a.away.hasServices()
	}
	return a.traps.Listen(cfg)
}

// serving is a server of trapped calls that serves.
type serving struct {
	stop  context.CancelFunc
	ended chan error
}

// serveCalls has trapped calls answered until ctx or the server ends.
func serveCalls(ctx context.Context, traps *trap.Server) *serving {
	ctx, stop := context.WithCancel(ctx)
	s := &serving{stop: stop, ended: make(chan error, 1)}
	go func() { s.ended <- traps.Serve(ctx) }()
	return s
}

// wait gives how it ended, and has it end with ctx.
func (s *serving) wait(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.stop)()
	return <-s.ended
}

// mirrored gives a keeper of which the configured storage, if there is one, has a second copy.
func (a *Agent) mirrored(client *fdkeep.Client) trap.Keeper {
	if a.cfg.Storage == nil {
		return client
	}
	mirrored, err := fdkeep.Mirror(client, a.cfg.Storage, a.keptOnce)
	if err != nil {
		a.log.Error("seccomp listeners are kept by the fd keeper alone, or some are lost", "err", err)
	}
	if mirrored == nil {
		return client
	}
	return mirrored
}

// keptOnce is told how many listeners the storage has no room for.
func (a *Agent) keptOnce(alone int) {
	if alone == 0 {
		if a.faults.Clear(api.FaultKeptOnce, "") {
			a.log.Info("all seccomp listeners are in the service manager's store of descriptors, too")
		}
		return
	}
	was := a.faults.Has(api.FaultKeptOnce)
	a.faults.Set(api.FaultKeptOnce, "", fmt.Errorf("%d processes of containers, beside %d others: should the agent and the fd keeper be killed together, their socket() fails (ENOSYS)", alone, fdkeep.MaxStored))
	if !was {
		a.log.Warn("the service manager's store of descriptors is full: listeners are kept by the fd keeper alone from now on. Should it be killed together with the agent, "+
			"socket() of their processes fails (ENOSYS): have fewer containers on this node", "reason", api.FaultKeptOnce, "room", fdkeep.MaxStored)
	}
}

// resuming is told what keeps the fd keeper from giving the listeners of an earlier agent; nil: it
// has given them.
func (a *Agent) resuming(err error) {
	if err == nil {
		a.faults.Clear(api.FaultNotResumed, "")
		return
	}
	a.faults.Set(api.FaultNotResumed, "", fmt.Errorf("socket() of containers that ran before this agent waits, or makes sockets of the containers' own network namespaces: %w", err))
}

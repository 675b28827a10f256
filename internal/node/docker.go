package node

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// How long the agent waits between two looks at containers that Docker is making: doubled each time.
const (
	awaitFirst = 20 * time.Millisecond
	awaitMost  = 5 * time.Second
)

// docker is what the agent keeps for Docker's drivers.
type docker struct {
	// reserved are leases without endpoint: addresses that Docker has asked for. Guarded by Agent.change.
	reserved     map[netip.Addr]model.EndpointID
	reservations int // made so far: each lease has a name
	// asked says that an endpoint awaits its container.
	asked chan struct{}
}

func newDocker() docker {
	return docker{reserved: make(map[netip.Addr]model.EndpointID), asked: make(chan struct{}, 1)}
}

// DockerPool gives the node's first prefix, and its gateway.
func (a *Agent) DockerPool() (netip.Prefix, netip.Addr) {
	p := a.self.Prefixes[0]
	return p, model.Gateway(p)
}

// ReserveAddr leases an address that has no endpoint yet. A reservation does not outlive the agent.
func (a *Agent) ReserveAddr(want netip.Addr) (netip.Addr, error) {
	a.change.Lock()
	defer a.change.Unlock()
	a.docker.reservations++
	lease, err := a.leases.Lease(fmt.Sprintf("docker/reserved-%d", a.docker.reservations), want)
	if err != nil {
		return netip.Addr{}, leaseError(err)
	}
	a.docker.reserved[lease.Addrs[0]] = lease.ID
	return lease.Addrs[0], nil
}

// ReleaseAddr gives a reserved address back.
func (a *Agent) ReleaseAddr(addr netip.Addr) {
	a.change.Lock()
	defer a.change.Unlock()
	a.unreserve(addr)
}

// unreserve is called with change held.
func (a *Agent) unreserve(addr netip.Addr) {
	if id, ok := a.docker.reserved[addr]; ok {
		a.leases.Release(id)
		delete(a.docker.reserved, addr)
	}
}

// AwaitContainer attaches an endpoint whose container Docker has yet to make: its device waits on the node. What
// remains is done when the device is in the container (attachAwaited); until then the container is one that is not
// intercepted.
func (a *Agent) AwaitContainer(ctx context.Context, req api.EndpointRequest) (device string, err error) {
	if err := req.Validate(); err != nil {
		return "", err
	}
	a.change.Lock()
	defer a.change.Unlock()
	if have, ok := a.known.named(req.Name); ok {
		return "", &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("endpoint %s exists", have.Name),
			Remedy: "delete it first: heddle endpoints delete " + have.Name}
	}
	a.unreserve(req.Addr)
	e, err := a.create(ctx, req, func(e model.Endpoint) []step { return a.awaitSteps(e, &device) })
	if err != nil {
		return "", err
	}
	a.known.await(e)
	select {
	case a.docker.asked <- struct{}{}:
	default:
	}
	return device, nil
}

// awaitSteps are those that make the device of an endpoint whose container is yet to come; attachSteps undoes them, too.
func (a *Agent) awaitSteps(e model.Endpoint, device *string) []step {
	var waiting netcfg.Waiting
	return []step{
		{"make devices", func() (err error) {
			waiting, err = netcfg.PrepareEndpoint(a.deviceConfig(e))
			*device = waiting.Device
			return err
		}, nil},
		{"guard device", func() error { return a.planes.Guard(waiting.Ifindex) }, nil},
		{"await", func() error { return a.planes.Await(e, waiting.Ifindex) }, nil},
	}
}

// attachAwaited does what remains for the endpoint of a container that Docker has made now, if inode is its network
// namespace's; 0 stands for all.
func (a *Agent) attachAwaited(inode uint64) (left int) {
	for _, e := range a.known.listAwaited() {
		ok, err := a.attachIfSettled(e, inode)
		if err != nil {
			a.log.Error("a container made by Docker is not intercepted", "endpoint", e.Name, "err", err)
		}
		if !ok {
			left++
		}
	}
	return left
}

func (a *Agent) attachIfSettled(e model.Endpoint, inode uint64) (done bool, err error) {
	if inode != 0 {
		if now, err := netcfg.NetnsInode(e.NetnsPath); err != nil || uint64(now) != inode {
			return false, nil
		}
	}
	if settled, err := netcfg.Settled(a.deviceConfig(e)); err != nil || !settled {
		return false, err
	}
	a.change.Lock()
	defer a.change.Unlock()
	if !a.known.awaits(e) {
		return true, nil // by another caller, or it is gone
	}
	if err := a.attach(e); err != nil {
		if settled, serr := netcfg.Settled(a.deviceConfig(e)); serr == nil && !settled {
			return false, nil // the container ended meanwhile
		}
		return false, err
	}
	a.known.came(e.ID)
	a.log.Info("endpoint has its container", "endpoint", e.Name, "id", e.ID)
	return true, nil
}

// followAwaited looks at containers that Docker is making until ctx ends. Those that are intercepted need it not: their
// first socket finishes them.
func (a *Agent) followAwaited(ctx context.Context) {
	timer := time.NewTimer(awaitFirst)
	defer timer.Stop()
	wait := awaitFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.docker.asked:
			wait = awaitFirst
		case <-timer.C:
			wait = min(2*wait, awaitMost)
		}
		if a.attachAwaited(0) > 0 {
			timer.Reset(wait)
		}
	}
}

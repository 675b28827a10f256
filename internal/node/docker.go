package node

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// How long the agent waits between two looks at containers that Docker is making: doubled each
// time.
const (
	awaitFirst = 20 * time.Millisecond
	awaitMost  = 5 * time.Second
)

// docker serves Docker's drivers.
type docker struct {
	*host
	attachments *attachments
	endpoints   *endpoints

	// reserved are leases without endpoint: addresses that Docker has asked for. Guarded by
	// endpoints.change, as is the next.
	reserved     map[netip.Addr]model.EndpointID
	reservations int // made so far: each lease has a name
	// asked says that an endpoint awaits its container.
	asked chan struct{}
}

// DockerPool gives the node's first prefix, and its gateway.
func (dk *docker) DockerPool() (netip.Prefix, netip.Addr) {
	p := dk.self.Prefixes[0]
	return p, model.Gateway(p)
}

// ReserveAddr leases an address that has no endpoint yet. A reservation does not outlive the agent.
func (dk *docker) ReserveAddr(want netip.Addr) (netip.Addr, error) {
	asked := time.Now()
	dk.endpoints.change.Lock()
	defer dk.endpoints.change.Unlock()
	if err := dk.endpoints.storeIsThere("", asked); err != nil { // its endpoint could not be made
		return netip.Addr{}, err
	}
	dk.reservations++
	name := fmt.Sprintf("docker/reserved-%d", dk.reservations)
	lease, err := dk.endpoints.leaseAgain(want, func() (endpoint.Lease, error) { return dk.endpoints.leases.Lease(name, want) })
	if err != nil {
		return netip.Addr{}, leaseError(err)
	}
	dk.reserved[lease.Addrs[0]] = lease.ID
	return lease.Addrs[0], nil
}

// ReleaseAddr gives a reserved address back.
func (dk *docker) ReleaseAddr(addr netip.Addr) {
	dk.endpoints.change.Lock()
	defer dk.endpoints.change.Unlock()
	dk.unreserve(addr)
}

// unreserve is called with change held.
func (dk *docker) unreserve(addr netip.Addr) {
	if id, ok := dk.reserved[addr]; ok {
		dk.endpoints.leases.Release(id)
		delete(dk.reserved, addr)
	}
}

// AwaitContainer attaches an endpoint whose container Docker has yet to make: its device waits on
// the node. What remains is done when the device is in the container (attachAwaited); until then
// the container is one that is not intercepted.
func (dk *docker) AwaitContainer(ctx context.Context, req api.EndpointRequest) (device string, err error) {
	if err := req.Validate(); err != nil {
		return "", err
	}
	asked := time.Now()
	if err := dk.endpoints.change.lockFor(ctx); err != nil {
		return "", err
	}
	defer dk.endpoints.change.Unlock()
	if have, ok := dk.known.named(req.Name); ok {
		return "", &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("endpoint %s exists", have.Name),
			Remedy: "delete it first: heddle endpoints delete " + have.Name}
	}
	if err := dk.endpoints.storeIsThere(req.Name, asked); err != nil {
		return "", err
	}
	dk.unreserve(req.Addr)
	e, err := dk.endpoints.create(ctx, req, joining{steps: func(e model.Endpoint) []step { return dk.awaitSteps(e, &device) }})
	if err != nil {
		return "", err
	}
	dk.known.await(e)
	select {
	case dk.asked <- struct{}{}:
	default:
	}
	return device, nil
}

// awaitSteps are those that make the device of an endpoint whose container is yet to come;
// attachSteps undoes them, too.
func (dk *docker) awaitSteps(e model.Endpoint, device *string) []step {
	var waiting netcfg.Waiting
	return []step{
		{"make devices", func() (err error) {
			waiting, err = netcfg.PrepareEndpoint(dk.attachments.deviceConfig(e))
			*device = waiting.Device
			return err
		}, nil},
		{"guard device", func() error { return dk.planes.Guard(waiting.Ifindex) }, nil},
		{"await", func() error { return dk.planes.Await(e, waiting.Ifindex) }, nil},
	}
}

// attachAwaited does what remains for the endpoint of a container that Docker has made now, if
// inode is its network namespace's; 0 stands for all.
func (dk *docker) attachAwaited(inode uint64) (left int) {
	for _, e := range dk.known.listAwaited() {
		ok, err := dk.attachIfDone(e, inode)
		if err != nil {
			dk.log.Error("a container made by Docker is not intercepted", "endpoint", e.Name, "err", err)
		}
		if !ok {
			left++
		}
	}
	return left
}

func (dk *docker) attachIfDone(e model.Endpoint, inode uint64) (done bool, err error) {
	if inode != 0 {
		if now, err := netcfg.NetnsInode(e.NetnsPath); err != nil || uint64(now) != inode {
			return false, nil
		}
	}
	if ready, err := netcfg.EngineDone(dk.attachments.deviceConfig(e)); err != nil || !ready {
		return false, err
	}
	dk.endpoints.change.Lock()
	defer dk.endpoints.change.Unlock()
	if !dk.known.awaits(e) {
		return true, nil // by another caller, or it is gone
	}
	if now, ok := dk.known.named(e.Name); ok {
		e = now // it may have got verbs since it was listed
	}
	if err := dk.attachments.attach(e); err != nil {
		if ready, rerr := netcfg.EngineDone(dk.attachments.deviceConfig(e)); rerr == nil && !ready {
			return false, nil // the container ended meanwhile
		}
		return false, err
	}
	dk.known.came(e.ID)
	dk.log.Info("endpoint has its container", "endpoint", e.Name, "id", e.ID)
	return true, nil
}

// followAwaited looks at containers that Docker is making until ctx ends. Those that are
// intercepted need it not: their first socket finishes them.
func (dk *docker) followAwaited(ctx context.Context) {
	timer := time.NewTimer(awaitFirst)
	defer timer.Stop()
	wait := awaitFirst
	for {
		select {
		case <-ctx.Done():
			return
		case <-dk.asked:
			wait = awaitFirst
		case <-timer.C:
			wait = min(2*wait, awaitMost)
		}
		if dk.attachAwaited(0) > 0 {
			timer.Reset(wait)
		}
	}
}

// endpointIn finds the intercepted endpoint of a network namespace, also of one that Docker has
// made now.
func (dk *docker) endpointIn(inode uint64) (model.EndpointID, bool) {
	dk.attachAwaited(inode)
	return dk.attachments.endpointAt(inode)
}

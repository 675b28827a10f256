package node

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// attachments brings endpoints' devices, network namespaces and planes together. Whoever holds
// endpoints.change owns it, but for resolve and endpointAt, which any goroutine may call.
type attachments struct {
	*host
	// adopted are the endpoints whose device and address another network has made (model.Adopted):
	// decision 0020.
	adopted map[model.EndpointID]adopted
	ahead   *netcfg.Pair   // of the endpoint that is being made, if it has one already
	routes  *netcfg.Routes // while all endpoints of an earlier agent are attached, one after the other
}

// adopted is what must be known to leave such an endpoint's device again.
type adopted struct {
	ifindex int // node's side
	addr    netip.Addr
}

// attachSteps are those that attach an endpoint to its container. They may be repeated.
func (at *attachments) attachSteps(e model.Endpoint, dev *netcfg.EndpointDevice) []step {
	return []step{
		{
			"make devices", func() (err error) {
				*dev, err = at.addDevice(e)
				return err
			}, func() error {
				at.ahead = nil
				return errors.Join(at.leaveDevice(e), netcfg.DelEndpoint(e.ID, e.Addrs, model.Table))
			},
		},
		{"network namespace", func() error { return at.setNetns(e.ID, uint64(dev.Netns)) }, nil},
		{"attach", func() error { return at.planes.Attach(e, *dev) }, func() error {
			at.traps.Forget(e.ID)
			return at.planes.Detach(e)
		}},
	}
}

// attach brings devices and planes to an endpoint that is there. A device that it made goes again
// if it fails: without programs it would let anything through.
func (at *attachments) attach(e model.Endpoint) error {
	var dev netcfg.EndpointDevice
	if err := doSteps(at.attachSteps(e, &dev)); err != nil {
		if dev.Made {
			err = errors.Join(err, netcfg.DelEndpoint(e.ID, e.Addrs, model.Table))
		}
		return fmt.Errorf("endpoint %s: %w", e.Name, err)
	}
	at.faults.Clear(api.FaultEndpoint, e.Name)
	return nil
}

// deviceConfig says what e's devices are to be.
func (at *attachments) deviceConfig(e model.Endpoint) netcfg.EndpointConfig {
	return netcfg.EndpointConfig{
		ID: e.ID, Name: e.Name, Addrs: e.Addrs, Gateways: at.devices.Gateways, NetnsPath: e.NetnsPath, Device: e.Device,
		Table: model.Table, Intercepted: e.Planes.TCP.Intercepted,
		Adopt:  dockernet.Owns(e.Name), // Docker has given the container routes
		Routes: at.routes,
	}
}

// addDevice makes an endpoint's devices, or finds those that another network has made, and attaches
// the programs.
func (at *attachments) addDevice(e model.Endpoint) (netcfg.EndpointDevice, error) {
	if e.Adopted == nil {
		cfg := at.deviceConfig(e)
		cfg.Guard = at.planes.Guard
		cfg.Pair, at.ahead = at.ahead, nil
		return netcfg.AddEndpoint(cfg)
	}
	dev, err := netcfg.AdoptEndpoint(at.deviceConfig(e))
	if err != nil {
		return dev, err
	}
	at.adopted[e.ID] = adopted{dev.Ifindex, e.Addr4()}
	return dev, errors.Join(at.planes.Guard(dev.Ifindex), at.setAdopted())
}

// makeAhead begins to make the pair of an endpoint of which the store is being told, and gives what
// waits for it. Nothing leads to the pair before addDevice. What fails is tried again there.
func (at *attachments) makeAhead(e model.Endpoint) (wait func()) {
	cfg := at.deviceConfig(e)
	cfg.Guard = at.planes.Guard
	made := make(chan *netcfg.Pair, 1)
	go func() {
		pair, _ := netcfg.MakePair(cfg)
		made <- pair
	}()
	return func() { at.ahead = <-made }
}

// dropAhead undoes makeAhead.
func (at *attachments) dropAhead(e model.Endpoint) error {
	at.ahead = nil
	return netcfg.DelEndpoint(e.ID, nil, model.Table)
}

// leaveDevice undoes what attach did to a device that another network has made; that network
// deletes it.
func (at *attachments) leaveDevice(e model.Endpoint) error {
	was, ok := at.adopted[e.ID]
	if !ok {
		return nil
	}
	delete(at.adopted, e.ID)
	return errors.Join(netcfg.DetachTC(was.ifindex, netcfg.Ingress), netcfg.DetachTC(was.ifindex, netcfg.Egress), at.setAdopted())
}

// setAdopted has packets for such endpoints' sockets delivered, whatever device they come by.
func (at *attachments) setAdopted() error {
	var addrs []netip.Addr
	for _, x := range at.adopted {
		addrs = append(addrs, x.addr)
	}
	return at.devices.Firewall.SetAdopted(addrs)
}

// leaveStaleDevices detaches the programs from devices of other networks whose endpoints an earlier
// agent had.
func (at *attachments) leaveStaleDevices() error {
	keep := make(map[int]bool)
	for _, x := range at.adopted {
		keep[x.ifindex] = true
	}
	return netcfg.LeaveAdopted(keep)
}

func (at *attachments) removeStaleDevices(keep map[model.EndpointID]bool) error {
	links, err := netcfg.Endpoints()
	if err != nil {
		return fmt.Errorf("list endpoint devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		if !keep[l.ID] {
			at.log.Warn("removing the device of an endpoint nobody knows; if its container lives it has no network: restart it",
				"device", l.Name, "endpoint_id", l.ID)
			errs = append(errs, netcfg.DelEndpoint(l.ID, nil, model.Table))
		}
	}
	return errors.Join(errs...)
}

// setNetns notes in which network namespace an endpoint is. Another endpoint that was in one of
// this number is in none any more: a namespace has one endpoint, so that the number has been given
// again.
func (at *attachments) setNetns(id model.EndpointID, inode uint64) error {
	other, had := at.known.setNetns(id, inode)
	if had {
		at.saveEndpoint(other) // before its file is another's
	}
	at.saveEndpoint(id)
	if !had {
		return nil
	}
	return at.planes.LeaveNetns(other)
}

// checkNetns refuses a path at which there is no network namespace, and one of a namespace that has
// an endpoint: it could have one default route, and its sockets one address.
func (at *attachments) checkNetns(path string) error {
	inode, err := netcfg.NetnsInode(path)
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Field: "netns_path", Message: err.Error(),
			Remedy: "give the path of an existing network namespace, not the node's own"}
	}
	owner, taken := at.known.inNetns(inode)
	if !taken {
		return nil
	}
	if now, err := netcfg.NetnsInode(owner.NetnsPath); err != nil || now != inode {
		return nil // what had the number has gone
	}
	return &api.Error{Code: api.CodeConflict, Field: "netns_path",
		Message: fmt.Sprintf("network namespace %s has an endpoint already: %s", path, owner.Name),
		Remedy:  "a network namespace can have one endpoint; delete that one first: heddle endpoints delete " + owner.Name}
}

// ofProcesses begins the paths that lead to a process's network namespace, and to another's once
// its number has been given again: containerd's nerdctl and ctr have such.
const ofProcesses = "/proc/"

// identify says which network namespace is at path, if that may be another later although nobody
// has changed the path.
func identify(path string) (model.NetnsIdentity, error) {
	if !strings.HasPrefix(path, ofProcesses) {
		return model.NetnsIdentity{}, nil
	}
	return netcfg.IdentifyNetns(path)
}

// checkSame reports, as netcfg.ErrNoContainer, that the path of e's network namespace leads to
// another one by now.
func checkSame(e model.Endpoint) error {
	if e.Netns == (model.NetnsIdentity{}) { // an earlier build made it, or the path is its own
		return nil
	}
	now, err := netcfg.IdentifyNetns(e.NetnsPath)
	if err == nil && now != e.Netns {
		err = fmt.Errorf("%w: %s is another network namespace's by now", netcfg.ErrNoContainer, e.NetnsPath)
	}
	return err
}

// alive reports if the network namespace of e's container is gone.
func alive(e model.Endpoint) error { return errors.Join(netcfg.CheckNetns(e.NetnsPath), checkSame(e)) }

// resolve finds the endpoint whose containers name it in their seccomp profile.
func (at *attachments) resolve(metadata string, _ specs.ContainerProcessState) (model.EndpointID, error) {
	e, ok := at.known.named(metadata)
	if !ok {
		return 0, fmt.Errorf("no endpoint %q on this node: create it before its containers start", metadata)
	}
	if !e.Planes.TCP.Intercepted {
		return 0, fmt.Errorf("endpoint %q is not intercepted: create it with intercepted=true", metadata)
	}
	return e.ID, nil
}

// endpointAt finds the intercepted endpoint that has its network namespace.
func (at *attachments) endpointAt(inode uint64) (model.EndpointID, bool) {
	e, ok := at.known.inNetns(inode)
	if !ok || !e.Planes.TCP.Intercepted {
		return 0, false
	}
	// The endpoint may have outlived its container, and its namespace's number belong to another
	// now.
	now, err := netcfg.NetnsInode(e.NetnsPath)
	return e.ID, err == nil && now == inode
}

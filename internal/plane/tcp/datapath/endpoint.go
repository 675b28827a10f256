package datapath

import (
	"errors"
	"fmt"

	"heddle.dev/heddle/internal/model"
)

// ContainerSide is what the programs must know of an endpoint's network namespace: a socket of the
// node answers for the container's devices and limits.
type ContainerSide struct {
	Netns   uint32 // inode of the namespace
	Ifindex int    // of the endpoint's device there
	Device  string // its name
	// ResolverPort is where Docker's DNS listens there for TCP, at 127.0.0.11, in host byte order;
	// 0: nowhere.
	ResolverPort uint16
	// IDs are nil if not known: then TCP with processes that are not intercepted does not find the
	// other side.
	IDs *NetnsIDs
}

// NetnsIDs are the ids that the container's and the node's network namespace have in each other.
type NetnsIDs struct {
	Container, Node int
}

// SetEndpoint makes an endpoint of this node known to the programs, or changes it. ifindex is the
// node side of its veth.
func (d *Datapath) SetEndpoint(e model.Endpoint, ifindex int, inside ContainerSide) error {
	addr := e.Addr4()
	if !addr.IsValid() {
		return fmt.Errorf("endpoint %s: has no IPv4 overlay address", e.Name)
	}
	v := heddleEndpoint{
		Addr4: fromAddr(addr), Id: uint32(e.ID), Ifindex: uint32(ifindex),
		Netns: inside.Netns, ContainerIfindex: uint32(inside.Ifindex), Nsid: -1, NodeNsid: -1,
		Incarnation: e.Generation(), ResolverPort: toPort(inside.ResolverPort),
	}
	if inside.IDs != nil {
		v.Nsid, v.NodeNsid = int32(inside.IDs.Container), int32(inside.IDs.Node)
	}
	for i, b := range []byte(inside.Device[:min(len(inside.Device), len(v.Device)-1)]) {
		v.Device[i] = int8(b)
	}
	if e.Planes.TCP.Intercepted {
		v.Flags |= uint32(heddleEndpointFlagsENDPOINT_INTERCEPTED)
	}
	if e.Adopted != nil {
		v.Flags |= uint32(heddleEndpointFlagsENDPOINT_ADOPTED)
	}
	old, known, err := d.endpoint(e.ID)
	if err != nil {
		return fmt.Errorf("endpoint %s: read maps: %w", e.Name, err)
	}
	if known && old.Ifindex == v.Ifindex {
		v.Flags |= old.Flags & uint32(heddleEndpointFlagsENDPOINT_STACK)
	}
	d.set.Store(e.ID, v)
	if !known { // another may have had the id
		err = d.objs.CrossedById.Put(v.Id&uint32(model.MaxEndpointID), uint32(0))
	}
	err = errors.Join(err,
		d.openAccount(e.ID),
		d.openSockets(e.ID),
		d.openPorts(e.ID),
		d.objs.EndpointById.Put(v.Id, &v),
		d.objs.EndpointByIfindex.Put(v.Ifindex, &v),
		d.objs.EndpointByAddr.Put(v.Addr4, &v),
	)
	if known && old.Ifindex != v.Ifindex { // its namespace was made anew
		err = errors.Join(err, ignoreAbsent(d.objs.EndpointByIfindex.Delete(old.Ifindex)))
	}
	if known && old.Addr4 != v.Addr4 {
		err = errors.Join(err, ignoreAbsent(d.objs.EndpointByAddr.Delete(old.Addr4)))
	}
	if err != nil {
		return fmt.Errorf("endpoint %s: write maps: %w", e.Name, err)
	}
	return nil
}

// Recall takes an endpoint over from an earlier agent that told the programs of it, if it has
// neither other addresses nor another container since: sockets can be made for it. What is left to
// look at is SetEndpoint's.
func (d *Datapath) Recall(e model.Endpoint, netns uint64) bool {
	v, known, err := d.endpoint(e.ID)
	intercepted := v.Flags&uint32(heddleEndpointFlagsENDPOINT_INTERCEPTED) != 0
	if err != nil || !known || v.Addr4 != fromAddr(e.Addr4()) || v.Incarnation != e.Generation() || uint64(v.Netns) != netns || intercepted != e.Planes.TCP.Intercepted {
		return false
	}
	d.set.Store(e.ID, v)
	return true
}

// LeaveNetns says that the network namespace of endpoint id has gone, whose number and id another
// may have by now: no program is in it. Until SetEndpoint knows one again. An unknown id is no
// error.
func (d *Datapath) LeaveNetns(id model.EndpointID) error {
	v, known, err := d.endpoint(id)
	if err != nil || !known {
		return err
	}
	v.Netns, v.Nsid, v.NodeNsid = 0, -1, -1
	if err = d.putEndpoint(v); err != nil {
		return fmt.Errorf("endpoint %d: its network namespace has gone: %w", id, err)
	}
	return nil
}

// endpoint gives what the programs know of an endpoint, or what they knew of one that was not
// forgotten whole.
func (d *Datapath) endpoint(id model.EndpointID) (v heddleEndpoint, known bool, err error) {
	if err = d.objs.EndpointById.Lookup(uint32(id), &v); err == nil {
		return v, true, nil
	}
	last, known := d.set.Load(id)
	if known {
		v = last.(heddleEndpoint)
	}
	return v, known, ignoreAbsent(err)
}

// DeleteEndpoint forgets endpoint id. Its sockets keep their tags and are refused what is new
// (REFUSE_UNKNOWN_ENDPOINT). An unknown id is no error.
func (d *Datapath) DeleteEndpoint(id model.EndpointID) error {
	v, known, err := d.endpoint(id)
	if err != nil || !known {
		return err
	}
	// First what programs ask before they do anything for its sockets, last what these count in.
	err = errors.Join(
		ignoreAbsent(d.objs.EndpointById.Delete(v.Id)),
		ignoreAbsent(d.objs.EndpointByIfindex.Delete(v.Ifindex)),
		ignoreAbsent(d.objs.EndpointByAddr.Delete(v.Addr4)),
		d.closeAccount(id),
		d.closeSockets(id),
		d.closePorts(id),
	)
	if err == nil {
		d.set.Delete(id)
	}
	return err
}

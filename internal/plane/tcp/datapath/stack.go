package datapath

import (
	"errors"
	"fmt"
	"net"
	"unsafe"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// NoteBytes is how much SetNote keeps of a socket.
const NoteBytes = int(unsafe.Sizeof(heddleStackNote{}.Words))

// Note gives what SetNote keeps of socket fd; false: nothing.
func (d *Datapath) Note(fd int) (note [NoteBytes]byte, ok bool, err error) {
	err = d.objs.NoteBySock.Lookup(uint32(fd), (*heddleStackNote)(unsafe.Pointer(&note)))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return note, false, fmt.Errorf("look at note of socket: %w", err)
	}
	return note, err == nil, nil
}

// SetNote keeps something of socket fd, of whatever family, for as long as there is the socket: it
// outlives the agent.
func (d *Datapath) SetNote(fd int, note [NoteBytes]byte) error {
	if err := d.objs.NoteBySock.Put(uint32(fd), (*heddleStackNote)(unsafe.Pointer(&note))); err != nil {
		return fmt.Errorf("keep note of socket: %w", err)
	}
	return nil
}

// SetStackDevice has what is TCP and for an endpoint go to a stack module's device, whose frames
// have to have the address mac, and what comes from there go on as if it came from the container.
func (d *Datapath) SetStackDevice(id model.EndpointID, module int, mac net.HardwareAddr) error {
	v, known, err := d.endpoint(id)
	if err == nil && !known {
		err = errors.New("it is not known")
	}
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", id, err)
	}
	to := heddleStackDevice{Ifindex: uint32(module)}
	copy(to.Mac[:], mac)
	// In this order: a SYN that goes there is to have an answer.
	err = d.objs.StackByIfindex.Put(uint32(module), &heddleStackDevice{Ifindex: v.Ifindex})
	if err == nil {
		err = d.objs.StackByIfindex.Put(v.Ifindex, &to)
	}
	if err == nil {
		v.Flags |= uint32(heddleEndpointFlagsENDPOINT_STACK)
		err = d.putEndpoint(v)
	}
	if err != nil {
		return fmt.Errorf("device of a stack module: %w", err)
	}
	return nil
}

// ClearStackDevice undoes SetStackDevice. That there was nothing is no error.
func (d *Datapath) ClearStackDevice(id model.EndpointID) error {
	v, known, err := d.endpoint(id)
	if err != nil || !known {
		return err
	}
	v.Flags &^= uint32(heddleEndpointFlagsENDPOINT_STACK)
	err = d.putEndpoint(v)
	var to heddleStackDevice
	lookup := d.objs.StackByIfindex.LookupAndDelete(v.Ifindex, &to)
	if lookup == nil {
		lookup = d.objs.StackByIfindex.Delete(to.Ifindex)
	}
	return errors.Join(err, ignoreAbsent(lookup))
}

// putEndpoint changes an endpoint that the programs know.
func (d *Datapath) putEndpoint(v heddleEndpoint) error {
	d.set.Store(model.EndpointID(v.Id), v)
	put := func(m *ebpf.Map, key any) error { return ignoreAbsent(m.Update(key, &v, ebpf.UpdateExist)) }
	return errors.Join(put(d.objs.EndpointById, v.Id), put(d.objs.EndpointByIfindex, v.Ifindex), put(d.objs.EndpointByAddr, v.Addr4))
}

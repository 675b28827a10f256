package tcp

import (
	"errors"
	"net/netip"
	"os"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

var (
	_ plane.StackModules = (*Plane)(nil)
	_                    = [1]int{}[plane.NoteBytes-datapath.NoteBytes]
)

// Note implements plane.StackModules.
func (p *Plane) Note(fd int) (note [plane.NoteBytes]byte, ok bool, err error) {
	return p.datapath.Note(fd)
}

// SetNote implements plane.StackModules.
func (p *Plane) SetNote(fd int, note [plane.NoteBytes]byte) error {
	return p.datapath.SetNote(fd, note)
}

// StackDevices implements plane.StackModules.
func (p *Plane) StackDevices() error { return netcfg.StackDevices() }

// StackDevice implements plane.StackModules.
func (p *Plane) StackDevice(e model.Endpoint, veth netcfg.EndpointDevice) (netcfg.StackDevice, error) {
	return netcfg.DescribeStackDevice(e.ID, veth.Ifindex)
}

// OpenStackDevice implements plane.StackModules.
func (p *Plane) OpenStackDevice(e model.Endpoint, veth netcfg.EndpointDevice) (dev netcfg.StackDevice, file *os.File, err error) {
	dev, file, err = netcfg.AddStackDevice(e.ID, veth.Ifindex, p.datapath.TCPrograms().FromStack)
	if err != nil {
		return dev, nil, err
	}
	if err = p.datapath.SetStackDevice(e.ID, dev.Ifindex, dev.MAC); err == nil {
		err = p.shaper.attach(dev.Ifindex)
	}
	if err != nil {
		return dev, nil, errors.Join(err, file.Close())
	}
	return dev, file, nil
}

// Decide implements plane.StackModules.
func (p *Plane) Decide(from, to netip.Addr, port uint16) (model.Verdict, error) {
	return p.datapath.Decide(from, to, port)
}

// LeaveStackDevice implements plane.StackModules.
func (p *Plane) LeaveStackDevice(e model.Endpoint) error { return p.datapath.ClearStackDevice(e.ID) }

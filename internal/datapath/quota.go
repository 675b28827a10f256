package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// The socket option by which the agent asks bpf/sockets.bpf.c to count a socket. There is no such level in the
// kernel.
const (
	levelHeddle = 0x4864
	countSocket = 1
)

// CountSocket counts a tagged socket as one of its endpoint's, until it is closed for good. within says whether the
// endpoint may have it; otherwise it is not counted. A socket is counted once.
func (d *Datapath) CountSocket(fd int) (within bool, err error) {
	err = unix.SetsockoptInt(fd, levelHeddle, countSocket, 1)
	if errors.Is(err, unix.EDQUOT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("count socket: %w", err)
	}
	return true, nil
}

// Sockets gives how many sockets endpoint id has, those that its programs hold and connections that wait for accept().
// 0 if there is no such endpoint.
func (d *Datapath) Sockets(id model.EndpointID) (n uint64, err error) {
	if err := d.objs.SocketsByEndpoint.Lookup(uint32(id), &n); ignoreAbsent(err) != nil {
		return 0, fmt.Errorf("read sockets of endpoint %d: %w", id, err)
	}
	return n, nil
}

// openSockets begins to count the endpoint's sockets, unless an earlier agent has.
func (d *Datapath) openSockets(id model.EndpointID) error {
	err := d.objs.SocketsByEndpoint.Update(uint32(id), uint64(0), ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

func (d *Datapath) closeSockets(id model.EndpointID) error {
	return ignoreAbsent(d.objs.SocketsByEndpoint.Delete(uint32(id)))
}

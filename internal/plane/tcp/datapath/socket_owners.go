package datapath

import (
	"cmp"
	"fmt"
	"os"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// SocketOwners lists the processes of this machine that hold sockets of endpoints and whose ioctls
// of devices nobody traps: what they ask of such a socket is answered by the node. Only the node's
// own processes may: they are left out.
func (d *Datapath) SocketOwners() ([]model.SocketOwner, error) {
	raw, err := readHere(func() (*os.File, error) { return openIterator(d.objs.SocketOwners, nil) }) // it waits for no lock
	if err != nil {
		return nil, fmt.Errorf("list owners of sockets: %w", err)
	}
	sockets := map[model.SocketOwner]int{}
	err = eachRecord(raw, func(r *heddleSocketOwnerRecord) {
		sockets[model.SocketOwner{PID: int(r.Pid), Endpoint: model.EndpointID(r.EndpointId)}]++
	})
	out := make([]model.SocketOwner, 0, len(sockets))
	for h, n := range sockets {
		h.Sockets = n
		out = append(out, h)
	}
	slices.SortFunc(out, func(x, y model.SocketOwner) int {
		return cmp.Or(cmp.Compare(x.PID, y.PID), cmp.Compare(x.Endpoint, y.Endpoint))
	})
	return out, err
}

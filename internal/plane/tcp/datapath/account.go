package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// openAccount makes the endpoint's account unless it has one: an agent that starts again goes on
// counting.
func (d *Datapath) openAccount(id model.EndpointID) error {
	err := d.objs.AccountByEndpoint.Update(uint32(id), &heddleAccount{}, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

func (d *Datapath) closeAccount(id model.EndpointID) error {
	return ignoreAbsent(d.objs.AccountByEndpoint.Delete(uint32(id)))
}

// Account gives what the sockets of endpoint id did, without the bytes of live connections. The
// zero Traffic if there is no such endpoint.
func (d *Datapath) Account(id model.EndpointID) (model.Traffic, error) {
	t := model.Traffic{Endpoint: id}
	var a heddleAccount
	if err := d.objs.AccountByEndpoint.Lookup(uint32(id), &a); err != nil {
		if ignoreAbsent(err) == nil {
			return t, nil
		}
		return t, fmt.Errorf("read account of endpoint %d: %w", id, err)
	}
	t.Opened, t.Accepted = a.Opened, a.Accepted
	t.Refused, t.TimedOut, t.Failed = a.Refused, a.TimedOut, a.Failed
	t.Closed, t.Broken = a.Closed, a.Broken
	t.BytesSent, t.BytesReceived, t.Retransmits = a.BytesSent, a.BytesReceived, a.Retransmits
	return t, nil
}

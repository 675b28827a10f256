package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// LimitSlots is the number of classes in a block: see Cap.Connections.
const LimitSlots = len(heddleLimitSlots{}.Owner)

// Cap says in which classes of the shaping device's HTB qdisc packets of one direction wait.
type Cap struct {
	// Rate is the tighter of the caps behind it; 0: there is none.
	Rate model.Rate
	// Class is the minor number of the class of everything, or, with Connections, of what is no
	// connection; 0: no cap.
	Class uint16
	// Connections is the first of a block of LimitSlots classes; those behind it, but the last, are
	// for one connection each. 0: no cap a connection.
	Connections uint16
}

// Limit is what the programs enforce for one endpoint.
type Limit struct {
	Egress, Ingress Cap
	Priority        model.Priority
	DSCP            *uint8
}

// priorities are the kernel's TC_PRIO_INTERACTIVE, _BESTEFFORT and _BULK: bands 0, 1 and 2 of a
// device's ordinary queue.
var priorities = map[model.Priority]uint32{model.PriorityHigh: 6, model.PriorityNormal: 0, model.PriorityLow: 2}

// SetLimit makes the programs enforce l for endpoint id from the next packet on. The shaping device
// has the classes already, and the filters are attached.
func (d *Datapath) SetLimit(id model.EndpointID, l Limit) error {
	v := heddleLimit{Egress: toSide(l.Egress), Ingress: toSide(l.Ingress)}
	if prio, ok := priorities[l.Priority]; ok {
		v.Flags |= uint32(heddleLimitFlagsLIMIT_PRIORITY)
		v.Priority = prio
	}
	if l.DSCP != nil {
		v.Flags |= uint32(heddleLimitFlagsLIMIT_DSCP)
		v.Dscp = uint32(*l.DSCP)
	}
	for _, c := range []Cap{l.Egress, l.Ingress} {
		if c.Connections == 0 {
			continue
		}
		err := d.objs.SlotsByClass.Update(uint32(c.Connections), &heddleLimitSlots{}, ebpf.UpdateNoExist)
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return fmt.Errorf("limit of endpoint %d: make slots: %w", id, err)
		}
	}
	old, err := d.limit(id)
	if err != nil {
		return err
	}
	if err := d.objs.LimitByEndpoint.Put(uint32(id), &v); err != nil {
		return fmt.Errorf("limit of endpoint %d: %w", id, err)
	}
	return errors.Join(d.dropSlots(old, v), d.limitsInForce(true))
}

// ClearLimit lifts what SetLimit set. That there was nothing is no error.
func (d *Datapath) ClearLimit(id model.EndpointID) error {
	old, err := d.limit(id)
	if err != nil {
		return err
	}
	if err := ignoreAbsent(d.objs.LimitByEndpoint.Delete(uint32(id))); err != nil {
		return fmt.Errorf("clear limit of endpoint %d: %w", id, err)
	}
	left, err := d.Limits()
	if err != nil {
		return err
	}
	return errors.Join(d.dropSlots(old, heddleLimit{}), d.limitsInForce(len(left) > 0))
}

// Limits gives the classes in force, by endpoint: what an earlier agent left.
func (d *Datapath) Limits() (map[model.EndpointID]Limit, error) {
	var (
		id uint32
		v  heddleLimit
	)
	out := make(map[model.EndpointID]Limit)
	it := d.objs.LimitByEndpoint.Iterate()
	for it.Next(&id, &v) {
		out[model.EndpointID(id)] = Limit{Egress: toCap(v.Egress), Ingress: toCap(v.Ingress)}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list limits: %w", err)
	}
	return out, nil
}

// limit reads what is in force for an endpoint, the zero value if nothing is.
func (d *Datapath) limit(id model.EndpointID) (v heddleLimit, err error) {
	if err := ignoreAbsent(d.objs.LimitByEndpoint.Lookup(uint32(id), &v)); err != nil {
		return v, fmt.Errorf("read limit of endpoint %d: %w", id, err)
	}
	return v, nil
}

// dropSlots forgets the connections of blocks that old has and next has not.
func (d *Datapath) dropSlots(old, next heddleLimit) error {
	var errs []error
	for _, first := range []uint32{old.Egress.Connections, old.Ingress.Connections} {
		if first != 0 && first != next.Egress.Connections && first != next.Ingress.Connections {
			errs = append(errs, ignoreAbsent(d.objs.SlotsByClass.Delete(first)))
		}
	}
	return errors.Join(errs...)
}

// limitsInForce tells the programs that redirect into containers whether limits are to see those
// packets.
func (d *Datapath) limitsInForce(some bool) error {
	var v uint32
	if some {
		v = 1
	}
	if err := d.objs.LimitsInForce.Set(v); err != nil {
		return fmt.Errorf("set limits_in_force: %w", err)
	}
	return nil
}

// UseShapeDevice tells the programs which device SetLimit's classes are on. Until they know, a
// packet that two caps are for counts for the tighter only.
func (d *Datapath) UseShapeDevice(ifindex int) error {
	if err := d.objs.LimitDevice.Set(uint32(ifindex)); err != nil {
		return fmt.Errorf("set limit_device: %w", err)
	}
	return nil
}

func toSide(c Cap) heddleLimitSide {
	return heddleLimitSide{Rate: uint64(c.Rate) / 8, Class: uint32(c.Class), Connections: uint32(c.Connections)}
}

func toCap(s heddleLimitSide) Cap {
	return Cap{Rate: model.Rate(s.Rate * 8), Class: uint16(s.Class), Connections: uint16(s.Connections)}
}

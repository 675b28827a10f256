package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// ownedMap is a map whose entries belong to endpoints of this node.
type ownedMap struct {
	name    string
	entries *ebpf.Map
	// keep removes the entries that belong to none of owners, and gives their number.
	keep func(owners owners) (removed int, err error)
}

// owners are the endpoints of this node that there are.
type owners struct {
	ids map[model.EndpointID]bool
	// byID has what the programs know of them, which is the same in all three views of endpoints.
	byID map[uint32]heddleEndpoint
	// classes has the blocks of classes of their limits.
	classes map[uint32]bool
	// inUse gives the ids that sockets carry: of endpoints that are gone, too, while their sockets
	// live.
	inUse func() (map[model.EndpointID]bool, error)
}

// ownedMaps lists them, each behind those that say whose its entries are. What belongs to sockets,
// or to other nodes, goes with these; what is only remembered (LRU) is pushed out.
func (d *Datapath) ownedMaps() []ownedMap {
	ofID := func(name string, m *ebpf.Map) ownedMap {
		return ownedMap{name, m, func(o owners) (int, error) {
			return removeOrphans(m, func(id uint32, _ []byte) bool { return o.ids[model.EndpointID(id)] })
		}}
	}
	return []ownedMap{
		{"endpoint_by_id", d.objs.EndpointById, func(o owners) (int, error) {
			return removeOrphans(d.objs.EndpointById, func(id uint32, v heddleEndpoint) bool {
				keep := o.ids[model.EndpointID(id)]
				if keep {
					o.byID[id] = v
				}
				return keep
			})
		}},
		{"endpoint_by_addr", d.objs.EndpointByAddr, func(o owners) (int, error) {
			return removeOrphans(d.objs.EndpointByAddr, func(at heddleAddress, v heddleEndpoint) bool {
				own, known := o.byID[v.Id]
				return known && own.Addr4 == at
			})
		}},
		{"endpoint_by_ifindex", d.objs.EndpointByIfindex, func(o owners) (int, error) {
			return removeOrphans(d.objs.EndpointByIfindex, func(at uint32, v heddleEndpoint) bool {
				own, known := o.byID[v.Id]
				return known && own.Ifindex == at
			})
		}},
		ofID("stack_by_endpoint", d.objs.StackByEndpoint),
		{"stack_by_ifindex", d.objs.StackByIfindex, func(o owners) (int, error) {
			veths := make(map[uint32]bool)
			for _, own := range o.byID {
				veths[own.Ifindex] = true
			}
			return removeOrphans(d.objs.StackByIfindex, func(at uint32, to heddleStackDevice) bool {
				return veths[at] || veths[to.Ifindex]
			})
		}},
		ofID("account_by_endpoint", d.objs.AccountByEndpoint),
		ofID("sockets_by_endpoint", d.objs.SocketsByEndpoint),
		ofID("ports_by_endpoint", d.objs.PortsByEndpoint),
		ofID("node_ports_by_endpoint", d.objs.NodePortsByEndpoint),
		{"limit_by_endpoint", d.objs.LimitByEndpoint, func(o owners) (int, error) {
			return removeOrphans(d.objs.LimitByEndpoint, func(id uint32, v heddleLimit) bool {
				keep := o.ids[model.EndpointID(id)]
				if keep {
					o.classes[v.Egress.Connections], o.classes[v.Ingress.Connections] = true, true
				}
				return keep
			})
		}},
		{"slots_by_class", d.objs.SlotsByClass, func(o owners) (int, error) {
			return removeOrphans(d.objs.SlotsByClass, func(first uint32, _ []byte) bool { return o.classes[first] })
		}},
		{"claims_by_port", d.objs.ClaimsByPort, func(o owners) (int, error) {
			var inUse map[model.EndpointID]bool
			var err error
			removed, listed := removeOrphans(d.objs.ClaimsByPort, func(k heddlePortKey, _ []byte) bool {
				id := model.EndpointID(k.EndpointId)
				if !o.ids[id] && inUse == nil && err == nil {
					inUse, err = o.inUse()
				}
				return o.ids[id] || err != nil || inUse[id]
			})
			return removed, errors.Join(listed, err)
		}},
	}
}

// KeepEndpoints removes what the maps have of endpoints that are not in keep: an agent that is
// killed while it writes or forgets an endpoint leaves some maps with it and others without. It
// says what it removed by map; each entry is counted (REASON_MEND_STRAY_ENTRY). Nobody may set or
// delete endpoints meanwhile.
func (d *Datapath) KeepEndpoints(keep map[model.EndpointID]bool) (removed map[string]int, err error) {
	o := owners{ids: keep, byID: make(map[uint32]heddleEndpoint), classes: make(map[uint32]bool), inUse: d.IDsInUse}
	removed = make(map[string]int)
	total := 0
	for _, m := range d.ownedMaps() {
		n, merr := m.keep(o)
		if n > 0 {
			removed[m.name] = n
		}
		if total += n; merr != nil {
			// Without what it knows, the others would lose entries that have owners.
			err = fmt.Errorf("compare %s with the endpoints: %w", m.name, merr)
			break
		}
	}
	if removed["limit_by_endpoint"] > 0 && err == nil {
		var left map[model.EndpointID]Limit
		if left, err = d.Limits(); err == nil {
			err = d.limitsInForce(len(left) > 0)
		}
	}
	if removed["stack_by_endpoint"] > 0 && err == nil {
		err = d.stacksInForce()
	}
	return removed, errors.Join(err, d.count(heddleHeddleReasonREASON_MEND_STRAY_ENTRY, total))
}

// removeOrphans removes the entries of m that owned does not say are somebody's.
func removeOrphans[K, V any](m *ebpf.Map, owned func(K, V) bool) (removed int, err error) {
	var (
		k       K
		v       V
		orphans []K
	)
	it := m.Iterate()
	for it.Next(&k, &v) {
		if !owned(k, v) {
			orphans = append(orphans, k)
		}
	}
	if err := it.Err(); err != nil {
		return 0, fmt.Errorf("list: %w", err)
	}
	return deleteAll(m, orphans)
}

// count adds n to a counter that programs do not write.
func (d *Datapath) count(reason heddleHeddleReason, n int) error {
	if n == 0 {
		return nil
	}
	var perCPU []uint64
	if err := d.objs.CountByReason.Lookup(uint32(reason), &perCPU); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	perCPU[0] += uint64(n)
	if err := d.objs.CountByReason.Put(uint32(reason), perCPU); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	return nil
}

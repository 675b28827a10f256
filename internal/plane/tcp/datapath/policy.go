package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// ErrPolicyUnknown says that a change was to be applied to tables that this process does not know:
// it has just started, or an earlier change failed. The remedy is a change with Reset.
var ErrPolicyUnknown = errors.New("the policy in force is not known: apply whole tables")

// policyTables is what ApplyPolicy must know of the tables in the kernel. Every table but that of
// ports is there twice: a change is written to the side not in force, put in force by one write,
// and written to the other side.
type policyTables struct {
	mu    sync.Mutex
	known bool // whether what follows is what both sides hold
	side  uint32
	grace *ebpf.Map // an array of maps: updating it waits for every running program

	addrs    map[netip.Addr]struct{}
	prefixes map[netip.Prefix]struct{}
	pairs    map[model.ClassPair]uint32 // their port sets
	sets     map[string]uint32          // port sets by content
	byID     map[uint32]*portSet
	lastID   uint32
}

// portSet is a set of port ranges in verdict_by_port. Pairs with equal ranges share one.
type portSet struct {
	content string
	keys    []heddlePortRangeKey
	pairs   int // that have it
}

// ApplyPolicy changes the tables by which the programs decide. The change comes into force at once
// and as a whole: every connection and datagram is decided by the old tables or by the new ones.
// When it returns, every running decision is one by the new ones: CutForbidden then finds what the
// old ones allowed. After an error the tables in force are the old or the new ones, whole; the next
// change must have Reset (ErrPolicyUnknown). The cost is that of the change, not of the tables. Not
// for changes of the maps' limits: more than 131,072 addresses, 65,536 prefixes or 524,288 pairs
// are an error and leave the old tables in force.
func (d *Datapath) ApplyPolicy(change model.PolicyChange) (err error) {
	p := &d.policy
	p.mu.Lock()
	defer p.mu.Unlock()
	if !change.Reset && !p.known {
		return ErrPolicyUnknown
	}
	defer func() { p.known = err == nil }()
	flags, err := d.policyFlags()
	if err != nil {
		return err
	}
	p.side = flags & uint32(heddlePolicyFlagsPOLICY_SIDE) >> 1
	if change.Reset {
		// First: what does not fit is tried again and again, and is not to be written each time.
		err := d.fitsTwice(len(change.Set.ByAddr), len(change.Set.ByPrefix), len(change.Set.Pairs))
		if err == nil {
			err = d.forgetPolicy()
		}
		if err != nil {
			return fmt.Errorf("apply policy: %w", err)
		}
	}
	stale, err := d.notePolicy(change)
	if err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	if err := d.fitsTwice(len(p.addrs), len(p.prefixes), len(p.pairs)); err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	next := 1 - p.side
	if err := d.writeSide(change, next); err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	flags = next << 1
	if len(p.addrs)+len(p.prefixes)+len(p.pairs) > 0 {
		flags |= uint32(heddlePolicyFlagsPOLICY_ACTIVE)
	}
	if err := d.objs.PolicyState.Put(uint32(0), flags); err != nil {
		return fmt.Errorf("apply policy: put in force: %w", err)
	}
	// Nobody reads the old side any more when this is over.
	if err := d.awaitPrograms(); err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	if err := d.writeSide(change, p.side); err != nil {
		return fmt.Errorf("apply policy: second copy: %w", err)
	}
	p.side = next
	if err := d.deletePortSets(stale, change.Reset); err != nil {
		return fmt.Errorf("apply policy: %w", err)
	}
	return nil
}

// fitsTwice gives an error if the maps do not hold two copies of so many entries: a first copy that
// fits alone must not come into force.
func (d *Datapath) fitsTwice(addrs, prefixes, pairs int) error {
	for _, table := range []struct {
		of   *ebpf.Map
		size int
		what string
	}{
		{d.objs.ClassByAddr, addrs, "addresses"},
		{d.objs.ClassByPrefix, prefixes, "prefixes"},
		{d.objs.VerdictByPair, pairs, "pairs of classes"},
	} {
		if limit := int(table.of.MaxEntries() / 2); table.size > limit {
			return fmt.Errorf("%d %s: the tables hold %d", table.size, table.what, limit)
		}
	}
	return nil
}

func (d *Datapath) policyFlags() (flags uint32, err error) {
	if err := d.objs.PolicyState.Lookup(uint32(0), &flags); err != nil {
		return 0, fmt.Errorf("read policy state: %w", err)
	}
	return flags, nil
}

// awaitPrograms returns when every program that ran when it was called has ended: the kernel waits
// for them when an array of maps is changed.
func (d *Datapath) awaitPrograms() error {
	p := &d.policy
	inner := &ebpf.MapSpec{Name: "grace_inner", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	if p.grace == nil {
		m, err := ebpf.NewMap(&ebpf.MapSpec{
			Name: "grace", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner,
		})
		if err != nil {
			return fmt.Errorf("make map to wait with: %w", err)
		}
		p.grace = m
	}
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("make map to wait with: %w", err)
	}
	defer m.Close()
	if err := p.grace.Put(uint32(0), m); err != nil {
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}

// forgetPolicy begins anew: nothing is known of the tables but the numbers of port sets in use. It
// removes what failed changes and earlier processes left, first of all: else every failure would
// leave its port sets, until none fits.
func (d *Datapath) forgetPolicy() error {
	p := &d.policy
	p.addrs, p.prefixes = make(map[netip.Addr]struct{}), make(map[netip.Prefix]struct{})
	p.pairs, p.sets, p.byID = make(map[model.ClassPair]uint32), make(map[string]uint32), make(map[uint32]*portSet)
	// The other side first: no pair may name a port set that is gone.
	if err := d.clearSide(1 - p.side); err != nil {
		return err
	}
	inForce := make(map[uint32]struct{})
	var (
		pair    heddlePairKey
		verdict heddlePairVerdict
	)
	it := d.objs.VerdictByPair.Iterate()
	for it.Next(&pair, &verdict) {
		if pair.Side == p.side {
			inForce[verdict.Ports] = struct{}{}
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list pairs: %w", err)
	}
	return deleteWhere(d.objs.VerdictByPort, func(k *heddlePortRangeKey, _ *uint32) bool {
		p.lastID = max(p.lastID, k.Ports)
		_, used := inForce[k.Ports]
		return !used
	})
}

// notePolicy brings what is known to what it will be after change, writes the port sets that are
// new, and gives those that no pair has any more.
func (d *Datapath) notePolicy(change model.PolicyChange) (stale []*portSet, err error) {
	p := &d.policy
	for a := range change.Set.ByAddr {
		p.addrs[a] = struct{}{}
	}
	for prefix := range change.Set.ByPrefix {
		p.prefixes[prefix] = struct{}{}
	}
	for _, a := range change.DeleteAddrs {
		delete(p.addrs, a)
	}
	for _, prefix := range change.DeletePrefixes {
		delete(p.prefixes, prefix)
	}
	var lost []uint32
	for pair, v := range change.Set.Pairs {
		id, err := d.portSet(v.Ports)
		if err != nil {
			return nil, err
		}
		lost = append(lost, p.pairs[pair])
		p.pairs[pair] = id
	}
	for _, pair := range change.DeletePairs {
		lost = append(lost, p.pairs[pair])
		delete(p.pairs, pair)
	}
	for _, id := range lost {
		set := p.byID[id]
		if set == nil {
			continue
		}
		if set.pairs--; set.pairs == 0 {
			delete(p.byID, id)
			delete(p.sets, set.content)
			stale = append(stale, set)
		}
	}
	return stale, nil
}

// portSet gives the number of the set with these ranges, 0 for none. It counts for one pair more.
func (d *Datapath) portSet(ports []model.PortVerdict) (uint32, error) {
	if len(ports) == 0 {
		return 0, nil
	}
	p := &d.policy
	var content []byte
	for _, r := range ports {
		content = append(content, byte(r.Protocol), byte(r.Verdict))
		content = binary.BigEndian.AppendUint16(content, r.First)
		content = binary.BigEndian.AppendUint16(content, r.Last)
	}
	if id, ok := p.sets[string(content)]; ok {
		p.byID[id].pairs++
		return id, nil
	}
	p.lastID++
	set := &portSet{content: string(content), pairs: 1}
	for _, r := range ports {
		for _, key := range rangeKeys(p.lastID, r) {
			if err := putPolicy(d.objs.VerdictByPort, &key, uint32(r.Verdict)); err != nil {
				return 0, fmt.Errorf("write ports: %w", err)
			}
			set.keys = append(set.keys, key)
		}
	}
	p.sets[set.content], p.byID[p.lastID] = p.lastID, set
	return p.lastID, nil
}

// rangeKeys cuts a range of ports into prefixes.
func rangeKeys(set uint32, r model.PortVerdict) (keys []heddlePortRangeKey) {
	first, last := uint32(r.First), uint32(r.Last)
	for first <= last {
		size := uint32(1) << min(bits.TrailingZeros32(first|1<<16), bits.Len32(last-first+1)-1)
		keys = append(keys, heddlePortRangeKey{
			Prefixlen: 48 + 16 - uint32(bits.TrailingZeros32(size)), Ports: set,
			Protocol: uint8(r.Protocol), Port: toPort(uint16(first)),
		})
		first += size
	}
	return keys
}

// writeSide writes the change to one side of the tables, not in force. With Reset it removes what
// else is there.
func (d *Datapath) writeSide(change model.PolicyChange, side uint32) error {
	if change.Reset {
		if err := d.clearSide(side); err != nil {
			return err
		}
	}
	for a, c := range change.Set.ByAddr {
		if err := putPolicy(d.objs.ClassByAddr, &heddleClassKey{Side: side, Addr: fromAddr(a)}, classInfo(c)); err != nil {
			return fmt.Errorf("write class of %s: %w", a, err)
		}
	}
	for prefix, c := range change.Set.ByPrefix {
		if err := putPolicy(d.objs.ClassByPrefix, classPrefixKey(prefix, side), classInfo(c)); err != nil {
			return fmt.Errorf("write class of %s: %w", prefix, err)
		}
	}
	for pair, v := range change.Set.Pairs {
		value := heddlePairVerdict{Ports: d.policy.pairs[pair], Verdict: uint32(v.Default)}
		if err := putPolicy(d.objs.VerdictByPair, pairKey(pair, side), &value); err != nil {
			return fmt.Errorf("write verdict of classes %d and %d: %w", pair.From, pair.To, err)
		}
	}
	for _, a := range change.DeleteAddrs {
		if err := ignoreAbsent(d.objs.ClassByAddr.Delete(&heddleClassKey{Side: side, Addr: fromAddr(a)})); err != nil {
			return fmt.Errorf("delete class of %s: %w", a, err)
		}
	}
	for _, prefix := range change.DeletePrefixes {
		if err := ignoreAbsent(d.objs.ClassByPrefix.Delete(classPrefixKey(prefix, side))); err != nil {
			return fmt.Errorf("delete class of %s: %w", prefix, err)
		}
	}
	for _, pair := range change.DeletePairs {
		if err := ignoreAbsent(d.objs.VerdictByPair.Delete(pairKey(pair, side))); err != nil {
			return fmt.Errorf("delete verdict of classes %d and %d: %w", pair.From, pair.To, err)
		}
	}
	return nil
}

func pairKey(pair model.ClassPair, side uint32) *heddlePairKey {
	return &heddlePairKey{From: uint32(pair.From), To: uint32(pair.To), Side: side}
}

func classPrefixKey(p netip.Prefix, side uint32) *heddleClassPrefixKey {
	route := routeKey(p)
	if p.Addr().Is6() {
		side += 2
	}
	return &heddleClassPrefixKey{Prefixlen: 32 + route.Prefixlen, Of: heddleClassKey{Side: side, Addr: route.Addr}}
}

func classInfo(c model.ClassInfo) *heddleClassInfo {
	return &heddleClassInfo{ClassId: uint32(c.Class), Egress: uint8(c.Egress), Ingress: uint8(c.Ingress)}
}

// putPolicy writes one entry. The kernel takes memory for it from a stock that it refills beside
// us: that it is empty passes.
func putPolicy(m *ebpf.Map, key, value any) (err error) {
	for range 1000 {
		if err = m.Put(key, value); !errors.Is(err, unix.ENOMEM) {
			return err
		}
	}
	return err
}

// clearSide empties one side of the tables.
func (d *Datapath) clearSide(side uint32) error {
	return errors.Join(
		deleteWhere(d.objs.ClassByAddr, func(k *heddleClassKey, _ *heddleClassInfo) bool { return k.Side == side }),
		deleteWhere(d.objs.ClassByPrefix, func(k *heddleClassPrefixKey, _ *heddleClassInfo) bool { return k.Of.Side&1 == side }),
		deleteWhere(d.objs.VerdictByPair, func(k *heddlePairKey, _ *heddlePairVerdict) bool { return k.Side == side }),
	)
}

// deletePortSets removes sets that no side names any more; after a Reset also those of an earlier
// process.
func (d *Datapath) deletePortSets(stale []*portSet, reset bool) error {
	for _, set := range stale {
		for _, key := range set.keys {
			if err := ignoreAbsent(d.objs.VerdictByPort.Delete(&key)); err != nil {
				return fmt.Errorf("delete ports: %w", err)
			}
		}
	}
	if !reset {
		return nil
	}
	return deleteWhere(d.objs.VerdictByPort, func(k *heddlePortRangeKey, _ *uint32) bool {
		return d.policy.byID[k.Ports] == nil
	})
}

// deleteWhere removes the entries of m that stale selects.
func deleteWhere[K, V any](m *ebpf.Map, stale func(*K, *V) bool) error {
	var (
		k    K
		v    V
		keys []K
	)
	it := m.Iterate()
	for it.Next(&k, &v) {
		if stale(&k, &v) {
			keys = append(keys, k)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list %s: %w", m, err)
	}
	for _, k := range keys {
		if err := ignoreAbsent(m.Delete(&k)); err != nil {
			return fmt.Errorf("delete from %s: %w", m, err)
		}
	}
	return nil
}

// CutForbidden ends every connection of this node's endpoints that the policy in force forbids, and
// no others, and says how many: the programs at both ends see ECONNABORTED or a reset. It must run
// in the node's network namespace, after ApplyPolicy. It sees the connections of intercepted
// processes; CutForbiddenPlain those of others. On an error some may be alive: a kernel before
// Linux 6.5 cannot end them, and none can end one whose lock is held (lockwait.ErrStuck).
func (d *Datapath) CutForbidden() (cut int, err error) {
	cut, err = d.endPass("cut", d.objs.Cut, d.objs.ForbiddenUnlocked)
	return cut, wrapCut(err)
}

// CutForbiddenPlain is CutForbidden for the processes of one container that are not intercepted. It
// must run in the container's network namespace. Without it an end that only waits does not learn
// that its connection is forbidden: packets are what is stopped then.
func (d *Datapath) CutForbiddenPlain() (cut int, err error) {
	return d.cutPlainWith("cut_plain", d.objs.CutPlain)
}

// CutLeaving ends every socket of endpoint id, which leaves this node, and says how many: peers see
// a reset. It must run in the node's network namespace. While the programs know the endpoint,
// others may connect meanwhile; after DeleteEndpoint none is left. It sees those of intercepted
// processes; CutLeavingPlain those of others.
func (d *Datapath) CutLeaving(id model.EndpointID) (cut int, err error) {
	if err := d.objs.LeavingEndpoint.Set(uint32(id)); err != nil {
		return 0, fmt.Errorf("set leaving_endpoint: %w", err)
	}
	cut, err = d.endPass("cut_leaving", d.objs.CutLeaving, d.objs.LeavingUnlocked)
	return cut, wrapCut(err)
}

// CutLeavingPlain ends every connection of the calling thread's network namespace, a container's.
func (d *Datapath) CutLeavingPlain() (cut int, err error) {
	return d.cutPlainWith("cut_leaving_plain", d.objs.CutLeavingPlain)
}

func (d *Datapath) cutPlainWith(name string, program *ebpf.Program) (cut int, err error) {
	raw, err := d.iterateIn(name, program)
	errs := []error{err}
	err = eachRecord(raw, func(s *heddleSocketRecord) {
		var err error
		if s.Ended == 0 { // before Linux 6.5 a program cannot
			err = d.destroy(fmt.Sprintf("%s, socket %d", name, s.Cookie), s)
		}
		if err == nil {
			cut++
		} else if !errors.Is(err, unix.ENOENT) { // it has ended
			errs = append(errs, err)
		}
	})
	return cut, wrapCut(errors.Join(append(errs, err)...))
}

func wrapCut(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cut connections: %w", err)
}

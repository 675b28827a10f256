package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// Decide gives the verdict of the policy in force on a TCP connection that from opens to a port of
// to, by what the programs decide by (bpf/policy/decide.h).
func (d *Datapath) Decide(from, to netip.Addr, port uint16) (model.Verdict, error) {
	d.policy.mu.Lock() // both sides of the tables are whole
	defer d.policy.mu.Unlock()
	flags, err := d.policyFlags()
	if err != nil || flags&uint32(heddlePolicyFlagsPOLICY_ACTIVE) == 0 || from == to {
		return model.VerdictAllow, err
	}
	side := flags & uint32(heddlePolicyFlagsPOLICY_SIDE) >> 1
	source, err := d.classOf(from, side)
	if err != nil {
		return 0, fmt.Errorf("look up class of %s: %w", from, err)
	}
	target, err := d.classOf(to, side)
	if err != nil {
		return 0, fmt.Errorf("look up class of %s: %w", to, err)
	}
	var pair heddlePairVerdict
	err = d.objs.VerdictByPair.Lookup(&heddlePairKey{From: source.ClassId, To: target.ClassId, Side: side}, &pair)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return model.Verdict(source.Egress).Worse(model.Verdict(target.Ingress)), nil
	}
	if err != nil {
		return 0, fmt.Errorf("look up verdict of classes %d and %d: %w", source.ClassId, target.ClassId, err)
	}
	verdict := pair.Verdict
	if pair.Ports != 0 {
		key := heddlePortRangeKey{Prefixlen: 64, Ports: pair.Ports, Protocol: uint8(model.ProtocolTCP), Port: toPort(port)}
		if err := ignoreAbsent(d.objs.VerdictByPort.Lookup(&key, &verdict)); err != nil {
			return 0, fmt.Errorf("look up verdict on port %d: %w", port, err)
		}
	}
	return model.Verdict(verdict), nil
}

// classOf gives what holds for an address, nothing if no rule knows it.
func (d *Datapath) classOf(a netip.Addr, side uint32) (info heddleClassInfo, err error) {
	err = d.objs.ClassByAddr.Lookup(&heddleClassKey{Side: side, Addr: fromAddr(a)}, &info)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = d.objs.ClassByPrefix.Lookup(classPrefixKey(netip.PrefixFrom(a, a.BitLen()), side), &info)
	}
	return info, ignoreAbsent(err)
}

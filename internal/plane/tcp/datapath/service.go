package datapath

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"heddle.dev/heddle/internal/model"
)

// services is what this agent has written of services, or found there. A change writes what it
// changes: of a service with many backends, those that came and went.
type services struct {
	mu     sync.Mutex
	byAddr map[model.ServiceAddr]*writtenService // nil: not read yet
	lastID uint32
	// backends counts those of all services.
	backends int
}

type writtenService struct {
	id       uint32
	affinity uint32
	slots    []netip.AddrPort
	beyond   int // how many of them are beyond the overlay's pool
}

// What the field of affinity has beside seconds (enum service_flags).
const (
	serviceOverlay  = uint32(heddleServiceFlagsSERVICE_OVERLAY)
	serviceAffinity = uint32(heddleServiceFlagsSERVICE_AFFINITY)
)

// ErrServicesFull says that the maps of services have no room.
var ErrServicesFull = errors.New("no room for more services or backends")

func serviceKey(a model.ServiceAddr) heddleServiceKey {
	key := heddleServiceKey{Addr: fromAddr(a.Addr()), Port: toPort(a.Port())}
	if a.UDP {
		key.Pad = uint16(model.ProtocolUDP)
	}
	return key
}

func serviceAddr(k heddleServiceKey) model.ServiceAddr {
	return model.ServiceAddr{AddrPort: netip.AddrPortFrom(toAddr(k.Addr), toPort(k.Port)), UDP: k.Pad != 0}
}

func backendOf(a netip.AddrPort) heddleBackend {
	return heddleBackend{Addr: fromAddr(a.Addr()), Port: toPort(a.Port())}
}

func (w *writtenService) value() heddleService {
	v := heddleService{Id: w.id, Backends: uint32(len(w.slots)), AffinityS: w.affinity}
	if w.beyond == 0 {
		v.AffinityS |= serviceOverlay
	}
	return v
}

// beyondOverlay gives 1 for an address that is not of the pool.
func (d *Datapath) beyondOverlay(a netip.AddrPort) int {
	if d.cfg.Prefix6.IsValid() && d.cfg.Prefix6.Contains(a.Addr()) ||
		slices.ContainsFunc(d.cfg.Pool, func(p netip.Prefix) bool { return p.Contains(a.Addr()) }) {
		return 0
	}
	return 1
}

// Services gives the services in force, sorted by address: those that an earlier agent left, too.
func (d *Datapath) Services() ([]model.Service, error) {
	s := &d.services
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := d.readServices(); err != nil {
		return nil, err
	}
	out := make([]model.Service, 0, len(s.byAddr))
	for _, addr := range slices.SortedFunc(maps.Keys(s.byAddr), model.ServiceAddr.Compare) {
		w := s.byAddr[addr]
		out = append(out, model.Service{Addr: addr, Backends: slices.Clone(w.slots), Affinity: w.affinity})
	}
	return out, nil
}

// SetService puts a service in force, in place of what was at its address. Connects that come
// meanwhile see backends of before or of after.
func (d *Datapath) SetService(want model.Service) error {
	if err := want.Validate(); err != nil {
		return fmt.Errorf("service %s: %w", want.Addr, err)
	}
	s := &d.services
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := d.readServices(); err != nil {
		return err
	}
	w, there := s.byAddr[want.Addr]
	if !there {
		if len(s.byAddr) >= model.MaxServices {
			return ErrServicesFull
		}
		w = &writtenService{id: s.lastID + 1}
	}
	if s.backends+len(want.Backends)-len(w.slots) > model.MaxBackends {
		return ErrServicesFull
	}
	if !there {
		s.lastID++
		s.byAddr[want.Addr] = w
	}
	w.affinity = want.Affinity
	if err := d.changeBackends(want.Addr, w, want.Backends); err != nil {
		// What is in the maps is not known any more: the next one reads it.
		s.byAddr = nil
		return fmt.Errorf("service %s: %w", want.Addr, err)
	}
	return nil
}

// changeBackends writes what came, then the service, then takes away what went: a connect always
// finds one.
func (d *Datapath) changeBackends(addr model.ServiceAddr, w *writtenService, want []netip.AddrPort) error {
	have := make(map[netip.AddrPort]bool, len(w.slots))
	for _, b := range w.slots {
		have[b] = true
	}
	wanted := make(map[netip.AddrPort]bool, len(want))
	for _, b := range want {
		wanted[b] = true
		if have[b] {
			continue
		}
		value := backendOf(b)
		if err := d.objs.MemberByBackend.Put(&heddleMemberKey{ServiceId: w.id, Backend: value}, uint8(1)); err != nil {
			return err
		}
		if err := d.objs.BackendBySlot.Put(&heddleBackendKey{ServiceId: w.id, Slot: uint32(len(w.slots))}, &value); err != nil {
			return err
		}
		w.slots = append(w.slots, b)
		w.beyond += d.beyondOverlay(b)
		d.services.backends++
	}
	key, value := serviceKey(addr), w.value()
	if err := d.objs.ServiceByAddr.Put(&key, &value); err != nil {
		return err
	}
	for i := len(w.slots) - 1; i >= 0; i-- {
		if wanted[w.slots[i]] {
			continue
		}
		if err := d.removeBackend(key, w, i); err != nil {
			return err
		}
	}
	return nil
}

// removeBackend puts the last slot's backend into slot i, and takes the last slot away.
func (d *Datapath) removeBackend(key heddleServiceKey, w *writtenService, i int) error {
	gone, last := backendOf(w.slots[i]), len(w.slots)-1
	w.beyond -= d.beyondOverlay(w.slots[i])
	if i != last {
		moved := backendOf(w.slots[last])
		if err := d.objs.BackendBySlot.Put(&heddleBackendKey{ServiceId: w.id, Slot: uint32(i)}, &moved); err != nil {
			return err
		}
	}
	w.slots[i] = w.slots[last]
	w.slots = w.slots[:last]
	d.services.backends--
	value := w.value()
	return errors.Join(
		d.objs.ServiceByAddr.Put(&key, &value),
		ignoreAbsent(d.objs.BackendBySlot.Delete(&heddleBackendKey{ServiceId: w.id, Slot: uint32(last)})),
		ignoreAbsent(d.objs.MemberByBackend.Delete(&heddleMemberKey{ServiceId: w.id, Backend: gone})))
}

// DeleteService takes a service out of force: its address is then an address like others. An absent
// one is no error.
func (d *Datapath) DeleteService(addr model.ServiceAddr) error {
	s := &d.services
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := d.readServices(); err != nil {
		return err
	}
	w, there := s.byAddr[addr]
	if !there {
		return nil
	}
	key := serviceKey(addr)
	err := ignoreAbsent(d.objs.ServiceByAddr.Delete(&key))
	for slot, b := range w.slots {
		err = errors.Join(err,
			ignoreAbsent(d.objs.BackendBySlot.Delete(&heddleBackendKey{ServiceId: w.id, Slot: uint32(slot)})),
			ignoreAbsent(d.objs.MemberByBackend.Delete(&heddleMemberKey{ServiceId: w.id, Backend: backendOf(b)})))
	}
	if err != nil {
		s.byAddr = nil
		return fmt.Errorf("delete service %s: %w", addr, err)
	}
	s.backends -= len(w.slots)
	delete(s.byAddr, addr)
	return nil
}

// readServices reads what is in force, once, and takes away what an agent that ended within a
// change left: backends of no service, or beyond a service's count.
func (d *Datapath) readServices() error {
	s := &d.services
	if s.byAddr != nil {
		return nil
	}
	byAddr, byID := make(map[model.ServiceAddr]*writtenService), make(map[uint32]*writtenService)
	overlay := make(map[uint32]bool)
	s.lastID, s.backends = 0, 0
	var (
		key   heddleServiceKey
		value heddleService
	)
	entries := d.objs.ServiceByAddr.Iterate()
	for entries.Next(&key, &value) {
		w := &writtenService{id: value.Id, affinity: value.AffinityS & serviceAffinity, slots: make([]netip.AddrPort, value.Backends)}
		byAddr[serviceAddr(key)], byID[w.id] = w, w
		overlay[w.id] = value.AffinityS&serviceOverlay != 0
		s.lastID = max(s.lastID, w.id)
		s.backends += len(w.slots)
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read services: %w", err)
	}
	if err := d.readBackends(byID); err != nil {
		return fmt.Errorf("read backends of services: %w", err)
	}
	// Agents before did not say where backends are, or had another pool.
	for addr, w := range byAddr {
		if overlay[w.id] == (w.beyond == 0) {
			continue
		}
		key, value := serviceKey(addr), w.value()
		if err := d.objs.ServiceByAddr.Put(&key, &value); err != nil {
			return fmt.Errorf("service %s: %w", addr, err)
		}
	}
	s.byAddr = byAddr
	return nil
}

func (d *Datapath) readBackends(byID map[uint32]*writtenService) error {
	var (
		slot    heddleBackendKey
		backend heddleBackend
		stale   []heddleBackendKey
	)
	entries := d.objs.BackendBySlot.Iterate()
	for entries.Next(&slot, &backend) {
		d.services.lastID = max(d.services.lastID, slot.ServiceId) // ids are not given twice
		if w := byID[slot.ServiceId]; w != nil && int(slot.Slot) < len(w.slots) {
			w.slots[slot.Slot] = netip.AddrPortFrom(toAddr(backend.Addr), toPort(backend.Port))
		} else {
			stale = append(stale, slot)
		}
	}
	if err := entries.Err(); err != nil {
		return err
	}
	members := make(map[heddleMemberKey]bool)
	for id, w := range byID {
		for _, b := range w.slots {
			w.beyond += d.beyondOverlay(b)
			members[heddleMemberKey{ServiceId: id, Backend: backendOf(b)}] = true
		}
	}
	var (
		member heddleMemberKey
		one    uint8
		gone   []heddleMemberKey
	)
	list := d.objs.MemberByBackend.Iterate()
	for list.Next(&member, &one) {
		if !members[member] {
			gone = append(gone, member)
		}
	}
	err := list.Err()
	for i := range stale {
		err = errors.Join(err, ignoreAbsent(d.objs.BackendBySlot.Delete(&stale[i])))
	}
	for i := range gone {
		err = errors.Join(err, ignoreAbsent(d.objs.MemberByBackend.Delete(&gone[i])))
	}
	return err
}

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
	byAddr map[netip.AddrPort]*writtenService // nil: not read yet
	lastID uint32
	// backends counts those of all services.
	backends int
}

type writtenService struct {
	id       uint32
	affinity uint32
	slots    []netip.AddrPort
}

// ErrServicesFull says that the maps of services have no room.
var ErrServicesFull = errors.New("no room for more services or backends")

func serviceKey(a netip.AddrPort) heddleServiceKey {
	return heddleServiceKey{Addr: fromAddr(a.Addr()), Port: toPort(a.Port())}
}

func backendOf(a netip.AddrPort) heddleBackend {
	return heddleBackend{Addr: fromAddr(a.Addr()), Port: toPort(a.Port())}
}

func (w *writtenService) value() heddleService {
	return heddleService{Id: w.id, Backends: uint32(len(w.slots)), AffinityS: w.affinity}
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
	for _, addr := range slices.SortedFunc(maps.Keys(s.byAddr), netip.AddrPort.Compare) {
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
func (d *Datapath) changeBackends(addr netip.AddrPort, w *writtenService, want []netip.AddrPort) error {
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
func (d *Datapath) DeleteService(addr netip.AddrPort) error {
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
	byAddr, byID := make(map[netip.AddrPort]*writtenService), make(map[uint32]*writtenService)
	s.lastID, s.backends = 0, 0
	var (
		key   heddleServiceKey
		value heddleService
	)
	entries := d.objs.ServiceByAddr.Iterate()
	for entries.Next(&key, &value) {
		w := &writtenService{id: value.Id, affinity: value.AffinityS, slots: make([]netip.AddrPort, value.Backends)}
		byAddr[netip.AddrPortFrom(toAddr(key.Addr), toPort(key.Port))], byID[w.id] = w, w
		s.lastID = max(s.lastID, w.id)
		s.backends += len(w.slots)
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read services: %w", err)
	}
	if err := d.readBackends(byID); err != nil {
		return fmt.Errorf("read backends of services: %w", err)
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

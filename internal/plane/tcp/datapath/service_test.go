package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// serviceMaps reads the maps as the programs see them, and complains about what is in none or in
// two ways.
func serviceMaps(t *testing.T, d *Datapath) map[model.ServiceAddr]model.Service {
	t.Helper()
	out, owner := make(map[model.ServiceAddr]model.Service), make(map[uint32]model.ServiceAddr)
	var (
		key     heddleServiceKey
		value   heddleService
		slot    heddleBackendKey
		backend heddleBackend
		member  heddleMemberKey
		one     uint8
	)
	services := d.objs.ServiceByAddr.Iterate()
	for services.Next(&key, &value) {
		addr := serviceAddr(key)
		if other, twice := owner[value.Id]; twice {
			t.Errorf("%s and %s have the id %d", addr, other, value.Id)
		}
		owner[value.Id] = addr
		out[addr] = model.Service{Addr: addr, Affinity: value.AffinityS & serviceAffinity, Backends: make([]netip.AddrPort, value.Backends)}
	}
	slots := d.objs.BackendBySlot.Iterate()
	n := 0
	for slots.Next(&slot, &backend) {
		s, there := out[owner[slot.ServiceId]]
		if !there || int(slot.Slot) >= len(s.Backends) {
			t.Errorf("slot %+v is of no service", slot)
			continue
		}
		s.Backends[slot.Slot] = netip.AddrPortFrom(toAddr(backend.Addr), toPort(backend.Port))
		n++
	}
	for members := d.objs.MemberByBackend.Iterate(); members.Next(&member, &one); n-- {
		at := netip.AddrPortFrom(toAddr(member.Backend.Addr), toPort(member.Backend.Port))
		if !slices.Contains(out[owner[member.ServiceId]].Backends, at) {
			t.Errorf("%s is a member of %d, and in no slot", at, member.ServiceId)
		}
	}
	if n != 0 {
		t.Errorf("%d more slots than members", n)
	}
	for addr, s := range out {
		key := serviceKey(addr)
		if err := d.objs.ServiceByAddr.Lookup(&key, &value); err != nil {
			t.Fatal(err)
		}
		beyond := slices.ContainsFunc(s.Backends, func(b netip.AddrPort) bool { return d.beyondOverlay(b) == 1 })
		if beyond == (value.AffinityS&serviceOverlay != 0) {
			t.Errorf("%s, backends beyond the overlay: %t; the maps say otherwise", addr, beyond)
		}
		slices.SortFunc(s.Backends, netip.AddrPort.Compare)
		out[addr] = s
	}
	return out
}

func sameServices(a, b map[model.ServiceAddr]model.Service) error {
	if len(a) != len(b) {
		return fmt.Errorf("%d services, want %d", len(a), len(b))
	}
	for addr, s := range a {
		if want, there := b[addr]; !there || want.Affinity != s.Affinity || !slices.Equal(want.Backends, s.Backends) {
			return fmt.Errorf("%s is %+v, want %+v", addr, s, want)
		}
	}
	return nil
}

func serviceAt(s string) model.ServiceAddr {
	return model.ServiceAddr{AddrPort: netip.MustParseAddrPort(s)}
}

// TestServices: after any changes the maps have what was asked for, and nothing else; so they do
// for an agent that finds them, also those of one that ended within a change.
func TestServices(t *testing.T) {
	d := loadForTest(t)
	random := rand.New(rand.NewPCG(1, 2))
	addrs := []model.ServiceAddr{serviceAt("10.96.0.1:80"), {AddrPort: serviceAt("10.96.0.1:80").AddrPort, UDP: true}, serviceAt("[fd00::1]:80")}
	want := make(map[model.ServiceAddr]model.Service)
	for step := range 200 {
		addr := addrs[random.IntN(len(addrs))]
		switch random.IntN(8) {
		case 0:
			delete(want, addr)
			if err := d.DeleteService(addr); err != nil {
				t.Fatal(err)
			}
		case 1: // another agent
			d.services.byAddr = nil
		default:
			s := model.Service{Addr: addr, Affinity: uint32(random.IntN(2) * 600)}
			for i := range random.IntN(12) {
				if random.IntN(2) == 0 {
					continue
				}
				b := netip.AddrFrom4([4]byte{10, 244, 1, byte(i)})
				if i == 11 { // of the host's network
					b = netip.AddrFrom4([4]byte{192, 0, 2, 1})
				}
				if addr.Addr().Is6() {
					b = netip.AddrFrom16([16]byte{0xfd, 15: byte(i)})
				}
				s.Backends = append(s.Backends, netip.AddrPortFrom(b, 8080))
			}
			random.Shuffle(len(s.Backends), func(i, j int) { s.Backends[i], s.Backends[j] = s.Backends[j], s.Backends[i] })
			if err := d.SetService(s); err != nil {
				t.Fatal(err)
			}
			slices.SortFunc(s.Backends, netip.AddrPort.Compare)
			want[addr] = s
		}
		if err := sameServices(serviceMaps(t, d), want); err != nil || t.Failed() {
			t.Fatalf("step %d: %v", step, err)
		}
	}
	have, err := d.Services()
	if err != nil || len(have) != len(want) || !slices.IsSortedFunc(have, func(a, b model.Service) int { return a.Addr.Compare(b.Addr) }) {
		t.Errorf("Services: %+v, %v", have, err)
	}
	// What an agent leaves that ends between two writes.
	for _, err := range []error{
		d.objs.BackendBySlot.Put(&heddleBackendKey{ServiceId: 4000, Slot: 0}, &heddleBackend{Port: 1}),
		d.objs.MemberByBackend.Put(&heddleMemberKey{ServiceId: 4000}, uint8(1)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	d.services.byAddr = nil
	want[addrs[0]] = model.Service{Addr: addrs[0]}
	if err := d.SetService(want[addrs[0]]); err != nil {
		t.Fatal(err)
	}
	if err := sameServices(serviceMaps(t, d), want); err != nil {
		t.Error(err)
	}
	if d.services.lastID < 4000 {
		t.Errorf("the next service may get id %d, which backends were of", d.services.lastID+1)
	}
	if err := d.SetService(model.Service{Addr: serviceAt("127.0.0.1:80")}); err == nil {
		t.Error("a service at a loopback address is taken")
	}
	d.services.backends = model.MaxBackends
	if err := d.SetService(model.Service{Addr: addrs[0], Backends: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:1")}}); !errors.Is(err, ErrServicesFull) {
		t.Errorf("no room: %v", err)
	}
}

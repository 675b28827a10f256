package datapath

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// evaluate gives the verdict of tables as model.PolicyTables defines it.
func evaluate(tables *model.PolicyTables, from, to netip.Addr, protocol model.Protocol, port uint16) model.Verdict {
	if from == to {
		return model.VerdictAllow
	}
	source, target := classOf(tables, from), classOf(tables, to)
	pair, ok := tables.Pairs[model.ClassPair{From: source.Class, To: target.Class}]
	if !ok {
		return source.Egress.Worse(target.Ingress)
	}
	for _, r := range pair.Ports {
		if r.Protocol == protocol && r.First <= port && port <= r.Last {
			return r.Verdict
		}
	}
	return pair.Default
}

func classOf(tables *model.PolicyTables, a netip.Addr) model.ClassInfo {
	if c, ok := tables.ByAddr[a]; ok {
		return c
	}
	best, found := -1, model.ClassInfo{}
	for p, c := range tables.ByPrefix {
		if p.Contains(a) && p.Bits() > best {
			best, found = p.Bits(), c
		}
	}
	return found
}

// policyPlace is an overlay address of the steering tests' node, in both families.
func policyPlace(node byte, host int, ipv6 bool) netip.Addr {
	v4 := netip.AddrFrom4([4]byte{10, 244, node, byte(host)})
	if !ipv6 {
		return v4
	}
	a := netip.MustParseAddr("fd48:6464:1::").As16()
	b := v4.As4()
	copy(a[12:], b[:])
	return netip.AddrFrom16(a)
}

// steered gives the verdict of from_underlay on a SYN from one overlay address to another: by what
// it counted.
func steered(t testing.TB, d *Datapath, from, to netip.Addr, port uint16) model.Verdict {
	t.Helper()
	reasons := []uint32{uint32(heddleHeddleReasonREASON_DROP_POLICY_REJECTED), uint32(heddleHeddleReasonREASON_DROP_POLICY_DROPPED)}
	before := counts(t, d, reasons)
	act, _, err := d.objs.FromUnderlay.Test(frame(underlayA, underlayB, directPort, tcpSYN, policyOption(from, to, port)))
	if err != nil {
		t.Fatal(err)
	}
	after := counts(t, d, reasons)
	switch {
	case after[0] > before[0] && act == actOK:
		return model.VerdictReject
	case after[1] > before[1] && act == actShot:
		return model.VerdictDrop
	case after[0] == before[0] && after[1] == before[1] && act == actOK:
		return model.VerdictAllow
	}
	t.Fatalf("action %d, counted %v, %v before", act, after, before)
	return 0
}

func counts(t testing.TB, d *Datapath, reasons []uint32) []uint64 {
	t.Helper()
	out := make([]uint64, len(reasons))
	for i, r := range reasons {
		n, err := sum(d.objs.CountByReason, r)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = n
	}
	return out
}

// policyOption is the SYN option of a connection.
func policyOption(from, to netip.Addr, port uint16) []byte {
	o := []byte{253, 16, 0x48, 0x64, 1 << 4, 7, byte(port >> 8), byte(port)}
	if to.Is6() {
		o[4] = 2 << 4
	}
	b, a := to.As16(), from.As16()
	return append(append(o, b[12:]...), a[12:]...)
}

// randomTables makes small tables full of overlaps.
func randomTables(r *rand.Rand) model.PolicyTables {
	verdict := func() model.Verdict { return model.Verdict(r.IntN(3)) }
	class := func() model.ClassInfo {
		return model.ClassInfo{Class: model.Class(r.IntN(5)), Egress: verdict(), Ingress: verdict()}
	}
	t := model.PolicyTables{
		ByAddr:   map[netip.Addr]model.ClassInfo{},
		ByPrefix: map[netip.Prefix]model.ClassInfo{},
		Pairs:    map[model.ClassPair]model.PairVerdict{},
	}
	for range r.IntN(12) {
		t.ByAddr[policyPlace(byte(1+r.IntN(2)), 1+r.IntN(6), r.IntN(2) == 0)] = class()
	}
	for range r.IntN(6) {
		a := policyPlace(byte(1+r.IntN(2)), r.IntN(8), r.IntN(2) == 0)
		t.ByPrefix[netip.PrefixFrom(a, a.BitLen()-r.IntN(a.BitLen()+1)).Masked()] = class()
	}
	for range r.IntN(12) {
		t.Pairs[model.ClassPair{From: model.Class(r.IntN(5)), To: model.Class(r.IntN(5))}] = randomPair(r)
	}
	return t
}

// randomPair gives a pair's verdicts with ranges of TCP and UDP ports between which there are gaps,
// and some none.
func randomPair(r *rand.Rand) model.PairVerdict {
	v := model.PairVerdict{Default: model.Verdict(r.IntN(3))}
	for _, protocol := range []model.Protocol{model.ProtocolTCP, model.ProtocolUDP} {
		next := r.IntN(100)
		for range r.IntN(4) {
			last := min(next+r.IntN(3)*r.IntN(30000), 65535)
			if other := model.Verdict(r.IntN(3)); other != v.Default {
				v.Ports = append(v.Ports, model.PortVerdict{Protocol: protocol, First: uint16(next), Last: uint16(last), Verdict: other})
			}
			if next = last + 1 + r.IntN(3); next > 65535 {
				break
			}
		}
	}
	return v
}

// difference is the change from one state of the tables to another.
func difference(old, next model.PolicyTables) (c model.PolicyChange) {
	c.Set = model.PolicyTables{
		ByAddr: map[netip.Addr]model.ClassInfo{}, ByPrefix: map[netip.Prefix]model.ClassInfo{}, Pairs: map[model.ClassPair]model.PairVerdict{},
	}
	for k, v := range next.ByAddr {
		if o, ok := old.ByAddr[k]; !ok || o != v {
			c.Set.ByAddr[k] = v
		}
	}
	for k, v := range next.ByPrefix {
		if o, ok := old.ByPrefix[k]; !ok || o != v {
			c.Set.ByPrefix[k] = v
		}
	}
	for k, v := range next.Pairs {
		if o, ok := old.Pairs[k]; !ok || fmt.Sprint(o) != fmt.Sprint(v) {
			c.Set.Pairs[k] = v
		}
	}
	for k := range old.ByAddr {
		if _, ok := next.ByAddr[k]; !ok {
			c.DeleteAddrs = append(c.DeleteAddrs, k)
		}
	}
	for k := range old.ByPrefix {
		if _, ok := next.ByPrefix[k]; !ok {
			c.DeletePrefixes = append(c.DeletePrefixes, k)
		}
	}
	for k := range old.Pairs {
		if _, ok := next.Pairs[k]; !ok {
			c.DeletePairs = append(c.DeletePairs, k)
		}
	}
	return c
}

// TestPolicyTables compares the programs with the definition of the tables, over random tables that
// each turn into the next by a change of what differs, or are set anew.
func TestPolicyTables(t *testing.T) {
	d := loadForTest(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	tables := model.PolicyTables{}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true}); err != nil {
		t.Fatal(err)
	}
	for round := range 60 {
		next := randomTables(r)
		change := difference(tables, next)
		if r.IntN(4) == 0 {
			change = model.PolicyChange{Reset: true, Set: next}
		}
		if err := d.ApplyPolicy(change); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		tables = next
		for range 60 {
			ipv6 := r.IntN(2) == 0
			from, to := policyPlace(1, 1+r.IntN(7), ipv6), policyPlace(2, 1+r.IntN(7), ipv6)
			port := uint16(1 + r.IntN(200))
			if r.IntN(2) == 0 {
				port = uint16(1 + r.IntN(65535))
			}
			want := evaluate(&tables, from, to, model.ProtocolTCP, port)
			if got := steered(t, d, from, to, port); got != want {
				t.Fatalf("round %d, %s to %s port %d: %s, want %s\n%+v", round, from, to, port, got, want, tables)
			}
			if got, err := d.Decide(from, to, port); got != want || err != nil {
				t.Fatalf("round %d, %s to %s port %d: the agent says %s (%v), want %s\n%+v", round, from, to, port, got, err, want, tables)
			}
		}
	}
	checkPolicySize(t, d, tables)
}

// checkPolicySize checks that the maps hold these tables twice, and no port sets but theirs.
func checkPolicySize(t *testing.T, d *Datapath, tables model.PolicyTables) {
	t.Helper()
	sets := map[string]int{}
	for _, v := range tables.Pairs {
		n := 0
		for _, r := range v.Ports {
			n += len(rangeKeys(1, r))
		}
		sets[fmt.Sprint(v.Ports)] = n
	}
	ports := 0
	for _, n := range sets {
		ports += n
	}
	count := func(n *int) { *n++ }
	var addrs, prefixes, pairs, ranges int
	var err error
	err = errors.Join(err, deleteWhere(d.objs.ClassByAddr, func(*heddleClassKey, *heddleClassInfo) bool { count(&addrs); return false }))
	err = errors.Join(err, deleteWhere(d.objs.ClassByPrefix, func(*heddleClassPrefixKey, *heddleClassInfo) bool { count(&prefixes); return false }))
	err = errors.Join(err, deleteWhere(d.objs.VerdictByPair, func(*heddlePairKey, *heddlePairVerdict) bool { count(&pairs); return false }))
	err = errors.Join(err, deleteWhere(d.objs.VerdictByPort, func(*heddlePortRangeKey, *uint32) bool { count(&ranges); return false }))
	if err != nil {
		t.Fatal(err)
	}
	if addrs != 2*len(tables.ByAddr) || prefixes != 2*len(tables.ByPrefix) || pairs != 2*len(tables.Pairs) || ranges != ports {
		t.Errorf("maps hold %d addresses, %d prefixes, %d pairs and %d port prefixes; want twice %d, %d, %d and once %d",
			addrs, prefixes, pairs, ranges, len(tables.ByAddr), len(tables.ByPrefix), len(tables.Pairs), ports)
	}
}

// TestPolicyUnknown checks that a change is refused by a process that does not know the tables, and
// that the old tables stay in force then.
func TestPolicyUnknown(t *testing.T) {
	d := loadForTest(t)
	from, to := policyPlace(1, 2, false), policyPlace(2, 2, false)
	deny := model.PolicyTables{ByAddr: map[netip.Addr]model.ClassInfo{to: {Class: 1, Ingress: model.VerdictDrop}}}
	if err := d.ApplyPolicy(model.PolicyChange{Set: deny}); !errors.Is(err, ErrPolicyUnknown) {
		t.Fatalf("a change of unknown tables: %v", err)
	}
	if got := steered(t, d, from, to, 80); got != model.VerdictAllow {
		t.Fatalf("%s without policy", got)
	}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: deny}); err != nil {
		t.Fatal(err)
	}
	d.policy = policyTables{} // as after a restart
	if err := d.ApplyPolicy(model.PolicyChange{DeleteAddrs: []netip.Addr{to}}); !errors.Is(err, ErrPolicyUnknown) {
		t.Fatalf("a change of unknown tables: %v", err)
	}
	if got := steered(t, d, from, to, 80); got != model.VerdictDrop {
		t.Fatalf("%s, want drop: the tables of the process before", got)
	}
}

// TestPolicyFull checks that tables that do not fit leave the old ones in force.
func TestPolicyFull(t *testing.T) {
	d := loadForTest(t)
	from, to := policyPlace(1, 2, false), policyPlace(2, 2, false)
	deny := model.PolicyTables{ByAddr: map[netip.Addr]model.ClassInfo{to: {Class: 1, Ingress: model.VerdictReject}}}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: deny}); err != nil {
		t.Fatal(err)
	}
	many := model.PolicyTables{ByPrefix: map[netip.Prefix]model.ClassInfo{}}
	for i := range 131072 {
		many.ByPrefix[netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 32)] = model.ClassInfo{Class: 1}
	}
	if err := d.ApplyPolicy(model.PolicyChange{Set: many}); err == nil {
		t.Fatal("more prefixes than the map holds were applied")
	}
	if got := steered(t, d, from, to, 80); got != model.VerdictReject {
		t.Errorf("%s, want reject: the old tables", got)
	}
	if err := d.ApplyPolicy(model.PolicyChange{DeleteAddrs: []netip.Addr{to}}); !errors.Is(err, ErrPolicyUnknown) {
		t.Errorf("a change after a failed one: %v", err)
	}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true}); err != nil {
		t.Fatal(err)
	}
	if got := steered(t, d, from, to, 80); got != model.VerdictAllow {
		t.Errorf("%s, want allow", got)
	}
}

// TestPolicyFailuresLeaveNothing checks that changes that fail again and again, also in a new
// process, do not fill the map of port sets, that those in force stay, and that a change that fits
// comes into force then.
func TestPolicyFailuresLeaveNothing(t *testing.T) {
	d := loadForTest(t)
	from, to := policyPlace(1, 2, false), policyPlace(2, 2, false)
	tables := func(port uint16) model.PolicyTables {
		return model.PolicyTables{
			ByAddr: map[netip.Addr]model.ClassInfo{from: {Class: 1}, to: {Class: 2}},
			Pairs: map[model.ClassPair]model.PairVerdict{{From: 1, To: 2}: {Default: model.VerdictDrop,
				Ports: []model.PortVerdict{{Protocol: model.ProtocolTCP, First: port, Last: port, Verdict: model.VerdictAllow}}}},
		}
	}
	check := func(open, shut uint16) {
		t.Helper()
		if a, b := steered(t, d, from, to, open), steered(t, d, from, to, shut); a != model.VerdictAllow || b != model.VerdictDrop {
			t.Fatalf("port %d: %s, %d: %s; want allow and drop", open, a, shut, b)
		}
	}
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: tables(80)}); err != nil {
		t.Fatal(err)
	}
	tooMany := tables(81)
	tooMany.ByPrefix = map[netip.Prefix]model.ClassInfo{}
	for i := range 65537 {
		tooMany.ByPrefix[netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 32)] = model.ClassInfo{Class: 3}
	}
	for class := range model.Class(100) {
		tooMany.Pairs[model.ClassPair{From: 3, To: class}] = model.PairVerdict{
			Ports: []model.PortVerdict{{Protocol: model.ProtocolTCP, First: uint16(class), Last: 60000, Verdict: model.VerdictReject}}}
	}
	ranges := func() (n int) {
		t.Helper()
		if err := deleteWhere(d.objs.VerdictByPort, func(*heddlePortRangeKey, *uint32) bool { n++; return false }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := ranges()
	for try := range 3 {
		if try == 2 {
			d.policy = policyTables{} // as after a restart
		}
		if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: tooMany}); err == nil {
			t.Fatal("more prefixes than the map holds were applied")
		}
		check(80, 81)
		if n := ranges(); n != before { // nothing is written of what does not fit
			t.Fatalf("%d port prefixes after failure %d, %d before", n, try+1, before)
		}
	}
	// What was written of a change that did not fit goes with the next that does.
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: tables(80)}); err != nil {
		t.Fatal(err)
	}
	if err := d.ApplyPolicy(model.PolicyChange{Set: tooMany}); err == nil || ranges() == before {
		t.Fatalf("more prefixes than the map holds: %v, %d port prefixes", err, ranges())
	}
	check(80, 81)
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: tables(82)}); err != nil {
		t.Fatal(err)
	}
	check(82, 80)
	checkPolicySize(t, d, tables(82))
}

// TestRangeKeys checks that a range is cut into prefixes that hold its ports and no others.
func TestRangeKeys(t *testing.T) {
	for _, r := range [][2]uint16{{0, 65535}, {80, 80}, {1, 65535}, {0, 65534}, {1000, 2000}, {65535, 65535}, {32768, 65535}, {7, 8}} {
		held := map[uint16]int{}
		for _, k := range rangeKeys(1, model.PortVerdict{First: r[0], Last: r[1]}) {
			size := 1 << (64 - k.Prefixlen)
			for i := range size {
				held[toPort(k.Port)+uint16(i)]++
			}
		}
		for port := range 65536 {
			want := 0
			if port >= int(r[0]) && port <= int(r[1]) {
				want = 1
			}
			if held[uint16(port)] != want {
				t.Fatalf("%v: port %d is held %d times", r, port, held[uint16(port)])
			}
		}
	}
}

// BenchmarkDecide times the steering of a SYN, of which the decision is a part, without policy and
// with as many pairs as the name says.
func BenchmarkDecide(b *testing.B) {
	d := loadForTest(b)
	from, to := policyPlace(1, 2, false), policyPlace(2, 2, false)
	for _, pairs := range []int{0, 1, 1000, 100_000} {
		tables := model.PolicyTables{
			ByAddr: map[netip.Addr]model.ClassInfo{}, Pairs: map[model.ClassPair]model.PairVerdict{},
		}
		for i := range pairs {
			tables.ByAddr[netip.AddrFrom4([4]byte{12, byte(i >> 16), byte(i >> 8), byte(i)})] = model.ClassInfo{Class: model.Class(i + 3)}
			tables.Pairs[model.ClassPair{From: model.Class(i + 3), To: 2}] = model.PairVerdict{Ports: []model.PortVerdict{
				{Protocol: model.ProtocolTCP, First: uint16(i % 60000), Last: uint16(i%60000) + 1000, Verdict: model.VerdictDrop}}}
		}
		if pairs > 0 {
			tables.ByAddr[from], tables.ByAddr[to] = model.ClassInfo{Class: 1}, model.ClassInfo{Class: 2}
			tables.Pairs[model.ClassPair{From: 1, To: 2}] = model.PairVerdict{Ports: []model.PortVerdict{
				{Protocol: model.ProtocolTCP, First: 1, Last: 79, Verdict: model.VerdictReject}}}
		}
		if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: model.PolicyTables{ByAddr: maps.Clone(tables.ByAddr), Pairs: tables.Pairs}}); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("pairs=%d", pairs), func(b *testing.B) {
			packet := frame(underlayA, underlayB, directPort, tcpSYN, policyOption(from, to, 80))
			_, took, err := d.objs.FromUnderlay.Benchmark(packet, b.N, b.ResetTimer)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/SYN")
		})
	}
}

// TestPolicyFlips changes between two tables a hundred times while SYNs are decided: what both
// forbid never passes and what both allow always does, although every class and pair changes its
// meaning, so that any mixture of the two would say otherwise.
func TestPolicyFlips(t *testing.T) {
	d := loadForTest(t)
	a, b, y := policyPlace(1, 2, false), policyPlace(1, 3, false), policyPlace(2, 2, false)
	allow, deny := model.PairVerdict{}, model.PairVerdict{Default: model.VerdictDrop}
	// a may never connect, b always; they swap their classes, and the classes their verdicts.
	tables := func(of, other model.Class) model.PolicyTables {
		return model.PolicyTables{
			ByAddr: map[netip.Addr]model.ClassInfo{
				a: {Class: of, Egress: model.VerdictDrop}, b: {Class: other}, y: {Class: 10 + of}},
			Pairs: map[model.ClassPair]model.PairVerdict{
				{From: of, To: 10 + of}: deny, {From: other, To: 10 + of}: allow,
				{From: of, To: 10 + other}: allow, {From: other, To: 10 + other}: deny,
			},
		}
	}
	states := []model.PolicyTables{tables(1, 2), tables(2, 1)}
	apply(t, d, states[0])
	stop, wrong := make(chan struct{}), make(chan string, 2)
	var workers sync.WaitGroup
	for from, want := range map[netip.Addr]uint32{a: actShot, b: actOK} {
		packet := frame(underlayA, underlayB, directPort, tcpSYN, policyOption(from, y, 80))
		workers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				action, _, err := d.objs.FromUnderlay.Test(packet)
				if err != nil || action != want {
					wrong <- fmt.Sprintf("SYN %d from %s: action %d, want %d, %v", n, from, action, want, err)
					return
				}
			}
		})
	}
	for i := range 100 {
		change := difference(states[i%2], states[(i+1)%2])
		if i%10 == 9 {
			change = model.PolicyChange{Reset: true, Set: states[(i+1)%2]}
		}
		if err := d.ApplyPolicy(change); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	workers.Wait()
	close(wrong)
	for w := range wrong {
		t.Error(w)
	}
}

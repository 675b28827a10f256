package netcfg

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
)

// sample is a packet at a hook, as far as rules look at it.
type sample struct {
	in, out      string // devices, of those in sampleDevices; one of the two is ""
	mark         uint32
	src, dst     netip.Addr
	proto        byte
	sport, dport uint16
	flags        byte
	dnat         bool // its connection, if it is tracked, has got another destination
	claimed      bool // a transparent socket holds its destination
	ct           ctState
	vni          uint32 // of VXLAN
}

// ctState is what connection tracking knows of a packet. The numbers are those of "ct state".
type ctState uint32

const (
	ctNone      = ctState(expr.CtStateBitINVALID) // nothing yet, or no longer
	ctTracked   = ctState(expr.CtStateBitNEW)
	ctUntracked = ctState(expr.CtStateBitUNTRACKED)
)

// trackingPriority is where the kernel's connection tracking is at prerouting and output.
const trackingPriority = -200

var sampleDevices = map[string]uint32{"lo": netdev.LoopbackIfindex, "eth0": 2, netdev.Overlay: 3, netdev.Divert: 4, "hd1": 5}

func (s sample) header(which expr.PayloadBase) []byte {
	h := make([]byte, 40)
	switch {
	case which == expr.PayloadBaseTransportHeader:
		copy(h, binaryutil.BigEndian.PutUint16(s.sport))
		copy(h[2:], binaryutil.BigEndian.PutUint16(s.dport))
		h[13] = s.flags
		if s.vni != 0 {
			copy(h[12:], binaryutil.BigEndian.PutUint32(s.vni<<8))
		}
	case s.src.Is4():
		copy(h[12:], s.src.AsSlice())
		copy(h[16:], s.dst.AsSlice())
	default:
		copy(h[8:], s.src.AsSlice())
		copy(h[24:], s.dst.AsSlice())
	}
	return h
}

// fate is what becomes of a packet.
type fate struct {
	end  string // "", "drop", "reset" or "unreachable"
	ct   ctState
	mark uint32
}

// rulebook evaluates a table's rules as the kernel does, and counts expressions.
type rulebook struct {
	rules map[string][]*nftables.Rule
	bases map[nftables.ChainHook][]*nftables.Chain // in the order of priorities
	cost  int
}

// readRules reads the table of ns back from the kernel.
func readRules(t *testing.T, ns string) *rulebook {
	t.Helper()
	b := &rulebook{rules: map[string][]*nftables.Rule{}, bases: map[nftables.ChainHook][]*nftables.Chain{}}
	in(t, ns, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
		if err != nil {
			return err
		}
		for _, x := range chains {
			if x.Hooknum != nil {
				b.bases[*x.Hooknum] = append(b.bases[*x.Hooknum], x)
			}
			if b.rules[x.Name], err = c.GetRules(x.Table, x); err != nil {
				return err
			}
		}
		return nil
	})
	for _, x := range b.bases {
		slices.SortFunc(x, func(p, q *nftables.Chain) int { return cmp.Compare(*p.Priority, *q.Priority) })
	}
	return b
}

// judge runs the chains of hook over s.
func (b *rulebook) judge(t *testing.T, hook *nftables.ChainHook, s sample) fate {
	f := fate{mark: s.mark, ct: cmp.Or(s.ct, ctNone)}
	track := func() {
		if f.ct == ctNone {
			f.ct = ctTracked
		}
	}
	for _, c := range b.bases[*hook] {
		if *c.Priority > trackingPriority {
			track()
		}
		if b.walk(t, c.Name, s, &f); f.end != "" {
			return f
		}
	}
	track()
	return f
}

// walk runs one chain, and reports whether that was the end of the base chain.
func (b *rulebook) walk(t *testing.T, chain string, s sample, f *fate) bool {
	for _, r := range b.rules[chain] {
		verdict := b.apply(t, chain, r.Exprs, s, f)
		if f.end != "" {
			return true
		}
		if verdict == nil {
			continue
		}
		switch verdict.Kind {
		case expr.VerdictAccept:
			return true
		case expr.VerdictDrop:
			f.end = "drop"
			return true
		case expr.VerdictReturn:
			return false
		case expr.VerdictGoto:
			return b.walk(t, verdict.Chain, s, f)
		case expr.VerdictJump:
			if b.walk(t, verdict.Chain, s, f) {
				return true
			}
		default:
			t.Fatalf("chain %s: verdict %v", chain, verdict.Kind)
		}
	}
	return false
}

// apply runs one rule of chain, and gives its verdict if it has one and all of it matched.
func (b *rulebook) apply(t *testing.T, chain string, exprs []expr.Any, s sample, f *fate) *expr.Verdict {
	var reg []byte // all rules use register 1; nil once it was compared
	for _, e := range exprs {
		b.cost++
		switch e := e.(type) {
		case *expr.Meta:
			if e.SourceRegister {
				if e.Key == expr.MetaKeyMARK { // the others write what no rule reads
					f.mark = binaryutil.NativeEndian.Uint32(reg)
				}
				continue
			}
			reg = s.meta(t, e.Key, f.mark)
		case *expr.Payload:
			reg = s.header(e.Base)[e.Offset : e.Offset+e.Len]
		case *expr.Bitwise:
			reg = slices.Clone(reg[:e.Len])
			for i := range reg {
				reg[i] = reg[i]&e.Mask[i] ^ e.Xor[i]
			}
		case *expr.Cmp:
			if reg == nil { // of "socket transparent", which the library does not read back
				if b.cost++; chain != "claimed" {
					t.Fatalf("chain %s compares what cannot be read back", chain)
				}
				reg = []byte{0}
				if s.claimed {
					reg[0] = 1
				}
			}
			if bytes.Equal(reg[:len(e.Data)], e.Data) != (e.Op == expr.CmpOpEq) {
				return nil
			}
			reg = nil
		case *expr.Range:
			if bytes.Compare(reg, e.FromData) < 0 || bytes.Compare(reg, e.ToData) > 0 {
				return nil
			}
		case *expr.Ct:
			if reg = f.conntrack(t, e.Key, s.dnat); reg == nil {
				return nil
			}
		case *expr.Fib:
			a := s.dst
			if e.FlagSADDR {
				a = s.src
			}
			reg = binaryutil.NativeEndian.PutUint32(unix.RTN_UNICAST)
			if isLocal(a) {
				reg = binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)
			}
		case *expr.Lookup: // only a set of nodes is looked at, and samples of the overlay are of one
			if e.Invert {
				return nil
			}
		case *expr.Immediate:
			reg = e.Data
		case *expr.Notrack:
			if f.ct == ctNone { // else without effect
				f.ct = ctUntracked
			}
		case *expr.Objref:
		case *expr.Reject:
			f.end = map[bool]string{true: "reset", false: "unreachable"}[e.Type == unix.NFT_REJECT_TCP_RST]
			return nil
		case *expr.Verdict:
			return e
		default:
			t.Fatalf("expression %T", e)
		}
	}
	return nil
}

// isLocal reports whether a is an address of the node's, for packets without a mark.
func isLocal(a netip.Addr) bool { return a.IsLoopback() || a == nodeConfig(0).Underlay }

// conntrack gives a key of "ct", nil where the kernel ends the rule because the packet has no
// entry.
func (f *fate) conntrack(t *testing.T, key expr.CtKey, dnat bool) []byte {
	switch {
	case key == expr.CtKeySTATE:
		return binaryutil.NativeEndian.PutUint32(uint32(f.ct))
	case key != expr.CtKeySTATUS:
		t.Fatalf("ct key %v", key)
	case f.ct != ctTracked:
		return nil
	case dnat:
		return binaryutil.NativeEndian.PutUint32(1 << 5)
	}
	return make([]byte, 4)
}

func (s sample) meta(t *testing.T, key expr.MetaKey, mark uint32) []byte {
	switch key {
	case expr.MetaKeyMARK:
		return binaryutil.NativeEndian.PutUint32(mark)
	case expr.MetaKeyL4PROTO:
		return []byte{s.proto}
	case expr.MetaKeyNFPROTO:
		if s.src.Is4() {
			return []byte{unix.NFPROTO_IPV4}
		}
		return []byte{unix.NFPROTO_IPV6}
	case expr.MetaKeyIIFNAME:
		return append([]byte(s.in), make([]byte, unix.IFNAMSIZ-len(s.in))...)
	case expr.MetaKeyIIF:
		return binaryutil.NativeEndian.PutUint32(sampleDevices[s.in])
	case expr.MetaKeyOIF:
		return binaryutil.NativeEndian.PutUint32(sampleDevices[s.out])
	}
	t.Fatalf("meta key %v", key)
	return nil
}

// wanted is what docs/protocols/pins.md promises for s.
func wanted(cfg NodeConfig, s sample) fate {
	f := fate{mark: s.mark, ct: ctTracked}
	tcp := s.proto == unix.IPPROTO_TCP
	store := tcp && slices.Contains(cfg.Stores, netip.AddrPortFrom(s.dst, s.dport))
	direct := tcp && (cfg.DirectPorts.Contains(s.sport) || cfg.DirectPorts.Contains(s.dport))
	socket := s.mark == cfg.Mark || s.mark == cfg.OverlayMark
	within := func(prefixes []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	local := within(cfg.Pool, s.src) && within(cfg.Pool, s.dst)
	untracked := func(is bool) {
		if is {
			f.ct = ctUntracked
		}
	}
	if s.out != "" {
		switch {
		case s.mark == cfg.DropMark:
			f.end = "drop"
		case socket && store:
			f.end = "reset"
		}
		untracked(direct || socket && (model.MirrorRange.Contains(s.dst) || s.out == "lo" && local))
		if s.mark == cfg.Mark && s.dnat && f.ct == ctTracked && f.end == "" {
			f.mark = cfg.OverlayMark
		}
		return f
	}
	fromMirror := model.MirrorRange.Contains(s.src)
	switch {
	case s.in != "lo":
		untracked(s.in == netdev.Divert || direct || s.mark == cfg.Mark && fromMirror)
	case s.ct == ctNone:
		untracked(direct || local || isLocal(s.src) && isLocal(s.dst))
	default:
		f.ct = s.ct
	}
	opening := s.flags&0x12 == 0x02
	switch {
	case s.mark == cfg.RejectMark && s.in != "lo":
		f.end = map[bool]string{true: "reset", false: "unreachable"}[tcp]
	case store && (s.in == "hd1" || s.in == netdev.Overlay):
		f.end = "reset"
	case s.mark == cfg.Mark:
	case fromMirror:
		f.end = "drop"
	case !tcp || !within(cfg.Prefixes, s.dst) || !s.claimed || opening && (s.in != "lo" && s.in != netdev.Divert || s.dnat && f.ct == ctTracked):
	default:
		f.mark = cfg.Mark
	}
	return f
}

// earlyConfigs are configurations whose rules differ in order.
func earlyConfigs() map[string]NodeConfig {
	at := func(store string, port uint16) NodeConfig {
		cfg := nodeConfig(0)
		cfg.Prefixes = []netip.Prefix{cfg.Prefixes[0], netip.MustParsePrefix("fd99::a63:100/120")} // not those of other tests
		cfg.Pool = []netip.Prefix{pool, netip.MustParsePrefix("fd99::/96")}
		cfg.DirectPorts = model.PortRange{First: 17408, Last: 17471}
		cfg.Stores = []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr(store), port), netip.AddrPortFrom(underlay[1], port)}
		return cfg
	}
	alone, tracked := at("192.0.2.9", 2379), at("192.0.2.9", 2379)
	alone.Stores = nil
	tracked.DirectPorts = model.PortRange{}
	return map[string]NodeConfig{
		"store on a node": at("192.0.2.9", 2379), "store at a direct port": at("192.0.2.9", 17410), "store in the pool": at(c3.String(), 2379),
		"store with IPv6": at("2001:db8::9", 2379), "no store": alone, "no direct ports": tracked,
	}
}

// TestRules evaluates the rules of a node over every combination of what they look at. What an
// earlier version or somebody else left in the table is gone. What is sent by lo is followed to
// where it comes back: with what connection tracking knew of it, and without, as it comes from the
// shaping device.
func TestRules(t *testing.T) {
	for name, cfg := range earlyConfigs() {
		t.Run(name, func(t *testing.T) {
			b := setUpRules(t, cfg)
			addrs := []netip.Addr{c1, c3, netip.MustParseAddr("fd99::a63:102"), netip.MustParseAddr("fd99::a63:202"), underlay[0], underlay[1],
				netip.MustParseAddr("2001:db8::9"), netip.MustParseAddr("250.1.2.3"), netip.MustParseAddr("127.0.0.1"), ext}
			if len(cfg.Stores) > 0 && !slices.Contains(addrs, cfg.Stores[0].Addr()) {
				addrs = append(addrs, cfg.Stores[0].Addr())
			}
			wrong := 0
			check := func(hook *nftables.ChainHook, s sample) fate {
				got, want := b.judge(t, hook, s), wanted(cfg, s)
				if got.end != "" || want.end != "" { // it is gone
					got.ct, want.ct = 0, 0
					got.mark, want.mark = 0, 0
				}
				if got != want {
					if wrong++; wrong < 10 {
						t.Errorf("%+v\n got %+v\nwant %+v", s, got, want)
					}
				}
				return got
			}
			samples(cfg, addrs, []uint16{80, 17410, 2379}, func(s sample) {
				if s.out == "" {
					check(nftables.ChainHookPrerouting, s)
					return
				}
				sent := check(nftables.ChainHookOutput, s)
				if s.out != "lo" || sent.end != "" || sent.mark != s.mark { // another mark: another route
					return
				}
				s.out, s.in = "", "lo"
				arrivals(func(claimed bool, flags byte) {
					s.claimed, s.flags, s.ct = claimed, flags, sent.ct
					kept := check(nftables.ChainHookPrerouting, s)
					s.ct = ctNone
					lost := check(nftables.ChainHookPrerouting, s)
					// What is within a container is never in the shaping device.
					if sent.ct == ctUntracked && !model.MirrorRange.Contains(s.dst) && kept != lost {
						if wrong++; wrong < 10 {
							t.Errorf("%+v\nuntracked when it was sent, but from the shaping device it comes as %+v instead of %+v", s, lost, kept)
						}
					}
				})
			})
		})
	}
}

// arrivals calls do with every combination of what only matters at prerouting.
func arrivals(do func(claimed bool, flags byte)) {
	for _, claimed := range []bool{false, true} {
		for _, flags := range []byte{0x02, 0x12} {
			do(claimed, flags)
		}
	}
}

// setUpRules sets up a node over what an earlier version left, and reads its rules.
func setUpRules(t *testing.T, cfg NodeConfig) *rulebook {
	t.Helper()
	top := newTopology(t)
	run(t, top.node[0], `nft add table inet heddle
nft add chain inet heddle untracked-in { type filter hook prerouting priority -300 ; }
nft add chain inet heddle rejected { type filter hook prerouting priority -310 ; }
nft add rule inet heddle rejected drop`)
	var devs NodeDevices
	in(t, top.node[0], func() (err error) {
		devs, err = SetupNode(cfg)
		return err
	})
	b := readRules(t, top.node[0])
	if b.rules["untracked-in"] != nil || len(b.bases[*nftables.ChainHookPrerouting]) != 2 || len(b.bases[*nftables.ChainHookOutput]) != 2 {
		t.Errorf("base chains: %v", b.bases)
	}
	for _, hook := range []*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookOutput} {
		// Between putting fragments together, connection tracking, and the translation of
		// destinations.
		if early, late := *b.bases[*hook][0].Priority, *b.bases[*hook][1].Priority; early <= -400 || early >= trackingPriority || late <= -100 {
			t.Errorf("hook %d: chains at %d and %d", *hook, early, late)
		}
	}
	sampleDevices[netdev.Divert] = uint32(devs.DivertIfindex)
	for _, name := range []string{"eth0", "hd1", netdev.Overlay} {
		sampleDevices[name] = uint32(devs.DivertIfindex) + uint32(len(name)) + 1
	}
	return b
}

// samples calls do with every combination, but for what comes by lo.
func samples(cfg NodeConfig, addrs []netip.Addr, ports []uint16, do func(sample)) {
	both := []bool{false, true}
	for _, mark := range []uint32{0, cfg.Mark, cfg.OverlayMark, cfg.DropMark, cfg.RejectMark} {
		for _, src := range addrs {
			for _, dst := range addrs {
				if src.Is4() != dst.Is4() {
					continue
				}
				for _, sport := range ports {
					for _, dport := range ports {
						s := sample{mark: mark, src: src, dst: dst, sport: sport, dport: dport}
						for _, s.proto = range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
							for _, s.dnat = range both {
								for _, s.out = range []string{"lo", "eth0", "hd1"} {
									do(s)
								}
								s.out = ""
								arrivals(func(claimed bool, flags byte) {
									s := s
									s.claimed, s.flags = claimed, flags
									for s.in = range sampleDevices {
										if s.in != "lo" {
											do(s)
										}
									}
								})
							}
						}
					}
				}
			}
		}
	}
}

// TestRulesCost: how many expressions the kernel evaluates for the packets that there are most of.
// Decision 0007 has the numbers; every packet of a node pays for each.
func TestRulesCost(t *testing.T) {
	cfg := earlyConfigs()["store on a node"]
	b := setUpRules(t, cfg)
	tcp := func(s sample) sample {
		if s.proto == 0 {
			s.proto, s.flags = unix.IPPROTO_TCP, 0x10
		}
		return s
	}
	local, remote, home := c1, underlay[1], netip.MustParseAddr("127.0.0.1")
	for _, x := range []struct {
		name string
		most int // for both hooks and the input hook
		s    sample
	}{
		{"between node sockets over lo", 30, sample{out: "lo", in: "lo", mark: cfg.Mark, src: local, dst: local.Next(), sport: 40000, dport: 80}},
		{"the same in IPv6", 40, sample{out: "lo", in: "lo", mark: cfg.Mark, src: netip.MustParseAddr("fd99::a63:102"), dst: netip.MustParseAddr("fd99::a63:103"), sport: 40000, dport: 80}},
		{"SYN-ACK by the divert device", 60, sample{out: "hd1", in: netdev.Divert, mark: cfg.OverlayMark, src: local, dst: local.Next(), sport: 80, dport: 40000}},
		{"direct, to the server", 50, sample{out: "eth0", in: "eth0", mark: cfg.Mark, src: underlay[0], dst: remote, sport: 40000, dport: 17410}},
		{"the overlay's", 60, sample{out: "eth0", in: "eth0", proto: unix.IPPROTO_UDP, src: remote, dst: underlay[0], sport: 50000, dport: DefaultVXLANPort, vni: cfg.VNI}},
		{"direct, from the server", 61, sample{out: "eth0", in: "eth0", mark: cfg.Mark, src: remote, dst: underlay[0], sport: 17410, dport: 40000}},
		{"the host's own, over lo", 50, sample{out: "lo", in: "lo", src: home, dst: home, sport: 40000, dport: 80}},
		{"the host's own, to another", 60, sample{out: "eth0", in: "eth0", src: remote, dst: underlay[0], sport: 40000, dport: 80}},
	} {
		spend := func(hook *nftables.ChainHook, s sample) int {
			b.cost = 0
			b.judge(t, hook, tcp(s))
			return b.cost
		}
		out := x.s
		out.in = ""
		in := x.s
		in.out = ""
		if in.in == "lo" {
			in.ct = b.judge(t, nftables.ChainHookOutput, tcp(out)).ct
		}
		if in.in == "eth0" {
			in.mark = 0
		}
		if in.in == netdev.Divert {
			in.mark = cfg.Mark
		}
		sent, arrived, input := spend(nftables.ChainHookOutput, out), spend(nftables.ChainHookPrerouting, in), spend(nftables.ChainHookInput, in)
		t.Logf("%s: output %d, prerouting %d, input %d: %d", x.name, sent, arrived, input, sent+arrived+input)
		if sent+arrived+input > x.most {
			t.Errorf("%s: %d expressions, want at most %d", x.name, sent+arrived+input, x.most)
		}
	}
}

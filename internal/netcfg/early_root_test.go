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
}

var sampleDevices = map[string]uint32{"lo": loopbackIndex, "eth0": 2, OverlayDevice: 3, DeliverDevice: 4, "hd1": 5}

func (s sample) header(which expr.PayloadBase) []byte {
	h := make([]byte, 40)
	switch {
	case which == expr.PayloadBaseTransportHeader:
		copy(h, binaryutil.BigEndian.PutUint16(s.sport))
		copy(h[2:], binaryutil.BigEndian.PutUint16(s.dport))
		h[13] = s.flags
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
	end       string // "", "drop", "reset" or "unreachable"
	untracked bool
	mark      uint32
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
	f := fate{mark: s.mark}
	for _, c := range b.bases[*hook] {
		if b.walk(t, c.Name, s, &f); f.end != "" {
			break
		}
	}
	return f
}

// walk runs one chain, and reports whether that was the end of the base chain.
func (b *rulebook) walk(t *testing.T, chain string, s sample, f *fate) bool {
	for _, r := range b.rules[chain] {
		verdict := b.apply(t, r.Exprs, s, f)
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

// apply runs one rule, and gives its verdict if it has one and all of it matched.
func (b *rulebook) apply(t *testing.T, exprs []expr.Any, s sample, f *fate) *expr.Verdict {
	var reg []byte // all rules use register 1; nil once it was compared
	for _, e := range exprs {
		b.cost++
		switch e := e.(type) {
		case *expr.Meta:
			if e.SourceRegister {
				f.mark = binaryutil.NativeEndian.Uint32(reg)
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
				b.cost++
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
			if f.untracked {
				return nil
			}
			reg = make([]byte, 4)
			if s.dnat {
				reg = binaryutil.NativeEndian.PutUint32(1 << 5)
			}
		case *expr.Immediate:
			reg = e.Data
		case *expr.Notrack:
			f.untracked = true
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
		return deviceNameData(s.in)
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
	f := fate{mark: s.mark}
	tcp := s.proto == unix.IPPROTO_TCP
	store := tcp && slices.Contains(cfg.Stores, netip.AddrPortFrom(s.dst, s.dport))
	direct := tcp && (cfg.DirectPorts.Contains(s.sport) || cfg.DirectPorts.Contains(s.dport))
	socket := s.mark == cfg.Mark || s.mark == cfg.OverlayMark
	within := func(prefixes []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	if s.out != "" {
		switch {
		case s.mark == cfg.DropMark:
			f.end = "drop"
		case socket && store:
			f.end = "reset"
		}
		f.untracked = direct || socket && (model.MirrorRange.Contains(s.dst) || s.out == "lo" && within(cfg.Pool, s.src) && within(cfg.Pool, s.dst))
		if s.mark == cfg.Mark && s.dnat && !f.untracked && f.end == "" {
			f.mark = cfg.OverlayMark
		}
		return f
	}
	fromMirror := model.MirrorRange.Contains(s.src)
	f.untracked = s.in != "lo" && (s.in == DeliverDevice || direct || s.mark == cfg.Mark && fromMirror)
	opening := s.flags&0x12 == 0x02
	switch {
	case s.mark == cfg.RejectMark && s.in != "lo":
		f.end = map[bool]string{true: "reset", false: "unreachable"}[tcp]
	case store && (s.in == "hd1" || s.in == OverlayDevice):
		f.end = "reset"
	case s.mark == cfg.Mark:
	case fromMirror:
		f.end = "drop"
	case !tcp || !within(cfg.Prefixes, s.dst) || !s.claimed || opening && (s.in == "eth0" || s.dnat && !f.untracked):
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
	return map[string]NodeConfig{
		"store on a node": at("192.0.2.9", 2379), "store at a direct port": at("192.0.2.9", 17410), "store in the pool": at(c3.String(), 2379),
	}
}

// TestRules evaluates the rules of a node over every combination of what they look at. What an earlier version or
// somebody else left in the table is gone.
func TestRules(t *testing.T) {
	for name, cfg := range earlyConfigs() {
		t.Run(name, func(t *testing.T) {
			b := setUpRules(t, cfg)
			addrs := []netip.Addr{c1, c3, netip.MustParseAddr("fd99::a63:102"), netip.MustParseAddr("fd99::a63:202"), underlay[0], underlay[1],
				cfg.Stores[0].Addr(), netip.MustParseAddr("250.1.2.3"), netip.MustParseAddr("127.0.0.1"), ext}
			ports := []uint16{80, 17410, 2379}
			wrong := 0
			samples(cfg, addrs, ports, func(s sample) {
				hook := nftables.ChainHookPrerouting
				if s.out != "" {
					hook = nftables.ChainHookOutput
				}
				got, want := b.judge(t, hook, s), wanted(cfg, s)
				if got.end != "" || want.end != "" {
					got.untracked, want.untracked = false, false // it is gone
					got.mark, want.mark = 0, 0
				}
				if got != want {
					if wrong++; wrong < 10 {
						t.Errorf("%+v\n got %+v\nwant %+v", s, got, want)
					}
				}
			})
		})
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
	sampleDevices[DeliverDevice] = uint32(devs.DeliverIfindex)
	for _, name := range []string{"eth0", "hd1", OverlayDevice} {
		sampleDevices[name] = uint32(devs.DeliverIfindex) + uint32(len(name)) + 1
	}
	return b
}

// samples calls do with every combination.
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
								for _, s.claimed = range both {
									for _, s.flags = range []byte{0x02, 0x12} {
										for s.in = range sampleDevices {
											do(s)
										}
									}
								}
								s.in, s.claimed, s.flags = "", false, 0
							}
						}
					}
				}
			}
		}
	}
}

// TestRulesCost: how many expressions the kernel evaluates for the packets that there are most of. Decision 0007 has the
// numbers; every packet of a node pays for each.
func TestRulesCost(t *testing.T) {
	cfg := earlyConfigs()["store on a node"]
	b := setUpRules(t, cfg)
	tcp := func(s sample) sample {
		s.proto, s.flags = unix.IPPROTO_TCP, 0x10
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
		{"SYN-ACK by the delivery device", 60, sample{out: "hd1", in: DeliverDevice, mark: cfg.OverlayMark, src: local, dst: local.Next(), sport: 80, dport: 40000}},
		{"direct, to the server", 50, sample{out: "eth0", in: "eth0", mark: cfg.Mark, src: underlay[0], dst: remote, sport: 40000, dport: 17410}},
		{"direct, from the server", 60, sample{out: "eth0", in: "eth0", mark: cfg.Mark, src: remote, dst: underlay[0], sport: 17410, dport: 40000}},
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
		if in.in == "eth0" {
			in.mark = 0
		}
		if in.in == DeliverDevice {
			in.mark = cfg.Mark
		}
		sent, arrived, input := spend(nftables.ChainHookOutput, out), spend(nftables.ChainHookPrerouting, in), spend(nftables.ChainHookInput, in)
		t.Logf("%s: output %d, prerouting %d, input %d: %d", x.name, sent, arrived, input, sent+arrived+input)
		if sent+arrived+input > x.most {
			t.Errorf("%s: %d expressions, want at most %d", x.name, sent+arrived+input, x.most)
		}
	}
}

package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/firewall"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// Feature is the outcome of trying one thing in a network namespace of its own. What lacking it
// means, and what to do about it, is internal/doctor's to say.
type Feature struct {
	// Name is stable: "net_" and what was tried.
	Name string
	// Detail says what was tried, in a few words.
	Detail string
	// Err is nil if the kernel did it, and says what it answered otherwise.
	Err error
}

// Features tries what the overlay is built of in a network namespace that exists for the length of
// the call only: it has no name and dies with the thread that made it, so nothing is left behind
// even if the process is killed. An error means that there was no such namespace to try in, mostly
// for want of CAP_SYS_ADMIN.
func Features() ([]Feature, error) {
	var found []Feature
	err := inThrowAwayNetns(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		defer h.Close()
		for _, p := range probes {
			found = append(found, Feature{Name: p.name, Detail: p.detail, Err: p.try(h)})
		}
		return nil
	})
	return found, err
}

// probes are tried in order, in one namespace.
var probes = []struct {
	name, detail string
	try          func(*netlink.Handle) error
}{
	{"net_veth", "a veth pair", tryVeth},
	{"net_vxlan", "a VXLAN device that leaves addresses to its peers table", tryVXLAN},
	{"net_clsact", "a clsact qdisc", tryClsact},
	{"net_cls_bpf", "the tc classifier bpf", tryClsBPF},
	{"net_rule_fwmark", "a routing rule by mark, and a table that makes an address local", tryFwmarkRule},
	{"net_rule_fwmark_ipv6", "the same for IPv6", tryFwmarkRule6},
	{"net_nft_masquerade", "an nftables chain that masquerades", tryMasquerade},
	{"net_nft_socket", "an nftables rule that marks packets of a transparent socket", trySocketMatch},
	{"net_nft_guards", "nftables sets, counters and rules that refuse", tryGuards},
	{"net_shape", "an ifb device with an HTB qdisc and a size table", tryShape},
	{"net_mirred", "the tc action that redirects to a device", tryMirred},
	{"net_wireguard", "a WireGuard device", tryWireGuard},
}

// inThrowAwayNetns runs f on a thread in a new network namespace. The thread ends with
// f, and the namespace with it.
func inThrowAwayNetns(f func() error) error {
	return netns.OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		return f()
	})
}

func tryVeth(h *netlink.Handle) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe0"
	return rtnl.Errno("add veth", h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "probe1"}))
}

func tryVXLAN(h *netlink.Handle) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe-vxlan"
	return rtnl.Errno("add vxlan", h.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1, Port: 4789, Learning: false}))
}

func tryClsact(h *netlink.Handle) error {
	return rtnl.Errno("add clsact", h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: netdev.LoopbackIfindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}))
}

func tryClsBPF(h *netlink.Handle) error {
	return tryClassifier(h, &netlink.BpfFilter{FilterAttrs: probeFilter, Fd: -1, Name: "probe", DirectAction: true})
}

var probeFilter = netlink.FilterAttrs{LinkIndex: netdev.LoopbackIfindex, Parent: netlink.HANDLE_MIN_INGRESS,
	Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1}

// tryClassifier adds a filter that lacks what it classifies by, since this package has no BPF
// program: a kernel with the classifier says EINVAL to that, one without says ENOENT before it has
// looked. A missing qdisc is EINVAL too, so that is ruled out first.
func tryClassifier(h *netlink.Handle, filter netlink.Filter) error {
	if err := tryClsact(h); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	err := h.FilterAdd(filter)
	switch {
	case err == nil:
		return errors.New("add filter: the kernel took a filter without a program")
	case errors.Is(err, unix.EINVAL):
		return nil
	}
	return rtnl.Errno("add filter", err)
}

// probeMark and probeTable are of the throw-away namespace only.
const (
	probeMark  = 0x1
	probeTable = 100
)

func tryFwmarkRule(h *netlink.Handle) error {
	return fwmarkRule(h, netlink.FAMILY_V4, netip.MustParsePrefix("192.0.2.0/24"))
}

func tryFwmarkRule6(h *netlink.Handle) error {
	return fwmarkRule(h, netlink.FAMILY_V6, netip.MustParsePrefix("2001:db8::/64"))
}

func fwmarkRule(h *netlink.Handle, family int, p netip.Prefix) error {
	// A route may not go through a device that is down.
	lo, err := h.LinkByIndex(netdev.LoopbackIfindex)
	if err != nil {
		return rtnl.Errno("find lo", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return rtnl.Errno("set lo up", err)
	}
	rule := netlink.NewRule()
	rule.Family, rule.Mark, rule.Table, rule.Priority = family, probeMark, probeTable, 10
	if err := h.RuleAdd(rule); err != nil {
		return rtnl.Errno("add rule", err)
	}
	route := &netlink.Route{LinkIndex: netdev.LoopbackIfindex, Table: probeTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
	return rtnl.Errno("add local route", h.RouteAdd(route))
}

func tryMasquerade(*netlink.Handle) error  { return firewall.TryMasquerade() }
func trySocketMatch(*netlink.Handle) error { return firewall.TrySocketMatch() }
func tryGuards(*netlink.Handle) error      { return firewall.TryGuards() }

func tryShape(h *netlink.Handle) error {
	dev, err := ensureShapeDevice(h)
	if err != nil {
		return err
	}
	return setClass(h, dev, shapeClass{minor: 1, rate: model.MinRate, ceil: model.MinRate, queue: queueBytes(model.MinRate)})
}

// actionMessage is struct tcamsg, of no family.
type actionMessage [4]byte

func (actionMessage) Len() int            { return len(actionMessage{}) }
func (m actionMessage) Serialize() []byte { return m[:] }

// tryMirred makes the action by itself: no filter is needed.
func tryMirred(*netlink.Handle) error {
	const rootTable = 1 // TCA_ROOT_TAB
	req := nl.NewNetlinkRequest(unix.RTM_NEWACTION, unix.NLM_F_CREATE|unix.NLM_F_ACK)
	req.AddData(actionMessage{})
	actions := nl.NewRtAttr(rootTable, nil)
	if err := netlink.EncodeActions(actions, []netlink.Action{netlink.NewMirredAction(netdev.LoopbackIfindex)}); err != nil {
		return err
	}
	req.AddData(actions)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return rtnl.Errno("add action mirred", err)
}

package netcfg

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// route is one of Heddle's routes, comparable. Two routes with the same table, dst and metric
// exclude each other.
type route struct {
	table  int
	dst    netip.Prefix
	kind   int // RTN_UNICAST, RTN_LOCAL or RTN_UNREACHABLE
	link   int // 0 for RTN_UNREACHABLE
	gw     netip.Addr
	src    netip.Addr
	onlink bool
	metric int // 0 but for addresses that have moved; of two routes to one destination the lower is taken
	advMSS int // the TCP segment size to ask peers for, in bytes; 0 leaves it to the device's MTU
}

// routeKey is what the kernel tells routes apart by.
type routeKey struct {
	table  int
	dst    netip.Prefix
	metric int
}

func (r route) key() routeKey { return routeKey{r.table, r.dst, r.metric} }

// The metrics of routes for addresses that have moved: to other nodes, and to this one while no
// endpoint has them, when they are unreachable. An endpoint's route has a lower one, so that it
// holds whatever is known of moves.
const (
	movedAwayMetric = 18531
	movedHereMetric = 18532
)

// defaultMetric6 is what the kernel makes of metric 0 in IPv6.
const defaultMetric6 = 1024

func (r route) String() string {
	return fmt.Sprintf("%v in table %d", r.dst, r.table)
}

// netlink gives the route as the netlink library wants it.
func (r route) netlink() *netlink.Route {
	out := &netlink.Route{
		Table: r.table, Dst: rtnl.ToIPNet(r.dst), Type: r.kind, LinkIndex: r.link,
		Gw: r.gw.AsSlice(), Src: r.src.AsSlice(), Protocol: routeProtocol, AdvMSS: r.advMSS, Priority: r.metric,
	}
	switch {
	case r.kind == unix.RTN_LOCAL:
		out.Scope = netlink.SCOPE_HOST
	case r.kind == unix.RTN_UNICAST && !r.gw.IsValid():
		out.Scope = netlink.SCOPE_LINK
	}
	if r.onlink {
		out.Flags = int(netlink.FLAG_ONLINK)
	}
	return out
}

// parseRoute is the reverse of route.netlink.
func parseRoute(n netlink.Route) route {
	r := route{
		table: n.Table, dst: rtnl.FromIPNet(n.Dst), kind: n.Type, link: n.LinkIndex,
		gw: rtnl.FromIP(n.Gw), src: rtnl.FromIP(n.Src), onlink: n.Flags&int(netlink.FLAG_ONLINK) != 0, advMSS: n.AdvMSS, metric: n.Priority,
	}
	if n.Family == netlink.FAMILY_V6 && r.metric == defaultMetric6 {
		r.metric = 0
	}
	if r.kind == unix.RTN_UNREACHABLE {
		r.link = 0 // IPv6 shows the loopback device
	}
	if !r.dst.IsValid() { // a default route may come without destination
		zero := netip.IPv4Unspecified()
		if n.Family == netlink.FAMILY_V6 {
			zero = netip.IPv6Unspecified()
		}
		r.dst = netip.PrefixFrom(zero, 0)
	}
	return r
}

// ownRoutes lists Heddle's routes of all tables.
func ownRoutes(h *netlink.Handle) (map[routeKey]route, error) {
	out := map[routeKey]route{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := rtnl.Dump(func() ([]netlink.Route, error) {
			// Table 0 with this mask means every table.
			return h.RouteListFiltered(family, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, n := range list {
			r := parseRoute(n)
			out[r.key()] = r
		}
	}
	return out, nil
}

// ensureRoute makes want a route. have holds Heddle's routes; an equal one is left alone, because
// each change makes every socket of the namespace look its route up again. A route to the same
// destination that is not Heddle's is an error.
func ensureRoute(h *netlink.Handle, have map[routeKey]route, want route) error {
	old, ours := have[want.key()]
	if ours && old == want {
		return nil
	}
	var err error
	if ours {
		err = h.RouteReplace(want.netlink())
	} else {
		err = h.RouteAdd(want.netlink())
	}
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("route %v: there is one already that is not Heddle's; remove it or choose another overlay pool", want)
	}
	if err != nil {
		return fmt.Errorf("route %v: %w", want, err)
	}
	have[want.key()] = want
	return nil
}

// ownedRoutes are Heddle's routes, listed once they are needed: there are some for every endpoint
// of the node.
type ownedRoutes struct {
	h      *netlink.Handle
	have   map[routeKey]route // nil until they are listed
	byLink map[int][]routeKey // as they were listed
	shared bool
	neigh  map[int]map[netip.Addr]string // neighbours, of those that are shared, once they are listed
}

// Routes are the node's, with its neighbours, listed once for many endpoints: to list those of one
// device the kernel goes through all, too. While they are in use nobody else changes Heddle's.
type Routes ownedRoutes

// ListOnce gives routes that are listed when one has to be looked at, and then no more.
func ListOnce() *Routes { return &Routes{h: rtnl.Each(), shared: true} }

// owned gives routes for one endpoint: those, or some that it lists for itself if there are none.
func (r *Routes) owned() *ownedRoutes {
	if r == nil {
		return &ownedRoutes{h: rtnl.Each()}
	}
	return (*ownedRoutes)(r)
}

// setNeighbours is setNeighbours, for a device of an endpoint.
func (o *ownedRoutes) setNeighbours(link int, want map[netip.Addr]string) (err error) {
	if !o.shared {
		return setNeighbours(o.h, link, want)
	}
	if o.neigh == nil {
		if o.neigh, err = neighbours(0); err != nil {
			return err
		}
	}
	return setEntries(o.h, "neighbour", o.neigh[link], want, neighbourEntry(link))
}

// list gives all of them.
func (o *ownedRoutes) list() (map[routeKey]route, error) {
	if o.have != nil {
		return o.have, nil
	}
	have, err := ownRoutes(o.h)
	o.have, o.byLink = have, make(map[int][]routeKey)
	for k, r := range have {
		o.byLink[r.link] = append(o.byLink[r.link], k)
	}
	return have, err
}

// ensure is ensureRoute for several, which has to look at routes only if one of want cannot just be
// added. One that is there is not changed by the attempt.
func (o *ownedRoutes) ensure(want ...route) error {
	if o.have == nil {
		var b rtnl.Batch
		for _, r := range want {
			addRoute(&b, r)
		}
		failed, err := b.Send()
		if err != nil {
			return err
		}
		var there []route
		for i, err := range failed {
			if errors.Is(err, unix.EEXIST) {
				there = append(there, want[i])
			} else if err != nil {
				return err
			}
		}
		want = there
	}
	if len(want) == 0 {
		return nil
	}
	have, err := o.list()
	if err != nil {
		return err
	}
	for _, r := range want {
		if err := ensureRoute(o.h, have, r); err != nil {
			return err
		}
	}
	return nil
}

// addRoute has b add r.
func addRoute(b *rtnl.Batch, r route) {
	msg := nl.NewRtMsg()
	n := r.netlink()
	msg.Family, msg.Dst_len, msg.Type, msg.Scope, msg.Protocol = uint8(rtnl.FamilyOf(r.dst.Addr())), uint8(r.dst.Bits()), uint8(n.Type), uint8(n.Scope), uint8(n.Protocol)
	msg.Flags, msg.Table = uint32(n.Flags), unix.RT_TABLE_UNSPEC
	data := []nl.NetlinkRequestData{msg, nl.NewRtAttr(unix.RTA_DST, r.dst.Addr().AsSlice()), nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(uint32(r.table)))}
	for _, a := range []struct {
		kind int
		addr netip.Addr
	}{{unix.RTA_GATEWAY, r.gw}, {unix.RTA_PREFSRC, r.src}} {
		if a.addr.IsValid() {
			data = append(data, nl.NewRtAttr(a.kind, a.addr.AsSlice()))
		}
	}
	for _, a := range []struct{ kind, value int }{{unix.RTA_OIF, r.link}, {unix.RTA_PRIORITY, r.metric}} {
		if a.value != 0 {
			data = append(data, nl.NewRtAttr(a.kind, nl.Uint32Attr(uint32(a.value))))
		}
	}
	if r.advMSS != 0 {
		metrics := nl.NewRtAttr(unix.RTA_METRICS, nil)
		metrics.AddRtAttr(unix.RTAX_ADVMSS, nl.Uint32Attr(uint32(r.advMSS)))
		data = append(data, metrics)
	}
	b.Add(fmt.Sprintf("route %v", r), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, data...)
}

// replaceRoute is ensureRoute for a namespace where another's route to the same destination gives
// way.
func replaceRoute(h *netlink.Handle, have map[routeKey]route, want route) error {
	if old, ours := have[want.key()]; ours && old == want {
		return nil
	}
	if err := h.RouteReplace(want.netlink()); err != nil {
		return fmt.Errorf("route %v: %w", want, err)
	}
	have[want.key()] = want
	return nil
}

// deleteRoute deletes r; that it is not there is no error.
func deleteRoute(h *netlink.Handle, r route) error {
	err := h.RouteDel(r.netlink())
	if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete route %v: %w", r, err)
	}
	return nil
}

// pruneRoutes deletes Heddle's routes that stale selects.
func pruneRoutes(h *netlink.Handle, have map[routeKey]route, stale func(route) bool) error {
	for k, r := range have {
		if !stale(r) {
			continue
		}
		if err := deleteRoute(h, r); err != nil {
			return err
		}
		delete(have, k)
	}
	return nil
}

// ruleFamilies gives the families that need a rule: IPv4 always, because IPv4 is what listeners on
// [::] use too, and IPv6 if the node has such a prefix.
func ruleFamilies(prefixes []netip.Prefix) []int {
	families := []int{netlink.FAMILY_V4}
	for _, p := range prefixes {
		if p.Addr().Is6() {
			families = append(families, netlink.FAMILY_V6)
		}
	}
	return families
}

// rules gives the node's rules: "fwmark Mark lookup Table pref RulePref".
func (c NodeConfig) rules() (out []*netlink.Rule) {
	for _, family := range ruleFamilies(c.Prefixes) {
		r := netlink.NewRule()
		r.Family, r.Mark, r.Table, r.Priority, r.Protocol = family, c.Mark, c.Table, c.RulePref, routeProtocol
		out = append(out, r)
	}
	return out
}

// setRule makes the node's rules the only ones that are Heddle's.
func setRule(h *netlink.Handle, cfg NodeConfig) error {
	missing := map[int]*netlink.Rule{} // by family
	for _, r := range cfg.rules() {
		missing[r.Family] = r
	}
	err := eachOwnRule(h, func(r netlink.Rule) error {
		if missing[r.Family] != nil && r.Mark == cfg.Mark && r.Table == cfg.Table && r.Priority == cfg.RulePref {
			delete(missing, r.Family)
			return nil
		}
		return deleteRule(h, r)
	})
	if err != nil {
		return err
	}
	for _, r := range missing {
		if err := h.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add rule fwmark %#x lookup %d: %w", cfg.Mark, cfg.Table, err)
		}
	}
	return nil
}

func eachOwnRule(h *netlink.Handle, fn func(netlink.Rule) error) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := rtnl.Dump(func() ([]netlink.Rule, error) { return h.RuleList(family) })
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue // the kernel has no rules in this family: it has no IPv6, or no policy routing for it
		}
		if err != nil {
			return fmt.Errorf("list rules: %w", err)
		}
		for _, r := range rules {
			if r.Protocol != routeProtocol {
				continue
			}
			r.Family = family
			if err := fn(r); err != nil {
				return err
			}
		}
	}
	return nil
}

func deleteRule(h *netlink.Handle, r netlink.Rule) error {
	if err := h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete rule fwmark %#x lookup %d: %w", r.Mark, r.Table, err)
	}
	return nil
}

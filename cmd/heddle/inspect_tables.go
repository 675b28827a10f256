package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// printJSON prints v indented; an empty list is "[]".
func printJSON(out io.Writer, v any) error {
	if rv := reflect.ValueOf(v); rv.Kind() == reflect.Slice && rv.IsNil() {
		v = []struct{}{}
	}
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table collects rows and prints them in columns.
type table struct {
	buf bytes.Buffer
	tw  *tabwriter.Writer
}

func newTable(columns ...string) *table {
	const padding = 2
	t := &table{}
	t.tw = tabwriter.NewWriter(&t.buf, 0, 0, padding, ' ', 0)
	if len(columns) > 0 {
		t.row(columns...)
	}
	return t
}

// row adds a row. Empty cells become "-", so that every column can be cut out by its number.
func (t *table) row(cells ...string) {
	for i, c := range cells {
		if c == "" {
			c = "-"
		}
		if i > 0 {
			c = "\t" + c
		}
		_, _ = io.WriteString(t.tw, c) // into memory
	}
	_, _ = io.WriteString(t.tw, "\n")
}

// writeTo prints the rows without the blanks that tabwriter leaves at the ends of lines.
func (t *table) writeTo(out io.Writer) error {
	if err := t.tw.Flush(); err != nil {
		return err
	}
	var trimmed strings.Builder
	for line := range strings.Lines(t.buf.String()) {
		trimmed.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	_, err := io.WriteString(out, trimmed.String())
	return err
}

// printStatus prints a block for each agent. Counters that are zero are left out unless all is set.
func printStatus(out io.Writer, list []nodeStatus, all bool, now time.Time) error {
	for i, st := range list {
		if i > 0 {
			if _, err := fmt.Fprintln(out); err != nil {
				return err
			}
		}
		if err := statusTable(st, now).writeTo(out); err != nil {
			return err
		}
		if err := printCounters(out, st.Counters, all); err != nil {
			return err
		}
	}
	return nil
}

// packetsText says how packets between containers go.
func packetsText(p api.Packets) string {
	switch {
	case p.Redirected && p.DeviceReason != "":
		return "redirected, between nodes by the overlay's device: " + p.DeviceReason
	case p.Redirected && p.Tunnel == model.TunnelAuto:
		return fmt.Sprintf("redirected, without a tunnel to %d nodes", p.Native)
	case p.Redirected:
		return "redirected"
	}
	return "routed: " + p.Reason
}

// firewallRows says how connections pass the nodes' forward chains, and which should not.
func firewallRows(f *api.Firewall) []string {
	if f == nil {
		return nil
	}
	own := "only other nodes' forward chains see connections"
	if f.Seconds > 0 {
		own = fmt.Sprintf("the forward chain sees connections, one every %gs", f.Seconds)
	}
	rows := []string{own + "; what it forbids of those that live: " + string(f.Live)}
	for _, x := range f.Forbidden {
		rows = append(rows, fmt.Sprintf("FORBIDDEN NOW, AND KEPT: %d from %s to %s", x.Connections, x.Src, x.Dst))
	}
	return rows
}

// underlayText says by which address and device other nodes reach this one.
func underlayText(st nodeStatus) string {
	u := st.Underlay
	switch {
	case u.Device == "" && u.OverlayMTU == 0: // an agent of an earlier build
		return st.Node.Underlay.String()
	case u.Device == "":
		return fmt.Sprintf("%s, whose DEVICE IS GONE: restart the agent when it is back", st.Node.Underlay)
	case u.Narrowed:
		return fmt.Sprintf("%s on %s, MTU %d, SMALLER THAN IT WAS: the overlay has %d; restart the agent", st.Node.Underlay, u.Device, u.MTU, u.OverlayMTU)
	}
	return fmt.Sprintf("%s on %s, MTU %d, overlay %d", st.Node.Underlay, u.Device, u.MTU, u.OverlayMTU)
}

func statusTable(st nodeStatus, now time.Time) *table {
	t := newTable()
	direct := "none: takes no direct connections"
	if st.Node.Direct() {
		direct = st.Node.Planes.TCP.DirectPorts.String()
	}
	store := fmt.Sprintf("%s %s, ", st.Store.Kind, strings.Join(st.Store.Endpoints, ","))
	if st.Store.Healthy {
		store += fmt.Sprintf("healthy, revision %d", st.Store.Revision)
	} else {
		store += fmt.Sprintf("NOT HEALTHY since revision %d: %s", st.Store.Revision, st.Store.Error)
	}
	t.row("node", st.Node.Name)
	t.row("agent", fmt.Sprintf("heddled %s, pid %d, up %s", st.Version, st.PID, now.Sub(st.Started).Round(time.Second)))
	t.row("underlay", underlayText(st))
	t.row("prefixes", join(st.Node.Prefixes))
	t.row("ipv6", families(st.IPv6))
	t.row("direct ports", direct)
	t.row("network", fmt.Sprintf("%d, pool %s, vni %d, vxlan port %d", st.Network.ID, join(pools(st.Network)), st.Network.VNI, st.Network.VXLANPort))
	t.row("store", store)
	peers := fmt.Sprint(st.Peers)
	if len(st.PeersAway) > 0 {
		peers += ", away: " + strings.Join(st.PeersAway, " ")
	}
	t.row("peers", peers)
	t.row("packets", packetsText(st.Packets))
	for _, row := range firewallRows(st.Firewall) {
		t.row("overlay firewall", row)
	}
	t.row("encryption", encryptionText(st.Encryption))
	for _, row := range encryptedRows(st.Encryption, now) {
		t.row("encrypted peer", row)
	}
	for _, row := range directRows(st.Direct, now) {
		t.row("direct paths", row)
	}
	t.row("endpoints", fmt.Sprint(st.Endpoints))
	interceptionRows(t, st.Interception)
	tr := st.Traffic
	t.row("sockets", fmt.Sprintf("%d held; an endpoint may have %d", tr.Sockets, st.Interception.EndpointSockets))
	t.row("ports", fmt.Sprintf("%d ephemeral ones held; an endpoint may hold %d", tr.Ports, st.Interception.EndpointPorts))
	t.row("connections", fmt.Sprintf("%d opened, %d accepted, %s, %d closed; live: %s", tr.Opened, tr.Accepted,
		failedConnects(tr), tr.Closed, livePaths(tr)))
	if r := st.Router; r != nil && r.State != api.RouterNone {
		t.row("verbs router", routerText(*r))
	}
	t.row("policy", policyText(st.Policy))
	for _, fault := range st.Policy.Faults {
		t.row("policy fault", fault)
	}
	if st.Policy.CutError != "" {
		t.row("policy cut", "forbidden connections may be alive: "+st.Policy.CutError)
	}
	for _, f := range st.Faults {
		t.row("FAULT", faultText(f))
	}
	for _, m := range st.Mended {
		t.row("mended", mendedText(m))
	}
	t.row("payload", fmt.Sprintf("%s sent, %s received, %d segments sent again", byteCount(tr.BytesSent), byteCount(tr.BytesReceived), tr.Retransmits))
	if e := st.Flows.Export; e != nil {
		t.row("flow export", fmt.Sprintf("%s: %d sent; lost: %s", e.Endpoint, e.Sent, failures(e.Lost)))
	}
	t.row("features", features(st.Features))
	return t
}

// interceptionRows adds those of trapped calls.
func interceptionRows(t *table, in api.Interception) {
	answered := fmt.Sprint(in.Answered)
	if made := in.PremadeHits + in.PremadeMisses; made > 0 {
		answered += fmt.Sprintf(" (%d%% with a socket made ahead)", in.PremadeHits*100/made)
	}
	t.row("listeners", fmt.Sprintf("%d, answered by %d threads", in.Listeners, in.Readers))
	t.row("calls answered", answered)
	t.row("batches given", fmt.Sprintf("%d, with %d sockets", in.Batches, in.BatchSockets))
	t.row("calls continued", fmt.Sprint(in.Continued))
	t.row("ioctls made", fmt.Sprint(in.Ioctls))
	t.row("calls failed", failures(in.Failed))
	for _, h := range in.Unguarded {
		t.row("UNGUARDED", fmt.Sprintf("process %d holds %d sockets of endpoint %d, and its ioctls act on the node", h.PID, h.Sockets, h.Endpoint))
	}
}

// routerText says how the router of the verbs plane is.
func routerText(r api.Router) string {
	state := string(r.State)
	if r.PID != 0 {
		state = fmt.Sprintf("process %d", r.PID)
	}
	text := fmt.Sprintf("%s, for %d endpoints; %d have ended", state, r.Endpoints, r.Ended)
	for _, old := range r.Old {
		text += fmt.Sprintf("; process %d, of another build, has %d of them until their programs have closed their devices", old.PID, old.Endpoints)
	}
	return text
}

// faultText says what is wrong, and with what.
func faultText(f api.Fault) string {
	of := ""
	if f.Endpoint != "" {
		of = " of " + f.Endpoint
	}
	return fmt.Sprintf("%s%s since %s: %s", f.Reason, of, f.Since.UTC().Format(time.RFC3339), f.Error)
}

// mendedText says what was put back, and who had taken it away.
func mendedText(m api.Mended) string {
	by := ""
	if m.By != "" {
		by = " after changes by " + m.By
	}
	return fmt.Sprintf("%s: put back %d times, last at %s%s: gone was %s", m.What, m.Times, m.Last.UTC().Format(time.RFC3339), by, m.Gone)
}

// shownPaths is how many of the paths that are not used status lists; --output json has all.
const shownPaths = 20

// directRows says to which nodes connections are direct, and why not to the others.
func directRows(d model.DirectPaths, now time.Time) []string {
	var counts []string
	for s := model.PeerUnproven; s <= model.PeerBlocked; s++ {
		if n := d.Peers[s]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, s))
		}
	}
	if counts == nil {
		counts = []string{"none"}
	}
	rows := []string{strings.Join(counts, ", ")}
	for i, p := range d.Silent {
		if i == shownPaths {
			rows = append(rows, fmt.Sprintf("... and %d more nodes SILENT", len(d.Silent)-i))
			break
		}
		rows = append(rows, fmt.Sprintf("%s (%s): SILENT for %s; %s: it is down, or its packets or this node's are dropped or translated on the way", p.Node, p.Underlay, now.Sub(p.Since).Round(time.Second), p.Detail))
	}
	for i, p := range d.Overlay {
		if i == shownPaths {
			return append(rows, fmt.Sprintf("... and %d more nodes by the overlay", len(d.Overlay)-i))
		}
		row := fmt.Sprintf("%s (%s): %s, by the overlay (%s) for %s", p.Node, p.Underlay, p.State, p.Reason, now.Sub(p.Since).Round(time.Second))
		if p.Detail != "" {
			row += "; " + p.Detail
		}
		rows = append(rows, fmt.Sprintf("%s; next probe in %s", row, max(p.Next.Sub(now), 0).Round(time.Second)))
	}
	return rows
}

// labelsText gives "key=value,..." in the order of keys.
func labelsText(labels map[string]string) string {
	var list []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		list = append(list, k+"="+labels[k])
	}
	return strings.Join(list, ",")
}

// policyText says what rules are in force.
func policyText(p api.Policy) string {
	switch {
	case p.Error != "":
		return fmt.Sprintf("NOT IN FORCE since revision %d: %s", p.Revision, p.Error)
	case p.Policies == 0:
		return fmt.Sprintf("none: everything is allowed; %d connections cut", p.Cut)
	}
	return fmt.Sprintf("%d policies, %d rules, revision %d; %d addresses, %d pairs; last change took %s; %d connections cut",
		p.Policies, p.Rules, p.Revision, p.Addresses, p.Pairs, p.Took.Round(time.Microsecond), p.Cut)
}

// families says which IPv6 prefixes a node has, or why none.
func families(v6 api.IPv6) string {
	if v6.Enabled {
		return join(v6.Prefixes)
	}
	return fmt.Sprintf("none: %s: %s", v6.Reason, v6.Detail)
}

// pools gives the network's addresses in both families.
func pools(n api.Network) []netip.Prefix {
	if !n.Prefix6.IsValid() {
		return n.Pool
	}
	return append(slices.Clone(n.Pool), n.Prefix6)
}

// failedConnects gives the number of connects that failed, with the causes that occurred.
func failedConnects(t model.Traffic) string {
	sum := t.Refused + t.TimedOut + t.Failed
	if sum == 0 {
		return "0 failed"
	}
	return fmt.Sprintf("%d failed (%s)", sum, failures(map[string]uint64{"refused": t.Refused, "timed out": t.TimedOut, "other": t.Failed}))
}

// livePaths gives the number of live connections on each path that has some.
func livePaths(t model.Traffic) string {
	var parts []string
	for _, p := range slices.Sorted(maps.Keys(t.Live)) {
		if n := t.Live[p]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", p, n))
		}
	}
	if len(parts) == 0 {
		return "0"
	}
	return strings.Join(parts, ", ")
}

// failures names the causes that occurred.
func failures(byCause map[string]uint64) string {
	var parts []string
	for _, cause := range slices.Sorted(maps.Keys(byCause)) {
		if n := byCause[cause]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", cause, n))
		}
	}
	if len(parts) == 0 {
		return "0"
	}
	return strings.Join(parts, ", ")
}

// features names those that are not there.
func features(checks []api.Check) string {
	lacking := map[api.CheckStatus][]string{}
	for _, c := range checks {
		lacking[c.Status] = append(lacking[c.Status], c.Name)
	}
	var parts []string
	for _, s := range []api.CheckStatus{api.CheckMissing, api.CheckDegraded} {
		if names := lacking[s]; len(names) > 0 {
			parts = append(parts, fmt.Sprintf("%s: %s", s, strings.Join(names, ", ")))
		}
	}
	switch {
	case len(checks) == 0:
		return "not probed"
	case len(parts) == 0:
		return "all there"
	}
	return strings.Join(parts, "; ") + " (`heddle doctor` says more)"
}

func printCounters(out io.Writer, counters []api.Counter, all bool) error {
	t := newTable("KIND", "REASON", "COUNT", "MEANING")
	shown := false
	for _, kind := range model.Kinds {
		for _, c := range counters {
			if c.Kind == kind && (all || c.Value > 0) {
				t.row(string(c.Kind), c.Name, fmt.Sprint(c.Value), c.Help)
				shown = true
			}
		}
	}
	if !shown {
		_, err := fmt.Fprintln(out, "\nNothing counted yet: no connection, fallback, drop or refusal.")
		return err
	}
	if _, err := fmt.Fprintln(out); err != nil {
		return err
	}
	return t.writeTo(out)
}

func printEndpoints(out io.Writer, list []endpointTraffic, withNode bool) error {
	t := newTable(nodeColumn(withNode, "NODE", "NAME", "ADDRESSES", "INTERCEPTED", "STACK", "VERBS", "PORTS", "NETNS", "CREATED", "LABELS", "FAULT")...)
	for _, e := range list {
		intercepted := "no"
		if e.Planes.TCP.Intercepted {
			intercepted = "yes"
		}
		verbs := ""
		if e.Planes.Verbs.Wanted {
			verbs = "yes"
		}
		if e.Planes.Verbs.Outside {
			verbs = "outside"
		}
		t.row(nodeColumn(withNode, e.Node, e.Name, join(e.Addrs), intercepted, stackText(e.Stack), verbs, join(e.Ports), e.NetnsPath,
			e.Created.UTC().Format(time.RFC3339), labelsText(e.Labels), faultsText(e.Faults))...)
	}
	return t.writeTo(out)
}

// stackText says what runs an endpoint's TCP, and by which profile.
func stackText(s *api.EndpointStack) string {
	switch {
	case s == nil:
		return ""
	case s.Stack == "":
		return "refused (" + s.Profile + ")"
	case !s.Intercepted && s.Own != nil && len(s.Own.Lacks) > 0:
		return string(s.Stack) + " (" + s.Profile + ", in part)"
	}
	return string(s.Stack) + " (" + s.Profile + ")"
}

// faultsText gives the reasons of faults.
func faultsText(list []api.Fault) string {
	var reasons []string
	for _, f := range list {
		reasons = append(reasons, string(f.Reason))
	}
	return strings.Join(reasons, ",")
}

// printTraffic is printEndpoints for --stats.
func printTraffic(out io.Writer, list []endpointTraffic, withNode bool) error {
	t := newTable(nodeColumn(withNode, "NODE", "NAME", "OPENED", "ACCEPTED", "REFUSED", "TIMED-OUT", "FAILED", "CLOSED", "BROKEN",
		"LIVE", "SENT", "RECEIVED", "RETRANSMITS")...)
	for _, e := range list {
		var tr model.Traffic
		if e.Traffic != nil {
			tr = *e.Traffic
		}
		cells := []string{e.Name}
		for _, n := range []uint64{tr.Opened, tr.Accepted, tr.Refused, tr.TimedOut, tr.Failed, tr.Closed, tr.Broken} {
			cells = append(cells, fmt.Sprint(n))
		}
		cells = append(cells, livePaths(tr), byteCount(tr.BytesSent), byteCount(tr.BytesReceived), fmt.Sprint(tr.Retransmits))
		t.row(nodeColumn(withNode, e.Node, cells...)...)
	}
	return t.writeTo(out)
}

// printContainerConnections prints what ss would in the container: the program's addresses only.
func printContainerConnections(out io.Writer, list []nodeConnection) error {
	t := newTable("STATE", "RECV-Q", "SEND-Q", "LOCAL", "PEER", "PATH", "SENT", "RECEIVED")
	for _, c := range list {
		peer := addrPort(c.Remote)
		if c.Path == model.PathListen {
			peer = "0.0.0.0:*"
			if c.Local.Addr().Is6() {
				peer = "[::]:*"
			}
		}
		t.row(c.State, fmt.Sprint(c.ReceiveQueue), fmt.Sprint(c.SendQueue), addrPort(c.Local), peer, string(c.Path),
			byteCount(c.BytesSent), byteCount(c.BytesReceived))
	}
	return t.writeTo(out)
}

func printConnections(out io.Writer, list []nodeConnection, withNode bool) error {
	t := newTable(nodeColumn(withNode, "NODE", "ENDPOINT", "STATE", "LOCAL", "REMOTE", "NODE-LOCAL", "NODE-REMOTE", "PATH",
		"REASON", "SENT", "RECEIVED")...)
	for _, c := range list {
		t.row(nodeColumn(withNode, c.Node, c.Name, c.State, addrPort(c.Local), addrPort(c.Remote), addrPort(c.NodeLocal),
			addrPort(c.NodeRemote), string(c.Path), c.Reason, byteCount(c.BytesSent), byteCount(c.BytesReceived))...)
	}
	return t.writeTo(out)
}

// nodeColumn gives the cells of a row with or without the one for the node.
func nodeColumn(withNode bool, node string, cells ...string) []string {
	if withNode {
		return append([]string{node}, cells...)
	}
	return cells
}

func printChecks(out io.Writer, checks []api.Check) error {
	t := newTable("STATUS", "CHECK", "FOUND")
	count := map[api.CheckStatus]int{}
	var lacking strings.Builder
	for _, c := range checks {
		t.row(string(c.Status), c.Name, c.Detail)
		count[c.Status]++
		if c.Status != api.CheckOK {
			fmt.Fprintf(&lacking, "%s is %s: %s\n  cost:   %s\n  remedy: %s\n\n", c.Name, c.Status, c.Detail, c.Cost, c.Remedy)
		}
	}
	if err := t.writeTo(out); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s%d checks: %d ok, %d degraded, %d missing\n", lacking.String(), len(checks),
		count[api.CheckOK], count[api.CheckDegraded], count[api.CheckMissing])
	return err
}

// addrPort gives "" for the zero address, which a listener's remote one is.
func addrPort(ap netip.AddrPort) string {
	if !ap.IsValid() {
		return ""
	}
	return ap.String()
}

func join[T fmt.Stringer](list []T) string {
	parts := make([]string, len(list))
	for i, v := range list {
		parts[i] = v.String()
	}
	return strings.Join(parts, ",")
}

// byteCount gives n in the largest binary unit that leaves at least one of it: "512B", "1.5KiB".
func byteCount(n uint64) string {
	const step = 1024
	if n < step {
		return fmt.Sprintf("%dB", n)
	}
	v, unit := float64(n)/step, 0
	units := []string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	// 1023.95 would be printed as 1024.0.
	for v >= step-0.05 && unit < len(units)-1 {
		v, unit = v/step, unit+1
	}
	return fmt.Sprintf("%.1f%s", v, units[unit])
}

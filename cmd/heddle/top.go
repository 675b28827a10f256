package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// topFlags are those of `heddle top`.
type topFlags struct {
	agentFlags
	interval time.Duration
	rows     int
}

func newTopCmd() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the busiest connections, containers and nodes",
		Long: `Shows what went over connections, containers and nodes within an interval, the busiest first: on a terminal
again and again until it is interrupted, else once. A connection that both ends are asked about is one row. What opened
and ended within the interval is in the rows of containers and nodes alone.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.interval < minTopInterval || f.interval > time.Hour {
				return fmt.Errorf("--interval %s: want %s to 1h", f.interval, minTopInterval)
			}
			if f.rows < 1 {
				return fmt.Errorf("--rows %d: want at least 1", f.rows)
			}
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			return f.run(cmd.Context(), from, cmd.OutOrStdout())
		},
	}
	f.registerReading(cmd)
	cmd.Flags().DurationVar(&f.interval, "interval", time.Second, "how long is compared")
	cmd.Flags().IntVarP(&f.rows, "rows", "n", 10, "how many rows of each kind")
	return cmd
}

// minTopInterval keeps the question from being most of the traffic.
const minTopInterval = 100 * time.Millisecond

// run shows one difference after the other, or one.
func (f *topFlags) run(ctx context.Context, from agents, out io.Writer) error {
	again := false
	if file, ok := out.(*os.File); ok && f.output == tableOutput {
		_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		again = err == nil
	}
	before, silent := takeSample(ctx, from, nil)
	if silent != nil && len(before.nodes) == 0 {
		return silent
	}
	if !again {
		from.clients = before.answered // the others have been waited for
	} else if silent != nil {
		if _, err := fmt.Fprintf(out, "\x1b[H\x1b[J%v\n", silent); err != nil {
			return err
		}
	}
	tick := time.NewTicker(f.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil // interrupted, as it should be
		case <-tick.C:
		}
		now, err := takeSample(ctx, from, before)
		if ctx.Err() != nil {
			return nil // interrupted in the middle of the question
		}
		if err != nil && len(now.nodes) == 0 {
			return err
		}
		load := now.since(before)
		var text strings.Builder
		if f.output == jsonOutput {
			return errors.Join(printJSON(out, load), silent, err)
		}
		if err := printLoad(&text, load, f.rows); err != nil {
			return err
		}
		if !again {
			_, errWrite := io.WriteString(out, text.String())
			return errors.Join(errWrite, silent, err)
		}
		if err != nil {
			fmt.Fprintf(&text, "\n%v\n", err)
		}
		// From the top left corner on, each line to its end, and what is below.
		if _, err := fmt.Fprint(out, "\x1b[H"+strings.ReplaceAll(text.String(), "\n", "\x1b[K\n")+"\x1b[J"); err != nil {
			return err
		}
		before = now
	}
}

// What a sample holds does not grow with the network: of so many ends of connections it is
// remembered what they had carried, some 50 bytes each, and so many of the busiest are listed.
const (
	maxTopCompared = 1 << 20
	maxTopListed   = 10000
)

var topSeed = maphash.MakeSeed()

// sample is what was counted at a moment, beside what was counted at the one before.
type sample struct {
	at         time.Time
	names      map[netip.Addr]string
	carried    map[uint64]carried // by a hash of both ends, the one that says it first
	busiest    []topConnection    // with what they carried since the sample before
	leftOut    uint64
	containers map[string]topRow // by node and name
	nodes      map[string]topRow
	answered   []*api.Client
}

// carried is what one end of a connection says.
type carried struct {
	sent, received uint64
	retransmits    uint32
}

func newSample() *sample {
	return &sample{names: make(map[netip.Addr]string), carried: make(map[uint64]carried), containers: make(map[string]topRow), nodes: make(map[string]topRow)}
}

// topRow is what something carried; in a load, a second.
type topRow struct {
	Node          string `json:"node"`
	Name          string `json:"name,omitempty"`
	Live          uint64 `json:"live"`
	Opened        uint64 `json:"opened"`
	BytesSent     uint64 `json:"bytes_sent"`
	BytesReceived uint64 `json:"bytes_received"`
	Retransmits   uint64 `json:"retransmits"`
}

func (r topRow) bytes() uint64 { return r.BytesSent + r.BytesReceived }

// topConnection is a connection as one of its ends has it.
type topConnection struct {
	topRow
	Local  netip.AddrPort `json:"local"`
	Remote netip.AddrPort `json:"remote"`
	Peer   string         `json:"peer,omitempty"` // the name of the other end
	Path   model.Path     `json:"path"`
}

// load is the difference of two samples, a second; the busiest first.
type load struct {
	Connections []topConnection `json:"connections"`
	Containers  []topRow        `json:"containers"`
	Nodes       []topRow        `json:"nodes"`
	// LeftOut are connections that were not looked at, as there are too many.
	LeftOut uint64 `json:"left_out"`
}

// takeSample asks agents, and compares with the sample before, if there is one. After an error what
// it gives is right, and not all.
func takeSample(ctx context.Context, from agents, before *sample) (*sample, error) {
	var mu sync.Mutex // guards s
	s := newSample()
	_, err := ask(ctx, from, func(ctx context.Context, c *api.Client) (none struct{}, err error) {
		st, err := c.Status(ctx)
		if err != nil {
			return none, err
		}
		endpoints, errEndpoints := c.Endpoints(ctx)
		connections, errConnections := c.Connections(ctx, api.ConnectionFilter{})
		traffic, errTraffic := c.Traffic(ctx)
		if err := errors.Join(errEndpoints, errConnections, errTraffic); err != nil {
			return none, err
		}
		mu.Lock()
		defer mu.Unlock()
		s.answered = append(s.answered, c)
		for _, e := range endpoints {
			for _, addr := range e.Addrs {
				s.names[addr] = e.Name
			}
		}
		for i := range connections {
			s.addConnection(st.Node.Name, &connections[i], before)
		}
		s.addTraffic(st.Node.Name, traffic)
		return none, nil
	})
	s.at = time.Now()
	return s, err
}

// addTraffic adds what a node's containers have carried.
func (s *sample) addTraffic(node string, traffic []model.Traffic) {
	sum := topRow{Node: node}
	for _, t := range traffic {
		row := topRow{node, t.Name, t.LiveTotal(), t.Opened + t.Accepted, t.BytesSent, t.BytesReceived, t.Retransmits}
		s.containers[node+" "+t.Name] = row
		sum.Live, sum.Opened, sum.Retransmits = sum.Live+row.Live, sum.Opened+row.Opened, sum.Retransmits+row.Retransmits
		sum.BytesSent, sum.BytesReceived = sum.BytesSent+row.BytesSent, sum.BytesReceived+row.BytesReceived
	}
	s.nodes[node] = sum
}

// addConnection adds one as one of its ends has it.
func (s *sample) addConnection(node string, c *model.Connection, before *sample) {
	if len(s.carried) >= maxTopCompared {
		s.leftOut++
		return
	}
	key := maphash.Comparable(topSeed, [2]netip.AddrPort{c.Local, c.Remote})
	s.carried[key] = carried{c.BytesSent, c.BytesReceived, c.Retransmits}
	if before == nil {
		return
	}
	then, there := before.carried[key]
	if !there { // its other end may have been
		other := before.carried[maphash.Comparable(topSeed, [2]netip.AddrPort{c.Remote, c.Local})]
		then = carried{sent: other.received, received: other.sent}
	}
	s.busiest = append(s.busiest, topConnection{
		topRow{Node: node, Name: c.Name, Live: 1, BytesSent: c.BytesSent - min(c.BytesSent, then.sent), BytesReceived: c.BytesReceived - min(c.BytesReceived, then.received),
			Retransmits: uint64(c.Retransmits - min(c.Retransmits, then.retransmits))}, c.Local, c.Remote, "", c.Path})
	if len(s.busiest) >= 4*maxTopListed {
		s.prune()
	}
}

// prune leaves the busiest connections, each as the end with the lower address has it.
func (s *sample) prune() {
	slices.SortFunc(s.busiest, func(a, b topConnection) int {
		return cmp.Or(busier(a.topRow, b.topRow), a.Local.Compare(b.Local), a.Remote.Compare(b.Remote))
	})
	lower := make(map[[2]netip.AddrPort]bool, len(s.busiest))
	for _, c := range s.busiest {
		if c.Local.Compare(c.Remote) < 0 {
			lower[[2]netip.AddrPort{c.Local, c.Remote}] = true
		}
	}
	s.busiest = slices.DeleteFunc(s.busiest, func(c topConnection) bool {
		return c.Remote.Compare(c.Local) < 0 && lower[[2]netip.AddrPort{c.Remote, c.Local}]
	})
	s.busiest = s.busiest[:min(len(s.busiest), maxTopListed)]
}

// busier sorts what carried most first.
func busier(a, b topRow) int {
	return cmp.Or(cmp.Compare(b.bytes(), a.bytes()), cmp.Compare(b.Opened, a.Opened), cmp.Compare(b.Live, a.Live), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name))
}

// since gives what came since the sample before, which s was compared with, a second. What was not
// there then counts from 0.
func (s *sample) since(before *sample) load {
	l := load{Connections: []topConnection{}, Containers: []topRow{}, Nodes: []topRow{}, LeftOut: s.leftOut} // in JSON no null
	seconds := s.at.Sub(before.at).Seconds()
	rate := func(now, then topRow) topRow {
		per := func(n, m uint64) uint64 { return uint64(float64(n-min(n, m)) / seconds) }
		now.BytesSent, now.BytesReceived = per(now.BytesSent, then.BytesSent), per(now.BytesReceived, then.BytesReceived)
		now.Opened, now.Retransmits = per(now.Opened, then.Opened), per(now.Retransmits, then.Retransmits)
		return now
	}
	s.prune()
	for _, c := range s.busiest {
		c.topRow, c.Peer = rate(c.topRow, topRow{}), s.names[c.Remote.Addr()]
		l.Connections = append(l.Connections, c)
	}
	s.busiest = nil
	for key, row := range s.containers {
		l.Containers = append(l.Containers, rate(row, before.containers[key]))
	}
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		l.Nodes = append(l.Nodes, rate(s.nodes[name], before.nodes[name]))
	}
	slices.SortFunc(l.Containers, busier)
	slices.SortFunc(l.Nodes, busier)
	return l
}

// printLoad prints the first rows of each kind.
func printLoad(out io.Writer, l load, rows int) error {
	perSecond := func(n uint64) string { return byteCount(n) + "/s" }
	nodes := newTable("NODE", "LIVE", "OPENED/S", "SENT", "RECEIVED", "RETRANSMITS/S")
	for _, r := range l.Nodes[:min(rows, len(l.Nodes))] {
		nodes.row(r.Node, fmt.Sprint(r.Live), fmt.Sprint(r.Opened), perSecond(r.BytesSent), perSecond(r.BytesReceived), fmt.Sprint(r.Retransmits))
	}
	containers := newTable("CONTAINER", "NODE", "LIVE", "OPENED/S", "SENT", "RECEIVED", "RETRANSMITS/S")
	for _, r := range l.Containers[:min(rows, len(l.Containers))] {
		containers.row(r.Name, r.Node, fmt.Sprint(r.Live), fmt.Sprint(r.Opened), perSecond(r.BytesSent), perSecond(r.BytesReceived), fmt.Sprint(r.Retransmits))
	}
	connections := newTable("CONNECTION", "WITH", "PATH", "SENT", "RECEIVED")
	for _, c := range l.Connections[:min(rows, len(l.Connections))] {
		with := c.Remote.String()
		if c.Peer != "" {
			with = fmt.Sprintf("%s:%d", c.Peer, c.Remote.Port())
		}
		connections.row(fmt.Sprintf("%s:%d", c.Name, c.Local.Port()), with, string(c.Path), perSecond(c.BytesSent), perSecond(c.BytesReceived))
	}
	for i, t := range []*table{nodes, containers, connections} {
		if i > 0 {
			if _, err := fmt.Fprintln(out); err != nil {
				return err
			}
		}
		if err := t.writeTo(out); err != nil {
			return err
		}
	}
	if l.LeftOut > 0 {
		_, err := fmt.Fprintf(out, "\n%d more were not compared: of %d ends of connections it is, at most; ask fewer nodes\n", l.LeftOut, maxTopCompared)
		return err
	}
	return nil
}

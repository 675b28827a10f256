package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// nodeRDMA is what a node has of the verbs plane.
type nodeRDMA struct {
	Node string `json:"node"`
	api.RDMA
}

func newRDMACmd() *cobra.Command {
	var (
		f  agentFlags
		of string
	)
	cmd := &cobra.Command{
		Use:   "rdma",
		Short: "List the RDMA devices of a node's containers, and their queue pairs",
		Long: `Lists the RDMA devices of a node's containers, with what they have of what they may have, and their queue pairs with
both ends. PATH is memory (copied on the node), tcp (a connection of the container's, to port 4791) or card; MESSAGES are
those that were done as requester, and as responder or receiver. Counts begin anew when the router ends. With --output json:
a list with a member for each node.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			endpoint := ""
			if of != "" {
				c, err := findContainer(cmd.Context(), from, of)
				if err != nil {
					return err
				}
				from.clients, endpoint = []*api.Client{c.agent}, c.endpoint.Name
			}
			list, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) (nodeRDMA, error) {
				st, err := c.Status(ctx)
				if err != nil {
					return nodeRDMA{}, err
				}
				state, err := c.RDMA(ctx)
				return nodeRDMA{st.Node.Name, state.Of(endpoint)}, err
			})
			return printAnswers(cmd, f.output, list, err, printRDMA)
		},
	}
	f.registerReading(cmd)
	cmd.Flags().StringVar(&of, "container", "", onlyContainer)
	return cmd
}

// printRDMA prints a line for each router, and a table each of devices and queue pairs.
func printRDMA(out io.Writer, list []nodeRDMA) error {
	routers, devices := newTable("NODE", "ROUTER"), newTable("ENDPOINT", "GID", "SPIN", "QPS", "CQS", "MRS", "SHARED", "COPIED", "BY-TCP", "BY-CARD", "ERRORS")
	pairs := newTable("ENDPOINT", "QPN", "PID", "TYPE", "STATE", "LOCAL", "PEER", "PATH", "MESSAGES", "SENT", "RECEIVED", "ERRORS")
	ids := newTable("ENDPOINT", "CM-ID", "PID", "SPACE", "STATE", "LOCAL", "PEER", "QPN")
	qps, cmIDs := 0, 0
	for _, n := range list {
		router := "no verbs plane"
		if n.Router != nil {
			router = routerText(*n.Router)
		}
		routers.row(n.Node, router)
		for _, d := range n.Devices {
			devices.row(deviceCells(d)...)
		}
		slices.SortFunc(n.QueuePairs, func(a, b api.QueuePair) int {
			return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Number, b.Number))
		})
		for _, q := range n.QueuePairs {
			qps++
			pairs.row(pairCells(q)...)
		}
		slices.SortFunc(n.CMIDs, func(a, b api.CMID) int {
			return cmp.Or(cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.PID, b.PID), cmp.Compare(a.ID, b.ID))
		})
		for _, id := range n.CMIDs {
			cmIDs++
			ids.row(idCells(id)...)
		}
	}
	tables := []*table{routers, devices}
	if qps > 0 {
		tables = append(tables, pairs)
	}
	if cmIDs > 0 {
		tables = append(tables, ids)
	}
	for i, t := range tables {
		if i > 0 {
			if _, err := fmt.Fprintln(out); err != nil {
				return err
			}
		}
		if err := t.writeTo(out); err != nil {
			return err
		}
	}
	return nil
}

func idCells(id api.CMID) []string {
	end := func(a netip.AddrPort) string {
		if !a.IsValid() {
			return ""
		}
		return a.String()
	}
	qpn := ""
	if id.QPN != 0 {
		qpn = strconv.FormatUint(uint64(id.QPN), 10)
	}
	return []string{id.Endpoint, strconv.FormatUint(uint64(id.ID), 10), strconv.Itoa(id.PID), id.Space, id.State, end(id.Local), end(id.Peer), qpn}
}

func deviceCells(d api.RDMADevice) []string {
	gid := ""
	if len(d.GIDs) > 0 {
		gid = d.GIDs[0].String()
	}
	cells := []string{d.Endpoint, gid, strconv.FormatUint(uint64(d.SpinMicros), 10)}
	if !d.Known {
		return append(cells, "the router does not have it: heddle status")
	}
	of := func(what string, text func(uint64) string) string {
		return text(d.Used[what]) + "/" + text(d.Limits[what])
	}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	moved := func(p api.RDMAPath) string {
		t := d.Traffic[p]
		return byteCount(t.BytesSent) + "/" + byteCount(t.BytesReceived)
	}
	return append(cells, of("qps", number), of("cqs", number), of("mrs", number), of("memory_bytes", byteCount),
		moved(api.RDMAMemory), moved(api.RDMATCP), moved(api.RDMACard), number(d.Errors))
}

func pairCells(q api.QueuePair) []string {
	peer, errs := "", strconv.FormatUint(q.Errors, 10)
	if q.Peer.IsValid() {
		peer = fmt.Sprintf("%s qpn %d", q.Peer, q.PeerNumber)
	}
	if q.LastError != "" {
		errs += " " + q.LastError
	}
	return []string{q.Endpoint, strconv.FormatUint(uint64(q.Number), 10), strconv.Itoa(q.PID), q.Type, q.State, q.Local.String(), peer, string(q.Path),
		fmt.Sprintf("%d/%d", q.Requests, q.Served), byteCount(q.BytesSent), byteCount(q.BytesReceived), errs}
}

// verbsLimitsText says which quotas of RDMA an endpoint has of its own.
func verbsLimitsText(l model.VerbsLimits) string {
	text := ""
	for _, q := range []struct {
		name string
		n    uint32
	}{{"qps", l.QPs}, {"cqs", l.CQs}, {"mrs", l.MRs}, {"MiB", l.MemoryMiB}, {"messages/s", l.Messages}} {
		if q.n > 0 {
			if text != "" {
				text += ","
			}
			text += fmt.Sprintf("%s=%d", q.name, q.n)
		}
	}
	return text
}

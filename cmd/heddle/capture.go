package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/capture"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
)

// captureFlags say what to capture, and where to.
type captureFlags struct {
	api, lab, node string
	file           string
	peer           string
	duration       time.Duration
	all            bool
	options        capture.Options
}

func newCaptureCmd() *cobra.Command {
	var f captureFlags
	cmd := &cobra.Command{
		Use:   "capture CONTAINER",
		Short: "Write a container's packets to a pcap file, with overlay addresses",
		Long: `Writes the TCP packets of one container (its endpoint's name, address or id) as the container would have seen them:
with overlay addresses, on whichever path they travelled, with right checksums, without Heddle's option in the SYN.
The file is a pcap with times in nanoseconds, for tcpdump -r and Wireshark. -w - writes to standard output:

    heddle capture n1/c1 | tcpdump -nr -

Needs root. Runs until it is interrupted, or --count or --duration is reached; the file is complete then. At the
end it prints how many packets were captured, how many the kernel dropped because the capture was behind, and how
many belong to connections that the agent does not know: the node's own, or over before it could be asked.`,
		Args:         cobra.ExactArgs(1),
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd.Context(), args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.api, "api", "", fmt.Sprintf("the agent's socket (default %s, or those of the lab that is up)", api.DefaultSocket))
	flags.StringVar(&f.lab, "lab", "", "look for the container in this lab")
	flags.StringVar(&f.node, "node", "", "look for the container on this lab node")
	flags.StringVarP(&f.file, "write", "w", "-", "file to write; - is standard output")
	flags.Uint64VarP(&f.options.Count, "count", "c", 0, "end after so many packets")
	flags.DurationVar(&f.duration, "duration", 0, "end after this time")
	flags.IntVarP(&f.options.SnapLen, "snaplen", "s", capture.MaxSnapLen, "cut longer packets, in bytes")
	flags.Uint16Var(&f.options.Port, "port", 0, "only packets with this port at either end, as the container sees it")
	flags.StringVar(&f.peer, "peer", "", "only packets to or from this address or prefix, as the container sees it")
	flags.BoolVar(&f.all, "all", false, "UDP, ICMP and the rest, too")
	flags.BoolVar(&f.options.KeepOption, "keep-option", false, "leave Heddle's option in the SYN")
	return cmd
}

// parsePeer reads --peer.
func parsePeer(s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("--peer %s: want an address or a prefix", s)
	}
	return p, nil
}

func (f captureFlags) run(ctx context.Context, what string, stdout, stderr io.Writer) (err error) {
	if f.options.Peer, err = parsePeer(f.peer); err != nil {
		return err
	}
	if f.duration < 0 {
		return fmt.Errorf("--duration %s: want a time that is not negative", f.duration)
	}
	if n := f.options.SnapLen; n < 1 || n > capture.MaxSnapLen {
		return fmt.Errorf("--snaplen %d: want 1 to %d", n, capture.MaxSnapLen)
	}
	from, err := agentFlags{api: f.api, lab: f.lab, node: f.node}.find()
	if err != nil {
		return err
	}
	c, err := findContainer(ctx, from, what)
	if err != nil {
		return err
	}
	src, err := listenOnNode(ctx, c, f.all)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	out, name, err := f.open(stdout)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	f.options.Endpoint = c.endpoint
	f.options.Ask = func(ctx context.Context) ([]model.Connection, error) {
		return c.agent.Connections(ctx, api.ConnectionFilter{Endpoint: c.endpoint.Name})
	}
	if f.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.duration)
		defer cancel()
	}
	f.options.Begun = func() {
		fmt.Fprintf(stderr, "capturing %s (%s) on node %s to %s\n", c.endpoint.Name, join(c.endpoint.Addrs), c.endpoint.Node, name)
	}
	counts, err := capture.Run(ctx, src, out, f.options)
	fmt.Fprintf(stderr, "%d packets captured, %d dropped by the kernel, %d unmatched, %d malformed\n", counts.Captured, counts.Dropped,
		counts.Unmatched, counts.Malformed)
	return err
}

// listenOnNode opens a packet socket in the network namespace of the container's node: that of its
// agent.
func listenOnNode(ctx context.Context, c container, all bool) (*capture.Source, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("capture packets: needs root")
	}
	st, err := c.agent.Status(ctx)
	if err != nil {
		return nil, err
	}
	var src *capture.Source
	err = netns.Do(fmt.Sprintf("/proc/%d/ns/net", st.PID), func() error {
		src, err = capture.Listen(all)
		return err
	})
	return src, err
}

// open opens what -w names.
func (f captureFlags) open(stdout io.Writer) (out io.WriteCloser, name string, err error) {
	if f.file == "-" {
		if file, ok := stdout.(*os.File); ok {
			if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err == nil {
				return nil, "", errors.New("a pcap is not for a terminal: give -w FILE, or pipe it: heddle capture CONTAINER | tcpdump -nr -")
			}
		}
		return keepOpen{stdout}, "standard output", nil
	}
	// Packets are the container's own business: for root alone.
	file, err := os.OpenFile(f.file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, "", fmt.Errorf("-w: %w", err)
	}
	return file, f.file, nil
}

// keepOpen is a writer that is somebody else's to close.
type keepOpen struct{ io.Writer }

// Close implements io.Closer.
func (keepOpen) Close() error { return nil }

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// newEncryptionCmd shows how nodes encrypt, and has them change their keys.
func newEncryptionCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "encryption",
		Short: "Show how a node encrypts what it sends to others",
		Long: "Shows the keys of a node that encrypts (heddled --encrypt wireguard), and of each other node the key that is accepted, the last " +
			"handshake, the bytes exchanged, and the state: encrypted, idle (the next packet makes a session), no_handshake (there was none " +
			"yet), or left_out, with the reason: nothing is sent to such a node. With --output json: a list with one entry for each agent asked.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.find()
			if err != nil {
				return err
			}
			list, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) (nodeEncryption, error) {
				st, err := c.Status(ctx)
				if st.Encryption == nil {
					st.Encryption = &api.Encryption{}
				}
				return nodeEncryption{st.Node.Name, *st.Encryption}, err
			})
			if f.output == jsonOutput {
				return errors.Join(printJSON(cmd.OutOrStdout(), list), err)
			}
			for _, e := range list {
				err = errors.Join(err, printEncryption(cmd.OutOrStdout(), e, time.Now()))
			}
			return err
		},
	}
	f.register(cmd)
	cmd.AddCommand(newRotateCmd())
	return cmd
}

func newRotateCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Have a node take another key",
		Long: "Makes another key on the node and tells the other nodes of it. When they accept it, which takes some seconds, the node uses it " +
			"and forgets the old one. Connections go on. `heddle encryption` says when it is done, and which node it waits for if that takes longer.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				e, err := c.RotateKey(ctx)
				if err != nil {
					return err
				}
				if f.output == jsonOutput {
					return printJSON(cmd.OutOrStdout(), e)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "the next key is %s; in use is %s\n", e.Next, e.Key)
				return err
			})
		},
	}
	f.register(cmd)
	return cmd
}

// nodeEncryption is what an agent says of encryption.
type nodeEncryption struct {
	Node string `json:"node"`
	api.Encryption
}

// encryptionText sums up how a node encrypts; nil: neither it nor another does.
func encryptionText(e *api.Encryption) string {
	if e == nil {
		return "none: whoever can read the underlay reads what nodes send each other"
	}
	count := make(map[api.EncryptedPeerState]int)
	var left []string
	for _, p := range e.Peers {
		count[p.State]++
		if p.State == api.PeerLeftOut {
			left = append(left, fmt.Sprintf("%s (%s)", p.Node, p.Reason))
		}
	}
	text := "none"
	if e.Enabled {
		text = fmt.Sprintf("%s at %s, key %s; peers: %d encrypted, %d idle, %d without a handshake", e.Device, e.Endpoint, e.Key,
			count[api.PeerEncrypted], count[api.PeerIdle], count[api.PeerNoHandshake])
	}
	if !e.Next.IsZero() {
		text += "; key changes to " + e.Next.String()
		if len(e.Waits) > 0 {
			text += " when all accept it and send by it, waits for " + strings.Join(e.Waits, " ")
		}
	}
	if e.Clear > 0 {
		text += fmt.Sprintf("; IN THE CLEAR: %d direct connections from before", e.Clear)
	}
	if len(left) > 0 {
		text += "; LEFT OUT: " + strings.Join(left, ", ")
	}
	return text
}

// encryptedRows are lines for peers, some of them if there are many: `heddle encryption` has all.
func encryptedRows(e *api.Encryption, now time.Time) (rows []string) {
	if e == nil {
		return nil
	}
	for _, p := range e.Peers {
		if p.State != api.PeerLeftOut && len(rows) < shownPaths {
			rows = append(rows, encryptedPeerText(p, now))
		}
	}
	return rows
}

// encryptedPeerText says how it is with a peer that is not left out.
func encryptedPeerText(p api.EncryptedPeer, now time.Time) string {
	handshake := "no handshake yet"
	if !p.Handshake.IsZero() {
		handshake = fmt.Sprintf("handshake %s ago", now.Sub(p.Handshake).Round(time.Second))
	}
	return fmt.Sprintf("%s %s, key %s, %s, %s sent, %s received", p.Node, p.State, p.Key, handshake, byteCount(p.Sent), byteCount(p.Received))
}

func printEncryption(out io.Writer, e nodeEncryption, now time.Time) error {
	if _, err := fmt.Fprintf(out, "%s: %s\n", e.Node, encryptionText(&e.Encryption)); err != nil {
		return err
	}
	t := newTable("PEER", "STATE", "INNER", "ENDPOINT", "KEY", "HANDSHAKE", "SENT", "RECEIVED")
	for _, p := range e.Peers {
		if p.State == api.PeerLeftOut {
			t.row(p.Node, string(p.State)+": "+leftOutText(p.Reason))
			continue
		}
		handshake := "none"
		if !p.Handshake.IsZero() {
			handshake = now.Sub(p.Handshake).Round(time.Second).String() + " ago"
		}
		t.row(p.Node, string(p.State), p.Inner.String(), p.Endpoint.String(), p.Key.String(), handshake, byteCount(p.Sent), byteCount(p.Received))
	}
	if len(e.Peers) == 0 {
		return nil
	}
	return t.writeTo(out)
}

// leftOutText says why nothing is sent to a node, and what to do.
func leftOutText(why model.PlainReason) string {
	switch why {
	case model.PeerPlain:
		return "it does not encrypt: start its agent with --encrypt wireguard"
	case model.SelfPlain:
		return "it encrypts: start this agent with --encrypt wireguard, too"
	case model.OtherPrefix:
		return "its inner addresses are others: give all nodes the same --encrypt-prefix (or, without encryption, --inner-prefix)"
	case model.PeerFamily:
		return "its underlay address is IPv4, this node's IPv6: give all nodes' agents an --underlay of one family"
	case model.SelfFamily:
		return "its underlay address is IPv6, this node's IPv4: give all nodes' agents an --underlay of one family"
	case model.SameKey:
		return "another node has its key: a state directory was copied; remove wireguard.key there and restart its agent"
	case model.SameEndpoint:
		return "another node is at its address and port"
	}
	return string(why)
}

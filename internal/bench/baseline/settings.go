package baseline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netns"
)

// Way is how a client's packets begin: from a network namespace, on a node, to an address.
type Way struct {
	Scope  bench.Scope
	Client string // path of the client's network namespace
	Node   string // path of its node's
	To     netip.Addr
}

// Describe says how a mode is set up: devices, their MTU and offloads, rules and tracked
// connections.
func Describe(ctx context.Context, ways []Way) (lines []string, err error) {
	for _, w := range ways {
		out, err := run(ctx, in(w.Client, "ip", "-o", "route", "get", w.To.String())...)
		if err != nil {
			return nil, err
		}
		device := wordAfter(out, "dev")
		link, err := run(ctx, in(w.Client, "ip", "-o", "link", "show", "dev", device)...)
		if err != nil {
			return nil, err
		}
		mtu := wordAfter(link, "mtu")
		if of := wordAfter(out, "mtu"); of != "" {
			mtu += " (route " + of + ")"
		}
		var offloads, control string
		err = netns.Do(w.Client, func() (err error) {
			offloads, err = readOffloads(device)
			raw, readErr := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
			control = strings.TrimSpace(string(raw))
			return errors.Join(err, readErr)
		})
		if err != nil {
			return nil, err
		}
		lines = append(lines, fmt.Sprintf("%s: device %s, MTU %s, %s; %s", w.Scope.Title(), device, mtu, offloads, control))
	}
	if len(ways) == 0 {
		return nil, nil
	}
	rules, err := describeNode(ctx, ways[0].Node)
	return append(lines, rules), err
}

// describeNode says how many rules packets may meet in a node's namespace, and how many connections
// it tracks.
func describeNode(ctx context.Context, node string) (string, error) {
	out, err := run(ctx, in(node, "nft", "-j", "list", "ruleset")...)
	if err != nil {
		return "", err
	}
	rules, err := countRules(out)
	if err != nil {
		return "", err
	}
	tracked := "not there"
	err = netns.Do(node, func() error {
		raw, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err == nil {
			tracked = strings.TrimSpace(string(raw))
		}
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
	return fmt.Sprintf("the node's namespace: %d netfilter rules (nftables, iptables' included), connections tracked after the run: %s", rules, tracked), err
}

// countRules counts the rules in what `nft -j list ruleset` prints.
func countRules(listing string) (n int, err error) {
	var ruleset struct {
		Nftables []map[string]json.RawMessage `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(listing), &ruleset); err != nil {
		return 0, fmt.Errorf("read nftables rules: %w", err)
	}
	for _, object := range ruleset.Nftables {
		if _, is := object["rule"]; is {
			n++
		}
	}
	return n, nil
}

// wordAfter gives the word after a word of a text; "" if it is not there.
func wordAfter(text, word string) string {
	words := strings.Fields(text)
	for i, w := range words[:max(0, len(words)-1)] {
		if w == word {
			return words[i+1]
		}
	}
	return ""
}

// readOffloads says which offloads a device of the calling thread's network namespace has on.
func readOffloads(device string) (string, error) {
	on, off, err := netcfg.Offloads(device)
	if err != nil {
		return "", err
	}
	text := strings.Join(on, " ") + " on"
	if len(off) > 0 {
		text += ", " + strings.Join(off, " ") + " off"
	}
	return strings.TrimSpace(text), nil
}

// Describe says how a baseline is set up and, for the BPF data path, that it carried what was
// measured: an error if not.
func (s *Site) Describe(ctx context.Context, mode bench.Mode) ([]string, error) {
	switch of := s.Places[mode].(type) {
	case bare:
		return of.describe(ctx)
	case floor:
		return []string{"servers and sockets are those of host"}, nil
	case nativeLab:
		return of.describe(ctx)
	case *docker:
		return s.describeDocker(ctx)
	}
	said, err := s.bpf.check()
	if err != nil {
		return nil, err
	}
	client, err := s.bpf.find(mode, "n1/c1")
	if err != nil {
		return nil, err
	}
	var ways []Way
	for _, to := range []struct {
		scope     bench.Scope
		container string
	}{{bench.Inter, "n2/c1"}, {bench.Intra, "n1/c2"}} {
		if a, err := s.bpf.IP(ctx, mode, to.container); err == nil { // on one node there is one variant
			ways = append(ways, Way{to.scope, netns.Path(client.netns), s.bpf.hosts[0].Netns, a})
		}
	}
	lines, err := Describe(ctx, ways)
	return append([]string{s.bpf.settings(), said}, lines...), err
}

func (s *Site) describeDocker(ctx context.Context) ([]string, error) {
	d := s.docker
	lines, err := d.settings(ctx)
	if err != nil {
		return nil, err
	}
	pid, err := d.pid(ctx, 0, "c1")
	if err != nil {
		return nil, err
	}
	client := "/proc/" + pid + "/ns/net"
	more, err := Describe(ctx, []Way{
		{bench.Inter, client, d.hosts[0].Netns, d.addresses["n2/c1"]}, {bench.Intra, client, d.hosts[0].Netns, d.addresses["n1/c2"]},
	})
	return append(lines, more...), err
}

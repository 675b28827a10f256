package firewall

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// legacyTables are where a network namespace lists the tables of iptables that are none of
// nftables.
var legacyTables = []string{"/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"}

// inetIngress is NF_INET_INGRESS, a device's in a table of all IP, which the library does not name.
const inetIngress nftables.ChainHook = 5

// ForwardRules names the first chain of this network namespace, none of Heddle's, that may let
// packets which are forwarded not pass: "" if there is none. Such chains see no packet that goes
// past the node's stack. Chains that translate do not count: what they translate is not redirected.
func ForwardRules() (string, error) {
	return foreignRules(nil, *nftables.ChainHookPrerouting, *nftables.ChainHookForward, *nftables.ChainHookPostrouting)
}

// TunnelRules is ForwardRules for what nodes send each other for containers (VXLAN): chains that
// see what the node itself sends and receives, or policies by which it is encrypted (IPsec).
func TunnelRules() (string, error) {
	// Of a device the same numbers are its ingress and egress.
	rules, err := foreignRules([]nftables.TableFamily{nftables.TableFamilyNetdev}, *nftables.ChainHookPrerouting,
		*nftables.ChainHookInput, *nftables.ChainHookOutput, *nftables.ChainHookPostrouting, inetIngress)
	if err != nil || rules != "" {
		return rules, err
	}
	policies, err := rtnl.Dump(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(netlink.FAMILY_ALL) })
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return "", nil // a kernel without IPsec
	}
	if err != nil {
		return "", fmt.Errorf("list IPsec policies: %w", err)
	}
	if len(policies) > 0 {
		return "IPsec", nil
	}
	return "", nil
}

// foreignRules names the first such chain at one of hooks, of IP and of more families.
func foreignRules(more []nftables.TableFamily, hooks ...nftables.ChainHook) (string, error) {
	families := append(more, nftables.TableFamilyIPv4, nftables.TableFamilyIPv6, nftables.TableFamilyINet)
	for _, path := range legacyTables {
		raw, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("list iptables: %w", err)
		}
		for _, table := range strings.Fields(string(raw)) {
			if table != "nat" {
				return "table " + table + " of iptables-legacy", nil
			}
		}
	}
	c, err := nftables.New()
	if err != nil {
		return "", fmt.Errorf("open nftables: %w", err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return "", fmt.Errorf("list nftables chains: %w", err)
	}
	for _, chain := range chains {
		if !isForeign(chain, families, hooks) {
			continue
		}
		drops := chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop
		if !drops {
			rules, err := c.GetRules(chain.Table, chain)
			if err != nil {
				return "", fmt.Errorf("list rules of nftables chain %s %s: %w", chain.Table.Name, chain.Name, err)
			}
			drops = len(rules) > 0
		}
		if drops {
			return fmt.Sprintf("nftables chain %s %s %s", tableFamily(chain.Table.Family), chain.Table.Name, chain.Name), nil
		}
	}
	return "", nil
}

// isForeign reports whether chain is one of somebody else's at one of hooks.
func isForeign(chain *nftables.Chain, families []nftables.TableFamily, hooks []nftables.ChainHook) bool {
	return chain.Hooknum != nil && chain.Type != nftables.ChainTypeNAT && slices.Contains(hooks, *chain.Hooknum) &&
		slices.Contains(families, chain.Table.Family) && (chain.Table.Name != Table || chain.Table.Family != nftables.TableFamilyINet)
}

// tableFamily is nft's word.
func tableFamily(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	case nftables.TableFamilyNetdev:
		return "netdev"
	}
	return "inet"
}

package netcfg

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// legacyTables are where a network namespace lists the tables of iptables that are none of
// nftables.
var legacyTables = []string{"/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"}

// ForwardRules names the first chain of this network namespace, none of Heddle's, that may let
// packets which are forwarded not pass: "" if there is none. Such chains see no packet that goes
// past the node's stack. Chains that translate do not count: what they translate is not redirected.
func ForwardRules() (string, error) {
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
		if !seesForwarded(chain) {
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

// seesForwarded reports whether chain is one of somebody else's that the kernel asks about packets
// which are forwarded.
func seesForwarded(chain *nftables.Chain) bool {
	hooks := []nftables.ChainHook{*nftables.ChainHookPrerouting, *nftables.ChainHookForward, *nftables.ChainHookPostrouting}
	families := []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6, nftables.TableFamilyINet}
	return chain.Hooknum != nil && chain.Type != nftables.ChainTypeNAT && slices.Contains(hooks, *chain.Hooknum) &&
		slices.Contains(families, chain.Table.Family) && (chain.Table.Name != firewallTable || chain.Table.Family != nftables.TableFamilyINet)
}

// tableFamily is nft's word.
func tableFamily(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	}
	return "inet"
}

package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/firewall"
)

// forwardRules looks for rules of the node's firewall that are to see packets between containers.
func forwardRules() finding {
	f := finding{name: "net_forward_rules", detail: "the node's firewall has no rules of others that packets between containers pass"}
	rules, err := firewall.ForwardRules()
	if err == nil && rules != "" {
		err = errors.New(rules + " has rules")
	}
	f.err = err
	return f
}

// tunnelRules looks for what is to see what nodes send each other for containers.
func tunnelRules() finding {
	f := finding{name: "net_tunnel_rules", detail: "the node has no rules of others and no IPsec for what nodes send each other"}
	rules, err := firewall.TunnelRules()
	if err == nil && rules != "" {
		err = errors.New(rules + " is to see it")
	}
	f.err = err
	return f
}

// jumbo is the MTU from which on nothing larger is recommended.
const jumbo = 9000

// cardSettings judges what network cards are set to. Larger frames are a recommendation only: all
// of the network has to take them.
func cardSettings(cards []netcfg.Card, err error) finding {
	f := finding{name: "net_cards", err: err}
	var said, wrong []string
	for _, c := range cards {
		text := fmt.Sprintf("%s: %s on, MTU %d", c.Name, strings.Join(c.On, " "), c.MTU)
		if c.MTU < jumbo {
			text += "; 9000 is better where all of the network takes it"
		}
		said = append(said, text)
		for _, need := range []string{"GRO", "GSO"} {
			if slices.Contains(c.Off, need) {
				wrong = append(wrong, c.Name+": "+need+" off")
			}
		}
	}
	if len(wrong) > 0 {
		f.err = errors.New(strings.Join(wrong, ", "))
	}
	if f.detail = strings.Join(said, "; "); len(cards) == 0 {
		f.detail = "no network card is up here"
	}
	return f
}

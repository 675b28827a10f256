package doctor

import (
	"errors"

	"heddle.dev/heddle/internal/netcfg"
)

// forwardRules looks for rules of the node's firewall that are to see packets between containers.
func forwardRules() finding {
	f := finding{name: "net_forward_rules", detail: "the node's firewall has no rules of others that packets between containers pass"}
	rules, err := netcfg.ForwardRules()
	if err == nil && rules != "" {
		err = errors.New(rules + " has rules")
	}
	f.err = err
	return f
}

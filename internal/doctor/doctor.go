// Package doctor probes the machine for what Heddle needs: kernel features, settings and programs.
// It needs no agent. Each probe tries the thing itself where that can be done without leaving
// anything behind, since version numbers say nothing about backports and configuration nothing
// about lockdown. What lacking a thing costs and what to do about it stands in one table,
// meanings.go.
package doctor

import (
	"context"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// finding is what a probe found: err is nil if the thing is there, and says what is wrong
// otherwise. detail is for the reader in both cases and may be empty if err is not nil.
type finding struct {
	name, detail string
	err          error
}

// Run makes every check and reports them in the order of the table. It makes threads in namespaces
// of their own and runs `runc --version`; ctx bounds the latter. Without the privileges an agent
// needs, the checks that need them too are left out, and the check "privileges" says so.
// card is the RDMA device that pairs between nodes are to go by, "" if there is none.
func Run(ctx context.Context, card string) []api.Check {
	h := host{root: "/"}
	found := []finding{probePrivileges(), h.kernel(), h.cgroup2(), h.pidNamespace()}
	if found[0].err == nil {
		found = append(found, privileged()...)
	}
	found = append(found, memlock(), nofile(), h.sysctlsWritable(), h.ipForward(), h.synCookies(),
		h.fwmarkAccept(), ipv6(), h.ipv6Enabled(), h.ipv6Forwarding())
	found = append(found, runc(ctx)...)
	found = append(found, verbsRouter(), verbsUserfaultfd(), verbsLibrary())
	if card != "" {
		found = append(found, h.verbsCard(card))
	}
	found = append(found, stackModules()...)
	return checks(found)
}

// Missing lists the names of the checks without which Heddle does not work.
func Missing(checks []api.Check) []string {
	var names []string
	for _, c := range checks {
		if c.Status == api.CheckMissing {
			names = append(names, c.Name)
		}
	}
	return names
}

// privileged gathers the probes that mean nothing without an agent's privileges.
func privileged() []finding {
	var found []finding
	for _, f := range datapath.Features() {
		found = append(found, finding{f.Name, f.Detail, f.Err})
	}
	found = append(found, probeSeccomp()...)
	features, err := netcfg.Features()
	if err != nil {
		found = append(found, finding{name: "net_namespace", err: err})
	} else {
		found = append(found, finding{name: "net_namespace", detail: "a network namespace of its own"})
	}
	for _, f := range features {
		found = append(found, finding{f.Name, f.Detail, f.Err})
	}
	return append(found, append(probeMounts(), forwardRules(), tunnelRules(), cardSettings(netcfg.Cards()), ownModules())...)
}

// checks gives every finding its meaning.
func checks(found []finding) []api.Check {
	list := make([]api.Check, 0, len(found))
	for _, f := range found {
		if f.err == nil {
			list = append(list, api.Check{Name: f.name, Status: api.CheckOK, Detail: f.detail})
			continue
		}
		m, known := meanings[f.name]
		if !known {
			// A probe was added without its meaning. A test forbids it; be safe and loud all the
			// same.
			m = meaning{required: true, cost: "unknown", remedy: "report this: check " + f.name + " has no meaning"}
		}
		c := api.Check{Name: f.name, Status: api.CheckDegraded, Detail: f.err.Error(), Cost: m.cost, Remedy: m.remedy}
		if m.required {
			c.Status = api.CheckMissing
		}
		list = append(list, c)
	}
	return list
}

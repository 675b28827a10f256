package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// stressModules are stress-ng's stressors of sockets. The question is only whether the program and
// the agent survive: a case has passed if stress-ng ended in good order and its stressor did
// something.
var stressModules = []module{{
	suite: "stress-ng", name: "sockets", fast: slow, limit: 10 * time.Minute,
	prepare: func(ctx context.Context, _ string) error { return machineRun(ctx, nil, "stress-ng", "--version") },
	dir:     func() string { return "/tmp" },
	command: func(_, _ string, s selection, _ time.Duration) []string {
		argv := []string{"bash", "-c", stressScript, "bash", fmt.Sprint(int(stressLimit.Seconds()))}
		for _, name := range stressors {
			if (len(s.only) == 0 || slices.Contains(s.only, name)) && !slices.Contains(s.without, name) {
				argv = append(argv, name)
			}
		}
		return argv
	},
	parse: parseStress,
}}

// stressors are the names of stressors, some with options. All stay on loopback. Left out:
// udp-flood and icmp-flood, which are not about connections and send to random ports; dccp, sctp,
// rawpkt, tun, which this kernel or a container's rights do not allow.
var stressors = []string{
	"sock", "sock --sock-domain ipv6", "sock --sock-opts sendmsg", "sock --sock-opts sendmmsg",
	"sock --sock-nodelay", "sock --sock-zerocopy", "sock --sock-protocol mptcp",
	"sockabuse", "sockfd", "sockmany", "sockpair", "sockdiag", "epoll", "epoll --epoll-domain ipv4", "epoll --epoll-domain ipv6",
	"netdev", "rawsock", "rawudp", "ping-sock", "udp", "udp --udp-domain ipv6",
}

// stressLimit bounds one stressor, which is asked to end after two seconds.
const stressLimit = 30 * time.Second

// stressScript runs the stressors one after another.
//
//go:embed stress.sh
var stressScript string

var (
	stressed = regexp.MustCompile(`(?m)^=== (.*) === (-?\d+)$`)
	// operations is the line of a stressor's metrics: its name and how many operations it made.
	operations = regexp.MustCompile(`(?m)^stress-ng: metrc: \[\d+\] [\w-]+ +(\d+) `)
)

// parseStress reads what the script printed: each stressor's output, then a line with its name and
// exit code.
func parseStress(output, _ []byte) (map[string]caseResult, []string, error) {
	cases := map[string]caseResult{}
	from := 0
	for _, at := range stressed.FindAllSubmatchIndex(output, -1) {
		said := string(output[from:at[0]])
		name, code := string(output[at[2]:at[3]]), string(output[at[4]:at[5]])
		made := operations.FindStringSubmatch(said)
		switch {
		case code != "0":
			cases[name] = caseResult{failed, "exit code " + code + "\n" + said}
		case strings.Contains(said, "skipping stressor") || strings.Contains(said, "not implemented"):
			cases[name] = caseResult{skipped, said}
		case made == nil:
			return nil, nil, fmt.Errorf("no metrics of %s:\n%s", name, said)
		case made[1] == "0":
			cases[name] = caseResult{skipped, "it made no operation\n" + said}
		default:
			cases[name] = caseResult{outcome: passed}
		}
		from = at[1]
	}
	if len(cases) == 0 {
		return nil, nil, errors.New("no stressor ran\n" + tail(output))
	}
	return cases, nil, nil
}

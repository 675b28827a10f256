package netcfg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// How long is between two looks at rules and routes at least, at most, and after one that failed.
const (
	lookPause = 100 * time.Millisecond
	lookEvery = time.Minute
	lookRetry = time.Second
)

// FollowRouting calls look at once and whenever a rule of the network namespace, or a route that
// RestoreRouting has, was removed, until ctx ends. A look that fails is repeated.
func FollowRouting(ctx context.Context, look func() error) error {
	return rtnl.Subscription{
		Protocol: unix.NETLINK_ROUTE, Filter: removedRouting(),
		Groups: 1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1) | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE,
		Pause:  lookPause, Every: lookEvery, Retry: lookRetry,
	}.Follow(ctx, nil, look)
}

// removedRouting lets through what says that a rule was removed, or one of Heddle's routes that
// make addresses unreachable. Others' routes may be many, and change often; so may those of
// endpoints, which come and go by the agent itself.
func removedRouting() []unix.SockFilter {
	const message, routeType = unix.SizeofNlMsghdr, 7 // rtm_type, in a route's header; rtm_protocol is at 5
	kind := func(t uint16) uint32 {
		return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, t)))
	}
	load := func(size uint16, at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | size | unix.BPF_ABS, K: at}
	}
	equal := func(to uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: to}
	}
	return []unix.SockFilter{
		load(unix.BPF_H, 4), // nlmsg_type
		equal(kind(unix.RTM_DELRULE), 5, 0),
		equal(kind(unix.RTM_DELROUTE), 0, 5),
		load(unix.BPF_B, message+5),
		equal(routeProtocol, 0, 3),
		load(unix.BPF_B, message+routeType),
		equal(unix.RTN_UNREACHABLE, 0, 1),
		{Code: unix.BPF_RET | unix.BPF_K, K: rtnl.AnswerBytes},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
}

// RestoreRouting adds those of SetupNode's rules and routes that are not there, and says which: it
// changes nothing else, and lists nothing, so that it may be called often.
func RestoreRouting(cfg NodeConfig) (restored []string, err error) {
	h := rtnl.Each()
	for _, r := range cfg.rules() {
		switch err := h.RuleAdd(r); {
		case err == nil:
			restored = append(restored, fmt.Sprintf("rule %s: fwmark %#x lookup %d", familyName(r.Family), r.Mark, r.Table))
		case !errors.Is(err, unix.EEXIST):
			return restored, fmt.Errorf("add rule fwmark %#x lookup %d: %w", r.Mark, r.Table, err)
		}
	}
	var b rtnl.Batch
	want := cfg.unreachable()
	for _, r := range want {
		addRoute(&b, r)
	}
	failed, err := b.Send()
	if err != nil {
		return restored, err
	}
	var errs []error
	for i, err := range failed {
		if err == nil {
			restored = append(restored, fmt.Sprintf("route unreachable %v", want[i].dst))
		} else if !errors.Is(err, unix.EEXIST) {
			errs = append(errs, err)
		}
	}
	return restored, errors.Join(errs...)
}

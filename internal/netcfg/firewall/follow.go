package firewall

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/google/nftables/binaryutil"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// newGeneration is the kernel's message that somebody's changes of nftables are in force, whatever
// they were: one for each transaction, after those that say what has changed, which nobody needs.
const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

// Follow calls look at once and whenever the rules of the network namespace may have changed, until
// ctx ends: by whom is the process, other than this one, that has changed them last since look was
// called before; "" if nobody has. A look that fails is repeated.
func Follow(ctx context.Context, look func(by string) error) error {
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return fmt.Errorf("follow nftables: %w", err)
	}
	own, by := strings.TrimSpace(string(name)), ""
	return rtnl.Subscription{
		Protocol: unix.NETLINK_NETFILTER, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1), Filter: rtnl.OfTypes(newGeneration),
		Pause: lookPause, Every: lookEvery, Retry: lookRetry,
	}.Follow(ctx, func(m syscall.NetlinkMessage) {
		if who := changedBy(m, own); who != "" {
			by = who
		}
	}, func() error {
		err := look(by)
		by = ""
		return err
	})
}

// How long is between two looks at least, at most, and after one that failed.
const (
	lookPause = 100 * time.Millisecond
	lookEvery = time.Minute
	lookRetry = time.Second
)

// changedBy names the process that message m says has changed rules, unless its name is own.
func changedBy(m syscall.NetlinkMessage, own string) string {
	attrs, err := nl.ParseRouteAttr(m.Data[min(nl.SizeofNfgenmsg, len(m.Data)):])
	if err != nil {
		return ""
	}
	name, pid := "", uint32(0)
	for _, a := range attrs {
		switch {
		case a.Attr.Type == unix.NFTA_GEN_PROC_NAME:
			name = unix.ByteSliceToString(a.Value)
		case a.Attr.Type == unix.NFTA_GEN_PROC_PID && len(a.Value) == 4:
			pid = binaryutil.BigEndian.Uint32(a.Value)
		}
	}
	if name == "" || name == own {
		return ""
	}
	return fmt.Sprintf("%s (process %d)", name, pid)
}

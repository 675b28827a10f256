package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Verdict is what watch prints when connects come to another end than before.
type Verdict struct {
	Allowed bool `json:"allowed"`
}

// watch connects again and again, and prints a Verdict at the first connect and whenever connects
// begin to be refused or to succeed, until its standard input or its lifetime ends. What it tells
// is late by a pause and a connect at most.
func watch(ctx context.Context, s settings, streams Streams) error {
	to, err := netip.ParseAddrPort(s.to)
	if err != nil {
		return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
	}
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	over := ended(streams.In)
	out := json.NewEncoder(streams.Out)
	sa, family := sockaddr(to)
	var last *Verdict
	tick := time.NewTicker(s.pause)
	defer tick.Stop()
	for {
		allowed, err := tryConnect(sa, family)
		if err != nil {
			return fmt.Errorf("watch %s: %w", to, err)
		}
		if v := (Verdict{allowed}); last == nil || *last != v {
			if err := out.Encode(v); err != nil {
				return fmt.Errorf("print verdict: %w", err)
			}
			last = &v
		}
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// connectTimeout bounds a connect of watch: one whose SYN met a rule that had just come into force
// hears nothing.
const connectTimeout = time.Second

// tryConnect reports whether a connect succeeds or is refused; the error is for any other end.
func tryConnect(sa unix.Sockaddr, family int) (allowed bool, err error) {
	for {
		allowed, err = connectOrRefused(sa, family)
		// A connect with a timeout is not taken up again after a signal, and the Go runtime sends
		// some. One that timed out (EINPROGRESS) was neither allowed nor refused: the rule came
		// into force during the handshake.
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EINPROGRESS) {
			return allowed, err
		}
	}
}

func connectOrRefused(sa unix.Sockaddr, family int) (allowed bool, err error) {
	fd, err := openSocket(family)
	if err != nil {
		return false, err
	}
	limit := unix.NsecToTimeval(int64(connectTimeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return false, errors.Join(fmt.Errorf("set SO_SNDTIMEO: %w", err), unix.Close(fd))
	}
	switch err := unix.Connect(fd, sa); err {
	case nil:
		return true, abort(fd)
	case unix.ECONNREFUSED, unix.ECONNABORTED, unix.ECONNRESET:
		// Refused; or ended, because the rule came into force during the handshake.
		return false, unix.Close(fd)
	default:
		return false, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
	}
}
